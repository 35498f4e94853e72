package browser

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/live"
)

// A person sees which handlers run, and that one ends, without a reload. What hostile messages and workers are named is text.
func TestTheWorkersPageIsLive(t *testing.T) {
	forEachBroker(t, func(s *site, c *chromium) {
		_, err := declare.Apply(s.t.Context(), s.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(s.t, err)
		release := make(chan struct{})
		h := live.With(s.conn, live.Config{Host: hostile, Version: "v1.4.0-a-long-version", StuckAfter: time.Millisecond})(client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			if d.Message().Properties.MessageID == "first-order" {
				select {
				case <-release:
					return nil
				case <-ctx.Done():
				}
			}
			<-ctx.Done()
			return client.Requeue{}
		}))
		ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
		ended := make(chan error, 1)
		go func() {
			ended <- s.conn.Consume(ctx, "orders", h, client.ConsumerConfig{Concurrency: 20, Grace: time.Millisecond})
		}()
		defer func() { stop(); assert.NoError(s.t, <-ended) }()
		p, err := client.NewPublisher[string](s.t.Context(), s.conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(s.t, err)
		for i := range 12 {
			require.NoError(s.t, p.Publish(s.t.Context(), "a body", func(m *client.Message) {
				m.Properties.MessageID = fmt.Sprint("order-", i)
				m.Properties.Subject, m.Properties.GroupID = new("order.placed"), new("tenant-7")
				if i == 0 {
					m.Properties.MessageID = "first-order"
				}
				if i == 5 {
					m.Properties.MessageID, m.Properties.Subject, m.Properties.GroupID = hostile, new(hostile), new(hostile)
				}
			}))
		}
		b := c.tab(s.t)
		b.open(s.page + "workers")
		b.until(`document.body.innerText.includes("order-11") && document.body.innerText.includes("first-order")`)
		b.sees("tenant-7")
		b.sees("v1.4.0-a-long-version")
		b.fits("workers")
		assert.Equal(s.t, nil, b.eval("window.hacked || null"))
		close(release)
		b.until(`!document.body.innerText.includes("first-order") && document.body.innerText.includes("order-11")`)
		b.follow("overview")
		b.sees("Topology")
	})
}
