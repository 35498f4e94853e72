package client

import (
	"slices"
	"strings"

	"github.com/hopback/hopback/client/instrument"
)

// counted is a consumer or a publisher that reports counts.
type counted interface{ Count(*instrument.Stats) }

// Stats returns counts of the connections, consumers, and publishers, for metrics. It sends
// nothing to the broker, so you can call it often. After Close, there are no consumers and no
// publishers.
func (c *Conn) Stats() instrument.Stats {
	var s instrument.Stats
	c.pool.Count(&s)
	c.mu.Lock()
	users := make([]counted, 0, len(c.users))
	for u := range c.users {
		if u, ok := u.(counted); ok {
			users = append(users, u)
		}
	}
	c.mu.Unlock()
	for _, u := range users {
		u.Count(&s)
	}
	slices.SortFunc(s.Consumers, func(a, b instrument.ConsumerStats) int { return strings.Compare(a.Queue, b.Queue) })
	slices.SortFunc(s.Publishers, func(a, b instrument.PublisherStats) int { return strings.Compare(a.To.String(), b.To.String()) })
	slices.SortFunc(s.Requesters, func(a, b instrument.RequesterStats) int { return strings.Compare(a.To.String(), b.To.String()) })
	return s
}
