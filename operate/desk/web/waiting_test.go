package web

import (
	"context"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// park has a handler park messages of the queue under their bodies, for an hour.
func (s *stage) park(queue string, tokens ...string) {
	s.t.Helper()
	p, err := client.NewPublisher[string](s.t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(s.t, err)
	require.NoError(s.t, p.PublishAll(s.t.Context(), tokens))
	ctx, stop := context.WithTimeout(s.t.Context(), testPatience)
	defer stop()
	consuming, end := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(consuming, queue, client.JSON(func(_ context.Context, token string) error {
			return client.Park{Token: token, Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{})
	}()
	require.NoError(s.t, s.broker.Queue(queue).Await(ctx, func(c hopbacktest.Counts) bool { return c.Delayed == len(tokens) }))
	end()
	require.NoError(s.t, <-ended)
}

// On RabbitMQ 4.4 the buttons cancel, run, and reschedule a waiting message. Each answer is the broker's, and the log says
// who asked for what.
func TestButtonsOfAWaitingMessage(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }}, "4.4.0")
	s.declare("orders")
	s.park("orders", "cancel-me", "run-me", "later")
	b := s.browser()
	queue := s.broker.Queue("orders")
	state := func(ready, delayed int) {
		t.Helper()
		assert.Equal(t, [2]int{ready, delayed}, [2]int{queue.Counts().Ready, queue.Counts().Delayed})
	}
	press := func(token, button, minutes string) answer {
		t.Helper()
		page := b.get("parked?" + url.Values{"in": {"orders"}, "key": {token}}.Encode())
		assert.Equal(t, http.StatusOK, page.status)
		assert.Contains(t, page.text, "Run now")
		return b.post("waiting", url.Values{"in": {"orders"}, "key": {token}, "do": {button}, "minutes": {minutes}})
	}
	state(0, 3)

	says := press("cancel-me", "cancel", "")
	assert.Contains(t, says.text, "1 message was canceled. The broker has confirmed it.")
	state(0, 2)
	says = press("cancel-me", "cancel", "")
	assert.Contains(t, says.text, "No message waits under this token.")

	says = press("later", "reschedule", "soon")
	assert.Equal(t, http.StatusUnprocessableEntity, says.status)
	state(0, 2)
	was := s.due("orders", "later")
	says = press("later", "reschedule", "300")
	assert.Contains(t, says.text, "1 message was rescheduled. The broker has confirmed it.")
	state(0, 2)
	assert.WithinDuration(t, was.Add(4*time.Hour), s.due("orders", "later"), time.Hour/2)

	says = press("run-me", "run-now", "")
	assert.Contains(t, says.text, "1 message was made ready. The broker has confirmed it.")
	state(1, 1)
	says = press("run-me", "run-now", "")
	assert.Contains(t, says.text, "No message waits under this token.", "it is ready, and doesn't wait")

	for _, logged := range []string{
		"waiting messages were canceled", "who=ada", "token=cancel-me messages=1", "token=cancel-me messages=0", "waiting messages were rescheduled", "waiting messages were made ready",
	} {
		assert.Contains(t, s.log.String(), logged)
	}
}

// due is when a waiting message comes.
func (s *stage) due(queue, body string) time.Time {
	s.t.Helper()
	for _, m := range s.broker.Queue(queue).Messages() {
		if string(m.Message.GetData()) == `"`+body+`"` {
			return m.Due
		}
	}
	s.t.Fatalf("no message %q in %s", body, queue)
	return time.Time{}
}

// Before RabbitMQ 4.4 the page says what is missing, with the version, and changes nothing.
func TestWaitingMessagesNeedRabbitMQ44(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0.5", "4.3.6"} {
		s := newStage(t, Config{Writable: true}, version)
		s.declare("orders")
		b := s.browser()
		for _, button := range []string{"cancel", "run-now", "reschedule"} {
			says := b.post("waiting", url.Values{"in": {"orders"}, "key": {"4711"}, "do": {button}, "minutes": {"5"}})
			assert.Equal(t, http.StatusConflict, says.status)
			assert.Contains(t, says.text, "RabbitMQ 4.4 or later, and the broker is "+version)
		}
		assert.NotContains(t, b.settled("./").links(), "parked", "nothing is offered that the broker lacks")
		form := b.get("parked?in=orders&key=4711")
		assert.Equal(t, http.StatusConflict, form.status)
		assert.Contains(t, form.text, "RabbitMQ 4.4 or later, and the broker is "+version)
	}
}

// Without permission to write, the page has no buttons.
func TestWaitingMessagesOfAReadOnlyPage(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{}, "4.4.0")
	s.declare("orders")
	s.park("orders", "4711")
	page := s.browser().get("parked?in=orders&key=4711")
	assert.Contains(t, page.text, "read-only")
	assert.NotContains(t, page.text, "<button name")
	assert.Contains(t, s.browser().settled("./").links(), "parked")
	assert.Equal(t, 1, s.broker.Queue("orders").Counts().Delayed)
}

// Dead letters that RabbitMQ 4.4 hides until their time are on no page, and every page says so.
func TestPagesSayThatDeadLettersAreHidden(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{}, "4.4.0")
	s.declare("orders")
	p, err := client.NewPublisher[string](t.Context(), s.conn, address.Queue("orders.dead"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), "hidden", func(m *client.Message) {
		m.Annotations = map[any]any{"x-opt-delivery-time": time.Now().Add(time.Hour)}
	}))
	b := s.browser()
	overview := b.settled("./")
	assert.Contains(t, overview.text, "waits for its delivery time, and can't be read")
	assert.NotContains(t, overview.text, "No dead letters were found.")
	assert.NotContains(t, overview.text, "No queue has dead letters.")
	messages := b.settled("messages?in=orders.dead")
	assert.Contains(t, messages.text, "1 message waits in it for its delivery time")
	assert.NotContains(t, messages.text, "The queue is empty")
}
