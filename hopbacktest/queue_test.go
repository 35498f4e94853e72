package hopbacktest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

func TestQueuesAreLookedAtAndHarmed(t *testing.T) {
	eachVersion(t, hopbacktest.Config{Nodes: []string{"rabbit@a", "rabbit@b"}}, func(t *testing.T, b *hopbacktest.Broker) {
		conn := connect(t, b, client.Config{})
		q := b.Queue("work")
		assert.False(t, q.Exists())
		assert.Zero(t, q.Counts())
		require.ErrorIs(t, q.Forget(), hopbacktest.ErrNoQueue)
		require.ErrorIs(t, q.MoveLeader("rabbit@nowhere"), hopbacktest.ErrNoQueue)
		declared(t, conn, oneQueue(t, "work"))
		p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, p.Publish(t.Context(), "first", func(m *client.Message) { m.Properties.MessageID = "1" }))
		require.NoError(t, p.Publish(t.Context(), "second"))
		assert.Equal(t, hopbacktest.Counts{Ready: 2, Messages: 2}, q.Counts())
		all := q.Messages()
		require.Len(t, all, 2)
		assert.Equal(t, "1", all[0].ID())
		assert.Equal(t, "ready", all[0].State)
		body, err := client.Body(all[0].Message)
		require.NoError(t, err)
		assert.Equal(t, `"first"`, string(body))

		assert.Equal(t, "rabbit@a", q.Leader())
		require.NoError(t, q.MoveLeader("rabbit@b"))
		assert.Equal(t, "rabbit@b", q.Leader())
		err = q.MoveLeader("rabbit@c")
		require.ErrorAs(t, err, new(*argument.Error))
		require.NotErrorIs(t, err, hopbacktest.ErrNoQueue)

		thaw, err := q.Freeze()
		require.NoError(t, err)
		published := make(chan error, 1)
		go func() { published <- p.Publish(t.Context(), "third") }()
		time.Sleep(5 * time.Second)
		assert.Empty(t, published)
		thaw()
		require.NoError(t, <-published)

		release, err := q.HoldConfirms()
		require.NoError(t, err)
		go func() { published <- p.Publish(t.Context(), "fourth") }()
		require.NoError(t, q.Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Ready == 4 }))
		synctest.Wait()
		assert.Empty(t, published)
		release()
		require.NoError(t, <-published)

		require.NoError(t, q.Empty())
		assert.Zero(t, q.Counts().Messages)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, q.Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready > 0 }), context.DeadlineExceeded)
		require.NoError(t, q.Forget())
		assert.False(t, q.Exists())
		var kinds []string
		for _, e := range b.Events() {
			if e.Queue == "work" {
				kinds = append(kinds, e.Kind)
			}
			assert.NotEmpty(t, e.String())
		}
		assert.Subset(t, kinds, []string{"queue declared", "published", "queue deleted"})
	})
}

// A program that follows a broker reads each event once, and notices what it has missed.
func TestEventsAfter(t *testing.T) {
	eachVersion(t, hopbacktest.Config{MaxEvents: 20}, func(t *testing.T, b *hopbacktest.Broker) {
		conn := connect(t, b, client.Config{})
		declared(t, conn, oneQueue(t, "work"))
		p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		var last uint64
		for i := range 30 {
			require.NoError(t, p.Publish(t.Context(), "x"))
			events := b.EventsAfter(last)
			require.NotEmpty(t, events)
			assert.Equal(t, last+1, events[0].Number, "%d", i)
			assert.Equal(t, "published", events[len(events)-1].Kind)
			last = events[len(events)-1].Number
			assert.Empty(t, b.EventsAfter(last))
			assert.Empty(t, b.EventsAfter(last+100))
		}
		all := b.Events()
		require.Len(t, all, 20)
		assert.Equal(t, last, all[19].Number)
		assert.Equal(t, last-19, all[0].Number)
		assert.Equal(t, all, b.EventsAfter(3), "the broker has dropped the others")
		assert.Equal(t, all[15:], b.EventsAfter(last-5))
	})
}

func TestNoEvents(t *testing.T) {
	eachVersion(t, hopbacktest.Config{MaxEvents: -1}, func(t *testing.T, b *hopbacktest.Broker) {
		connect(t, b, client.Config{})
		assert.Empty(t, b.Events())
		assert.Empty(t, b.EventsAfter(0))
	})
}

