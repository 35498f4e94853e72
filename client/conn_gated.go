package client

import (
	"context"
	"log/slog"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/inside"
)

// gated is what a gated consumer has in addition to a ConsumerConfig.
type gated struct{ inside.Gated[*Delivery] }

// Log is the Conn's logger.
func (in internal) Log() *slog.Logger { return in.conn.log }

// ConsumeGated consumes in turns, for package partition.
func (in internal) ConsumeGated(ctx context.Context, queue string, g inside.Gated[*Delivery]) error {
	source, err := address.Queue(queue).Build()
	if err != nil {
		return err
	}
	// The consumer's isolation and a Control would change how much it holds.
	cfg := ConsumerConfig{Concurrency: g.Concurrency, Prefetch: g.Window, Grace: g.Grace, ConsumerTimeout: g.ConsumerTimeout, NoIsolation: true}
	return in.conn.consume(ctx, queue, source, g.Handler, cfg, &gated{g})
}

// prepare sets what a gated consumer has.
func (g *gated) prepare(a *asked, deps *consumerDeps) {
	if g == nil {
		return
	}
	a.order = func(d *Delivery) (string, bool) { return g.Key(d), true }
	a.gate = g
	// A drain returns nothing before its handlers are done, and a silent queue is left alone.
	deps.SingleActive, deps.Peek = nil, nil
}
