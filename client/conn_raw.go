package client

import (
	"context"
	"errors"

	"github.com/hopback/hopback/internal/rawlink"
)

// Package desk reads and writes messages as bytes, since go-amqp changes them. Package
// stream does so since that is faster. They have connections of their own for that, to
// where the Conn's are.
func init() {
	rawlink.OwnerOf = func(conn any) rawlink.Owner {
		c := conn.(*Conn)
		return rawlink.Owner{Closed: c.closing, Pause: c.cfg.Reconnect.pause}
	}
	rawlink.Dial = func(ctx context.Context, conn any, behind int) (rawlink.Dialed, error) {
		return conn.(*Conn).dialRaw(ctx, behind)
	}
}

// dialRaw makes a network connection, to the endpoint that is so many behind the one that
// the first line uses, or to the next that can be reached.
func (c *Conn) dialRaw(ctx context.Context, behind int) (rawlink.Dialed, error) {
	c.mu.Lock()
	at, cfg, closed := c.lines[0].at, c.lines[0].cfg, c.ctx.Err() != nil
	c.mu.Unlock()
	if closed {
		return rawlink.Dialed{}, &Error{Op: "connect", Kind: ErrClosed}
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
	return rawlink.Dialed{}, errors.Join(errs...)
}

func dialRaw(ctx context.Context, ep endpoint, cfg Config) (rawlink.Dialed, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()
	sasl, _, err := ep.sasl.login(ctx)
	if err != nil {
		return rawlink.Dialed{}, &Error{Op: "connect", Target: ep.shown, Kind: ErrAuthentication, Err: err}
	}
	raw, err := dialEndpoint(ctx, ep, cfg)
	if err != nil {
		return rawlink.Dialed{}, err
	}
	d := rawlink.Dialed{
		Net: raw, Host: "vhost:" + ep.vhost, Name: clip(cfg.Name, maxName-8), Shown: ep.shown,
		Mechanism: sasl.mechanism, IdleTimeout: cfg.IdleTimeout,
	}
	if sasl.mechanism != "EXTERNAL" {
		d.Response = []byte("\x00" + sasl.user + "\x00" + sasl.password)
	}
	return d, nil
}
