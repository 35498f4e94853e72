package client

import (
	"context"
	"errors"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/dedicated"
)

// Package desk reads and writes messages as bytes, since decoding changes them. Package
// stream does so since that is faster. They have connections of their own for that, to
// where the Conn's are.
func init() {
	dedicated.OwnerOf = func(conn any) dedicated.Owner {
		c := conn.(*Conn)
		return dedicated.Owner{Closed: c.closing, Pause: c.cfg.Reconnect.pause, Join: c.joinRaw, Handle: c.handleRaw}
	}
	dedicated.Dial = func(ctx context.Context, conn any, behind int) (dedicated.Dialed, error) {
		return conn.(*Conn).dialRaw(ctx, behind)
	}
}

// rawUser is a user of raw connections that has numbers. It learns of the end of the Conn by
// Owner.Closed.
type rawUser struct{ add func(stats any) }

func (u *rawUser) shut(context.Context) error { return nil }
func (u *rawUser) count(s *instrument.Stats)  { u.add(s) }

func (c *Conn) joinRaw(count func(stats any)) (leave func()) {
	u := &rawUser{count}
	if c.join(u) != nil {
		return func() {}
	}
	return func() { c.leave(u) }
}

func (c *Conn) handleRaw(ctx context.Context, delivery any) (context.Context, func(error)) {
	if c.hooks == nil {
		return ctx, func(error) {}
	}
	d := delivery.(*Delivery)
	ctx = c.hooks.handle(ctx, d)
	return ctx, d.observed.Load().handled
}

// dialRaw makes a network connection, to the endpoint that is so many behind the one that
// the first line uses, or to the next that can be reached.
func (c *Conn) dialRaw(ctx context.Context, behind int) (dedicated.Dialed, error) {
	c.mu.Lock()
	at, cfg, closed := c.lines[0].at, c.lines[0].cfg, c.ctx.Err() != nil
	c.mu.Unlock()
	if closed {
		return dedicated.Dialed{}, &Error{Op: "connect", Kind: ErrClosed}
	}
	var errs []error
	for i := range c.endpoints {
		ep := c.endpoints[(at+behind+i)%len(c.endpoints)]
		d, err := dialRaw(ctx, ep, cfg)
		if err == nil {
			return d, nil
		}
		errs = append(errs, err)
	}
	return dedicated.Dialed{}, errors.Join(errs...)
}

func dialRaw(ctx context.Context, ep endpoint, cfg Config) (dedicated.Dialed, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()
	sasl, _, err := ep.sasl.login(ctx)
	if err != nil {
		return dedicated.Dialed{}, &Error{Op: "connect", Target: ep.shown, Kind: ErrAuthentication, Err: err}
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return dedicated.Dialed{}, err
	}
	return dedicated.Dialed{
		Net: raw, Host: "vhost:" + ep.vhost, Name: clip(cfg.Name, maxName-8), Shown: ep.shown,
		Mechanism: sasl.mechanism, Response: sasl.response(), IdleTimeout: cfg.IdleTimeout, Login: ep.raw,
	}, nil
}
