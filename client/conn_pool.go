package client

import (
	"context"
	"fmt"
	"net/http"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/link"

	"github.com/hopback/hopback/internal/failure"
)

// How many session slots they reserve: a consumer needs one to receive and one for its retry
// copies.
const (
	publisherSessions = 1
	consumerSessions  = 2
)

// newPool makes the Conn's pool. Its first connection isn't open yet.
func (c *Conn) newPool(eps []link.Endpoint) *link.Pool {
	cfg := link.PoolConfig{
		Dial: c.cfg.dialing(c.hooks.SettledRange()), MaxConnections: c.cfg.MaxConnections, Backoff: c.cfg.Reconnect,
		Observer: c.events, OnConnected: c.hooks.Connected, SendToken: c.sendToken,
	}
	if c.cfg.PreferLeaderOf != "" {
		cfg.Leader = c.leader
	}
	return link.NewPool(cfg, eps)
}

// leader returns the node that leads the queue Config.PreferLeaderOf, or "" if the broker
// doesn't answer: connecting to any node is better than not connecting.
func (c *Conn) leader(ctx context.Context, w *link.Wire) string {
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

// sendToken sends the broker a new token for the connection w.
func (c *Conn) sendToken(ctx context.Context, w *link.Wire, token string) error {
	// The Conn's own may be on another connection.
	management := managementOf(w, c.pool.RenewAfter)
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
