package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
)

// Connect opens a connection to RabbitMQ. The first connection must succeed; a connection that
// is lost later is rebuilt in the background.
//
// The URL has the form amqp://user:password@host:5672/vhost, or amqps:// for TLS. The defaults
// are user guest, password guest, virtual host "/", and port 5672, or 5671 with TLS.
//
// Connect tries each endpoint once: the URL first, then those of [Config.Endpoints] in order. If
// all of them fail, it returns their errors, joined. No error contains a password. The errors:
//
//   - [*argument.Error]: the URL or cfg is invalid; nothing was tried.
//   - [ErrUnreachable]: no connection could be made, for instance because the port is wrong.
//   - [ErrTLS]: the TLS handshake failed.
//   - [ErrAuthentication]: the broker refused the credentials.
//   - [ErrVirtualHost]: the virtual host doesn't exist, or the user has no access to it.
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
	test := inside.TestSettingsOf(ctx)
	c.pool.RenewAfter, c.starving = cmp.Or(test.RenewAfter, c.pool.RenewAfter), test.Starving
	if err := c.pool.Open(ctx); err != nil {
		return nil, err
	}
	c.unhook = c.hooks.Connect(c.Stats)
	return c, nil
}

// newConn makes a Conn whose pool has no connection yet.
func newConn(cfg Config, eps []link.Endpoint) *Conn {
	c := &Conn{cfg: cfg, log: cfg.Logger, hooks: newInstrumentHooks(cfg.Instrument, cfg.Logger), closed: make(chan struct{}), users: map[closer]struct{}{}}
	c.door = inside.NewDoor[inside.Conn[*Delivery]](internal{c})
	c.events = &observer{call: cfg.OnEvent, log: cfg.Logger, hooks: c.hooks}
	c.pool = c.newPool(eps)
	c.clock.ask = c.askTime
	c.mgmt = newManagement(c.pool.OpenSession, c.pool.Ctx, c.pool.Closing)
	c.mgmt.extra = c.pool.OpenExtra
	c.mgmt.version = func() string { return c.Broker().Version }
	return c
}

// Close shuts the connection down. It drains the consumers as if their ctx had ended, waits
// until the broker has answered all messages of the publishers, and closes the AMQP connections.
//
// When ctx ends first, Close aborts the rest and returns an error that names what it aborted,
// including messages without an answer whose callers have left.
// Close also works while the connection is being rebuilt.
//
// Later calls wait for the first one and return its result. When their ctx ends first, they
// return its error and abort nothing.
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
	return fmt.Errorf("hopback: close: another Close is still running: %w", context.Cause(ctx))
}

// end is the first Close.
func (c *Conn) end(ctx context.Context) error {
	c.mu.Lock()
	c.pool.BeginClose()
	users := make([]closer, 0, len(c.users))
	for u := range c.users {
		users = append(users, u)
	}
	c.mu.Unlock()
	// With the connections gone, nothing waits for their broker any longer. Publishers first note
	// which messages have no answer, so that the loss of a connection hides none of them.
	stopWatching := context.AfterFunc(ctx, func() {
		for _, u := range users {
			if p, ok := u.(*publisher); ok {
				p.Expire()
			}
		}
		c.pool.Abort()
	})
	defer stopWatching()

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

// How many session slots they reserve: a consumer needs one to receive and one for its retry
// copies.
const (
	publisherSessions = 1
	consumerSessions  = 2
)

// newPool makes the Conn's pool. Its first connection isn't open yet.
func (c *Conn) newPool(eps []link.Endpoint) *link.Pool {
	dial := c.cfg.dialing()
	if c.hooks != nil {
		dial.Settlements = c.hooks
	}
	return link.NewPool(link.PoolConfig{
		Dial: dial, MaxConnections: c.cfg.MaxConnections, Backoff: c.cfg.Reconnect,
		Observer: c.events, Requests: poolRequests{c},
	}, eps)
}

// poolRequests are made on the connection that they are about: the Conn's management may be on another.
type poolRequests struct{ c *Conn }

// Leader returns the node that leads the queue Config.PreferLeaderOf, or "" if the broker
// doesn't answer: connecting to any node is better than not connecting.
func (r poolRequests) Leader(ctx context.Context, w *link.Wire) string {
	c := r.c
	if c.cfg.PreferLeaderOf == "" {
		return ""
	}
	management := managementOf(w, c.pool.RenewAfter)
	defer management.close(ctx)
	// The management's path of a queue is that of its address.
	path, err := address.Queue(c.cfg.PreferLeaderOf).Build()
	if err != nil {
		return ""
	}
	status, reply, err := management.Request(ctx, "GET", path, nil)
	if err != nil || status != 200 {
		c.log.Warn("hopback: the node that leads a queue is unknown; any endpoint is used", "queue", c.cfg.PreferLeaderOf, "status", status, "error", err)
		return ""
	}
	fields, _ := reply.(map[string]any)
	leader, _ := fields["leader"].(string)
	return leader
}

// SendToken sends the broker a new token for the connection w.
func (r poolRequests) SendToken(ctx context.Context, w *link.Wire, token string) error {
	management := managementOf(w, r.c.pool.RenewAfter)
	defer management.close(ctx)
	status, reply, err := management.Request(ctx, "PUT", "/auth/tokens", []byte(token))
	if err != nil {
		return err
	}
	if status != http.StatusNoContent && status != http.StatusOK {
		return fmt.Errorf("the broker answered with %d: %s", status, failure.Clip(fmt.Sprint(reply), 200))
	}
	return nil
}
