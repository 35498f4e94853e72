package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/middleware/live"
)

// live starts a worker of a queue with package live, whose handlers run until the end of the test.
func (s *stage) live(host, queue string, ids ...string) {
	s.t.Helper()
	running := make(chan struct{}, len(ids))
	h := live.With(s.conn, live.Config{Host: host, Version: "v7", StuckAfter: time.Nanosecond})(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
		running <- struct{}{}
		<-ctx.Done()
		return client.Requeue{}
	}))
	ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: 10, Grace: time.Millisecond})
	}()
	s.t.Cleanup(func() { stop(); assert.NoError(s.t, <-ended) })
	p, err := client.NewPublisher[string](s.t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(s.t, err)
	for _, id := range ids {
		require.NoError(s.t, p.Publish(s.t.Context(), "the body of "+id, func(m *client.Message) {
			m.Properties.MessageID, m.Properties.Subject, m.Properties.GroupID = id, &queue, &host
		}))
		<-running
	}
}

// await loads the page until it has a text: a worker answers when the broker has bound its queue.
func (s *stage) await(b *browser, text string) (page answer) {
	s.t.Helper()
	for end := time.Now().Add(2 * testPatience); ; { // a worker is found within 12 s
		page = b.get("workers")
		require.Equal(s.t, http.StatusOK, page.status)
		if strings.Contains(page.text, text) {
			return page
		}
		require.True(s.t, time.Now().Before(end), "%s: %s", text, page.text)
		time.Sleep(tick)
	}
}

// The page shows the workers and their running handlers, hostile names as text, and no bodies. A visitor sees what he may.
func TestTheWorkersPage(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Authorize: func(_ *http.Request, a Access) (string, error) {
		if a.Queue == "secrets" {
			return "", errors.New("not yours")
		}
		return "ada", nil
	}})
	s.declare("orders", "secrets")
	b := s.browser()
	assert.Contains(t, b.get("workers").text, "No worker has answered")
	s.live("<b>ada's host</b>", "orders", "<i>order 1</i>", "order-2")
	s.live("hidden host", "secrets", "a secret")
	page := s.await(b, "ada&#39;s host")
	for _, text := range []string{"&lt;b&gt;ada&#39;s host&lt;/b&gt;", "&lt;i&gt;order 1&lt;/i&gt;", "order-2", "v7", "stuck", "2 handlers have run for longer"} {
		assert.Contains(t, page.text, text)
	}
	for _, text := range []string{"<i>", "<b>ada", "hidden host", "a secret", "secrets", "the body of"} {
		assert.NotContains(t, page.text, text)
	}
	assert.NotContains(t, b.get("").text, "hopback.workers", "the workers' queues aren't work queues")
	// Visitors share a watch.
	known := func() chan struct{} {
		s.handler.fleet.mu.Lock()
		defer s.handler.fleet.mu.Unlock()
		return s.handler.fleet.known
	}
	watch := known()
	s.browser().get("workers")
	assert.Equal(t, watch, known())
	require.NotNil(t, watch)
	require.Eventually(t, func() bool { // it ends when nobody has visited for a while
		s.handler.fleet.mu.Lock()
		defer s.handler.fleet.mu.Unlock()
		s.handler.fleet.visited = time.Time{}
		return s.handler.fleet.known == nil
	}, testPatience, tick)
}

// Forged workers with any number of queues ask the authorizer a bounded number of times.
func TestForgedWorkersOnThePage(t *testing.T) {
	t.Parallel()
	asked := 0
	s := newStage(t, Config{Authorize: func(*http.Request, Access) (string, error) { asked++; return "ada", nil }})
	s.handler.fleet.known = make(chan struct{})
	close(s.handler.fleet.known)
	for i := range 1000 {
		w := live.Worker{ID: fmt.Sprint(i), Host: fmt.Sprint("forged-", i)}
		for j := range 20 {
			q := fmt.Sprint("forged-", i, "-", j)
			w.Queues = append(w.Queues, live.Queue{Name: q, Running: 1 << 40, Stuck: 1 << 40, Handled: 1 << 40, Failed: 1 << 40})
			w.Running = append(w.Running, live.Running{Queue: q, Since: time.Now().Add(time.Hour)})
		}
		s.handler.fleet.last.Workers = append(s.handler.fleet.last.Workers, w)
	}
	s.handler.fleet.last.Dropped = 1
	page := s.browser().get("workers")
	assert.Equal(t, http.StatusOK, page.status)
	assert.Less(t, len(page.text), 300_000)
	assert.Contains(t, page.text, "may have forged it")
	assert.LessOrEqual(t, asked, 1100)
}

// An error of the broker is shown, and asked for again only after a while.
func TestWorkersThatCantBeAsked(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }})
	s.handler.fleet.failed, s.handler.fleet.err = time.Now().Add(time.Hour), errors.New("hopback: <b>no</b>")
	page := s.browser().get("workers")
	assert.Equal(t, http.StatusOK, page.status)
	assert.Contains(t, page.text, "be asked: &lt;b&gt;no")
}
