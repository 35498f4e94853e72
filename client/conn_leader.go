package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/address"
)

// leaderTimeout bounds the question which node leads a queue.
const leaderTimeout = 5 * time.Second

// dial connects to endpoint i, or to another where Config.PreferLeaderOf says so,
// and returns which.
func (c *Conn) dial(ctx context.Context, i int, cfg dialConfig) (*wire, int, error) {
	w, err := c.connect(ctx, c.endpoints[i], cfg)
	if err != nil {
		return nil, i, err
	}
	c.leadsTo(i, w.broker.Node)
	if c.cfg.PreferLeaderOf == "" || len(c.endpoints) == 1 {
		return w, i, nil
	}
	leader := c.leader(ctx, w)
	if leader == "" || leader == w.broker.Node {
		return w, i, nil
	}
	// The endpoint that led to that node earlier comes first.
	others := make([]int, 0, len(c.endpoints))
	c.mu.Lock()
	for j := range c.endpoints {
		if j != i && c.nodes[j] == leader {
			others = append(others, j)
		}
	}
	for j := range c.endpoints {
		if j != i && c.nodes[j] != leader {
			others = append(others, j)
		}
	}
	c.mu.Unlock()
	for _, j := range others {
		other, err := c.connect(ctx, c.endpoints[j], cfg)
		if err != nil {
			continue // the one that we have does
		}
		c.leadsTo(j, other.broker.Node)
		if other.broker.Node == leader {
			closeWire(w)
			return other, j, nil
		}
		closeWire(other)
	}
	return w, i, nil
}

// leadsTo notes which node an endpoint led to.
func (c *Conn) leadsTo(i int, node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[i] = node
}

// leader is the node that leads Config.PreferLeaderOf, or nothing where that
// can't be told: that is no reason to be without a connection.
func (c *Conn) leader(ctx context.Context, w *wire) string {
	ctx, cancel := context.WithTimeout(ctx, leaderTimeout)
	defer cancel()
	management := managementOf(w, c.renewAfter)
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
