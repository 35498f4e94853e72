package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hopback/hopback/internal/clienttest"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/instrumented"
	"github.com/hopback/hopback/internal/link"
)

// Connect opens a connection. It tries each endpoint once: first the URL, then those
// of Config.Endpoints in order. If all fail it returns their errors, joined:
// ErrUnreachable, ErrTLS, ErrAuthentication or ErrVirtualHost. A bad URL or Config is
// an *argument.Error, and nothing is tried. No error contains a password.
//
// The URL has the form amqp://user:password@host:5672/vhost, or amqps:// for TLS. The
// default user and password are guest, the default virtual host is "/", and the
// default port is 5672, or 5671 with TLS.
func Connect(ctx context.Context, url string, cfg Config) (*Conn, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	eps, err := cfg.endpoints(url)
	if err != nil {
		return nil, err
	}
	c := newConn(cfg, eps)
	test := clienttest.From(ctx)
	c.pool.RenewAfter, c.starving = cmp.Or(test.RenewAfter, c.pool.RenewAfter), test.Starving
	if err := c.pool.Open(ctx); err != nil {
		return nil, err
	}
	c.unhook = c.hooks.Connect(c.Stats)
	return c, nil
}

// newConn makes a Conn whose pool has no connection yet.
func newConn(cfg Config, eps []link.Endpoint) *Conn {
	c := &Conn{cfg: cfg, log: cfg.Logger, hooks: instrumented.NewHooks(cfg.Instrument, cfg.Logger), closed: make(chan struct{}), users: map[closer]struct{}{}}
	c.pool = c.newPool(eps)
	c.clock.ask = c.askTime
	c.mgmt = newManagement(c.pool.OpenSession, c.pool.Ctx, c.pool.Closing)
	return c
}

// Close drains the consumers as if their ctx had ended, waits until the publishers'
// messages are answered, and closes the connection. When ctx ends, Close cuts off the
// rest and returns an error that says what. Close also returns while the connection is
// being rebuilt.
//
// Later calls wait for the first, and return its result. When their ctx ends before, they
// return its error and cut nothing off.
func (c *Conn) Close(ctx context.Context) error {
	first := false
	c.closeOnce.Do(func() { first = true })
	if first {
		defer close(c.closed)
		c.closeErr = c.end(ctx)
		return c.closeErr
	}
	select {
	case <-c.closed:
		return c.closeErr
	case <-ctx.Done():
	}
	if failure.IsClosed(c.closed) { // both at once: the result is worth more
		return c.closeErr
	}
	return fmt.Errorf("hopback: close: another Close hasn't ended yet: %w", context.Cause(ctx))
}

// end is the first Close.
func (c *Conn) end(ctx context.Context) error {
	// With the connections gone, nothing waits for their broker any longer.
	stopWatching := context.AfterFunc(ctx, c.pool.Abort)
	defer stopWatching()
	c.mu.Lock()
	c.pool.BeginClose()
	users := make([]closer, 0, len(c.users))
	for u := range c.users {
		users = append(users, u)
	}
	c.mu.Unlock()

	errs := make([]error, len(users))
	var wg sync.WaitGroup
	for i, u := range users {
		wg.Go(func() { errs[i] = u.Shut(ctx) })
	}
	wg.Wait()
	c.mgmt.close(ctx)
	c.pool.Close(ctx)
	c.hooks.Closed(c.unhook)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("hopback: close: %w", err)
	}
	return nil
}
