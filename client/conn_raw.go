package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
)

// Internal is for hopback's own packages desk, rpc, and stream. It may change at any time.
func (c *Conn) Internal() inside.Conn[*Delivery] { return internal{c} }

// internal is what Internal returns. Package desk reads and writes messages as bytes, because
// decoding would change them. Package stream does so because it is faster. Both open connections
// next to the Conn's for that.
type internal struct{ conn *Conn }

// Closed returns a channel that is closed when the Conn is.
func (in internal) Closed() <-chan struct{} { return in.conn.pool.Closing }

// AwaitVersion waits for a connection, and returns its broker's version.
func (in internal) AwaitVersion(ctx context.Context) (string, error) {
	w, err := in.conn.pool.Wire(ctx)
	if err != nil {
		return "", err
	}
	return w.Broker.Version, nil
}

// Pause is how long to wait before another attempt to connect.
func (in internal) Pause(failures int) time.Duration {
	return link.Backoff(in.conn.cfg.Reconnect).Pause(failures)
}

// rawUser counts what a user of dedicated connections does. That user learns from Closed that
// the Conn is closing.
type rawUser struct{ add func(*instrument.Stats) }

func (u *rawUser) Shut(context.Context) error { return nil }
func (u *rawUser) Count(s *instrument.Stats)  { u.add(s) }

// Join makes Conn.Stats call count until leave is called.
func (in internal) Join(count func(*instrument.Stats)) (leave func()) {
	u := &rawUser{count}
	if in.conn.join(u) != nil {
		return func() {}
	}
	return func() { in.conn.leave(u) }
}

// Handle reports a delivery to the Instrument.
func (in internal) Handle(ctx context.Context, d *Delivery) (context.Context, func(error)) {
	if in.conn.hooks == nil {
		return ctx, func(error) {}
	}
	ctx = d.follow(ctx, in.conn.hooks)
	return ctx, d.observed.Handled
}

// Dial opens a network connection to the endpoint that comes behind places after the one of the
// first connection, or to the next one that can be reached.
func (in internal) Dial(ctx context.Context, behind int) (dedicated.Dialed, error) {
	return in.conn.pool.DialRaw(ctx, behind)
}
