package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// door is embedded in Conn. Its method isn't exported, so that only inside.Of can call it.
type door = inside.Door[inside.Conn[*Delivery]]

// internal is what other packages of hopback get from inside.Of. Package desk reads and writes messages as
// bytes, because decoding would change them. Package stream does so because it is faster. Both open
// connections next to the Conn's for that.
type internal struct{ conn *Conn }

// Closed returns a channel that is closed when the Conn is.
func (in internal) Closed() <-chan struct{} { return in.conn.pool.Closing }

// AwaitVersion waits for a connection, and returns its broker's version.
func (in internal) AwaitVersion(ctx context.Context) (string, error) {
	w, err := in.conn.pool.Wire(ctx)
	if err != nil {
		return "", err
	}
	return w.Version, nil
}

// Pause is how long to wait before another attempt to connect.
func (in internal) Pause(failures int) time.Duration {
	return in.conn.cfg.Reconnect.Pause(failures)
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

// AwaitAlarm returns true once requests wait for the end of an alarm.
func (in internal) AwaitAlarm(ctx context.Context) bool { return in.conn.mgmt.awaitAlarm(ctx) }

// Start calls f, which asks the broker before a consumer starts, again if the connection was lost.
func (in internal) Start(ctx context.Context, queue string, f func() error) error {
	return in.conn.starting(ctx, queue, func(*link.Wire) error { return f() })
}

// Starting is how many consumers are starting.
func (in internal) Starting() int {
	p := &in.conn.preparing
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// Handle reports a delivery to the Instrument.
func (in internal) Handle(ctx context.Context, d *Delivery) (context.Context, func(error)) {
	if in.conn.hooks == nil {
		return ctx, func(error) {}
	}
	ctx = d.follow(ctx, in.conn.hooks)
	return ctx, d.observed.Handled
}

// OpenSession opens a session in a slot that it reserves.
func (in internal) OpenSession(ctx context.Context) (link.Session, func(), error) {
	r := in.conn.pool.Reserve(1)
	s, err := r.Open(ctx)
	if err != nil {
		r.Release()
		return nil, nil, err
	}
	return s, func() { r.Give(s, true); r.Release() }, nil
}

// Dial opens a network connection to the endpoint that comes behind places after the one of the
// first connection, or to the next one that can be reached.
func (in internal) Dial(ctx context.Context, behind int) (link.Dialed, error) {
	return in.conn.pool.DialRaw(ctx, behind)
}

// ReserveReplies reserves a session for the links on which package rpc receives replies.
func (in internal) ReserveReplies(closed func(ctx context.Context), count func(*instrument.Stats)) (link.ReplyPlace, error) {
	c := in.conn
	p := &replyPlace{conn: c, reserved: c.pool.Reserve(1), closed: closed, add: count}
	if err := c.join(p); err != nil {
		p.reserved.Release()
		return nil, failure.MarkUnsent(&failure.Error{Op: "call", Kind: failure.ErrClosed})
	}
	return p, nil
}

// replyPlace has one session at a time, with the links for replies.
type replyPlace struct {
	conn     *Conn
	reserved *link.Reservation
	closed   func(ctx context.Context)
	add      func(*instrument.Stats)
}

func (p *replyPlace) Count(s *instrument.Stats) { p.add(s) }

func (p *replyPlace) Shut(ctx context.Context) error {
	p.closed(ctx)
	return nil
}

func (p *replyPlace) Pause(failures int) time.Duration {
	return p.conn.cfg.Reconnect.Pause(failures)
}

func (p *replyPlace) Leave() {
	p.reserved.Release()
	p.conn.leave(p)
}

func (p *replyPlace) Open(ctx context.Context, source func(oldbroker.Quirks) (link.ReplySource, error)) (link.ReplySession, error) {
	sess, err := p.reserved.OpenWire(ctx)
	if err != nil {
		return nil, link.ReplyError(ctx, err)
	}
	return link.OpenReplies(ctx, sess, source)
}