func TestAMessageIsFoundByItsID(t *testing.T) {
	eachVersion(t, hopbacktest.Config{}, func(t *testing.T, b *hopbacktest.Broker) {
		conn := connect(t, b, client.Config{})
		declared(t, conn, oneQueue(t, "work"))
		p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("work"), client.PublisherConfig{})
		require.NoError(t, err)
		ids := []any{"7", "17", uint64(7), []byte{7}, "", nil, strings.Repeat("x", 400)}
		for _, id := range ids {
			require.NoError(t, p.Publish(t.Context(), fmt.Sprint(id), func(m *client.Message) { m.Properties.MessageID = id }))
		}
		for _, id := range ids[:5] {
			m, ok := b.Queue("work").Message(id)
			require.True(t, ok, "%v", id)
			assert.Equal(t, id, m.Properties.MessageID)
			assert.Equal(t, "ready", m.State)
		}
		for _, id := range []any{nil, "x", 7, struct{}{}, []any{"7"}, ids[6]} {
			_, ok := b.Queue("work").Message(id)
			assert.False(t, ok, "%v", id)
		}
		_, ok := b.Queue("nowhere").Message("7")
		assert.False(t, ok)
	})
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, cfg := range []hopbacktest.Config{{Version: "3.13.0"}, {ConsumerTimeout: -1}, {Heartbeat: -1}, {MaxBytes: -1}} {
		_, err := hopbacktest.New(cfg)
		var bad *argument.Error
		require.ErrorAs(t, err, &bad)
	}
	b, err := hopbacktest.New(hopbacktest.Config{})
	require.NoError(t, err)
	_, err = b.Listen("nonsense")
	require.Error(t, err)
	b.Close()
	b.Close()
	_, err = b.Dial(t.Context(), "tcp", "")
	require.Error(t, err)
	_, err = b.Listen("127.0.0.1:0")
	require.Error(t, err)
}

// With heartbeats an hour apart, a day takes a connection a few dozen frames, and neither end considers it lost.
func TestHeartbeatsAreConfigured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := hopbacktest.Start(t, hopbacktest.Config{Heartbeat: time.Hour})
		conn := connect(t, b, client.Config{IdleTimeout: time.Hour})
		one := b.Connections()[0]
		time.Sleep(24 * time.Hour)
		assert.Equal(t, one.Info().ID, b.Connections()[0].Info().ID, "it is still the same")
		assert.Less(t, one.Frames(hopbacktest.DirectionFromClient), 200)
		require.NoError(t, conn.Close(t.Context()))
	})
}

func TestUsersAndPermissions(t *testing.T) {
	eachVersion(t, hopbacktest.Config{}, func(t *testing.T, b *hopbacktest.Broker) {
		b.AddVHost("team")
		b.AddUser("reader", "secret")
		require.NoError(t, b.SetPermissions("reader", "team", "", "", ".*"))
		require.Error(t, b.SetPermissions("reader", "nowhere", "", "", ".*"))
		_, err := client.Connect(t.Context(), "amqp://reader:wrong@broker/team", client.Config{Dial: b.Dial, Logger: quiet})
		require.ErrorIs(t, err, client.ErrAuthentication)
		_, err = client.Connect(t.Context(), "amqp://reader:secret@broker/", client.Config{Dial: b.Dial, Logger: quiet})
		require.ErrorIs(t, err, client.ErrVirtualHost)
		conn, err := client.Connect(t.Context(), "amqp://reader:secret@broker/team", client.Config{Dial: b.Dial, Logger: quiet})
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), oneQueue(t, "work"))
		require.ErrorIs(t, err, client.ErrUnauthorized)
		require.NoError(t, conn.Close(t.Context()))

		require.NoError(t, b.SetPermissions("reader", "team", "", ".*", ""))
		require.NoError(t, b.SetTopicPermissions("reader", "team", "amq.topic", `^{username}\.`, ""))
		require.Error(t, b.SetTopicPermissions("reader", "nowhere", "amq.topic", "", ""))
		conn, err = client.Connect(t.Context(), "amqp://reader:secret@broker/team", client.Config{Dial: b.Dial, Logger: quiet})
		require.NoError(t, err)
		for key, want := range map[string]error{"reader.a": client.ErrUnroutable, "other.a": client.ErrUnauthorized} {
			p, err := client.NewPublisher[string](t.Context(), conn, address.Exchange("amq.topic", key), client.PublisherConfig{})
			require.NoError(t, err)
			require.ErrorIs(t, p.Publish(t.Context(), "x"), want)
		}
		require.NoError(t, conn.Close(t.Context()))
	})
}
