package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link/linktest"
)

// refusedAccess is how RabbitMQ ends a session over a missing permission.
func refusedAccess(text string) error {
	return &amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondUnauthorizedAccess, Description: text}}
}

const noTopic = "write access to topic 'no' in exchange 'shop' in vhost '/' refused for user 'ada'"

// to is a message that names its address.
func to(id, address string) *amqp.Message {
	m := linktest.WithID(id)
	m.Properties.To = &address
	return m
}

func startAnonymous(b *linktest.FakeBroker, cfg senderConfig) *sender {
	cfg.Depth, cfg.Pause, cfg.Overdue = 256, testPause.Pause, linktest.ForEver
	s := newSender("publish", "", cfg, b)
	b.T.Cleanup(s.Cut)
	return s
}

// RabbitMQ ends a session over the first message that may not be published. It hasn't read those
// behind it. It has read the one before, and may have stored it.
func TestAForbiddenMessageIsSingledOut(t *testing.T) {
	for _, resend := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := linktest.NewFakeBroker(t)
			b.Verdict = linktest.Withhold
			s := startAnonymous(b, senderConfig{Resend: resend})
			answers := map[string]<-chan error{}
			for _, m := range []*amqp.Message{
				to("before", "/exchanges/shop/ok"), to("forbidden", "/exchanges/shop/no"), to("behind", "/exchanges/shop/ok"), to("forbidden, too", "/exchanges/shop/no"),
			} {
				answers[linktest.IDOf(m)] = async(func() error { return s.Do(t.Context(), m) })
				synctest.Wait()
			}
			b.Accepting()
			b.Kill(refusedAccess(noTopic))
			for _, id := range []string{"forbidden", "forbidden, too"} {
				err := <-answers[id]
				require.ErrorIs(t, err, failure.ErrUnauthorized)
				assert.NotErrorIs(t, err, failure.ErrOutcomeUnknown)
				assert.True(t, failure.SafeToRetry(err))
			}
			require.NoError(t, <-answers["behind"], "it is sent even without resending: it was never read")
			if err := <-answers["before"]; resend {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
				assert.NotErrorIs(t, err, failure.ErrUnauthorized)
			}
			require.NoError(t, s.Close(within(t, time.Hour)))
		})
	}
}

// A message that an earlier link may have stored is unknown, although it is forbidden now.
func TestAForbiddenMessageThatMayBeStoredIsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Verdict = linktest.Withhold
		s := startAnonymous(b, senderConfig{Resend: true})
		answer := async(func() error { return s.Do(t.Context(), to("m", "/exchanges/shop/no")) })
		synctest.Wait()
		b.Kill(linktest.ErrFakeConn)
		synctest.Wait()
		time.Sleep(time.Minute) // the next link has it
		b.Kill(refusedAccess(noTopic))
		err := <-answer
		require.ErrorIs(t, err, failure.ErrOutcomeUnknown)
		require.ErrorIs(t, err, failure.ErrUnauthorized, "the reason is there")
		assert.False(t, failure.SafeToRetry(err))
		require.ErrorContains(t, err, "set_topic_permissions")
	})
}

func TestWhatATextAboutAPermissionNames(t *testing.T) {
	t.Parallel()
	cc := to("cc", "/exchanges/shop/ok")
	cc.Annotations = amqp.Annotations{"x-cc": []any{"a", "no"}}
	const queue = "write access to exchange 'amq.default' in vhost '/' refused for user 'ada'"
	for _, c := range []struct {
		text, target string
		m            *amqp.Message
		names        bool
	}{
		{noTopic, "/exchanges/shop/no", linktest.WithID("m"), true},
		{noTopic, "/exchanges/shop/nope", linktest.WithID("m"), false},
		{noTopic, "/exchanges/other/no", linktest.WithID("m"), false},
		{noTopic, "/exchanges/shop/ok", to("m", "/exchanges/shop/no"), false}, // the link's address counts
		{noTopic, "", to("m", "/exchanges/shop/no"), true},
		{noTopic, "", cc, true},
		{noTopic, "", linktest.WithID("m"), false},
		{noTopic, "", to("m", "no"), false},
		{queue, "", to("m", "/queues/q"), true},
		{queue, "", to("m", "/exchanges/shop/no"), false},
		{"forbidden to publish to internal exchange 'inner' in vhost '/'", "", to("m", "/exchanges/inner"), true},
		{"read access to exchange 'shop' in vhost '/' refused for user 'ada'", "", to("m", "/exchanges/shop/no"), false},
		{"write access to topic 'it's' in exchange 'a'b' in vhost '/' refused for user 'ada'", "", to("m", "/exchanges/a%27b/it%27s"), true},
		{"", "", to("m", "/exchanges/shop/no"), false},
	} {
		assert.Equal(t, c.names, names(c.text, c.target, c.m), "%s: %s", c.text, c.target)
	}
}
