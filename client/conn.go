// Package client connects to RabbitMQ 4 over AMQP 1.0, publishes messages, and consumes them.
//
// Use it when you need more than package hopback offers: publishers to exchanges, middleware,
// metrics, or your own codec. Package retry adds delayed retries to a handler, and package
// declare creates queues.
//
//   - [Connect] opens a [Conn], which reconnects by itself until [Conn.Close].
//   - [NewPublisher] opens a [Publisher] for a queue or an exchange. [Publisher.Publish] returns
//     nil only when the broker has confirmed the message.
//   - [Conn.Consume] calls a [Handler] for each message of a queue until its ctx ends. [JSON]
//     and [Typed] make a Handler from a function that takes a decoded value.
//   - The error that a handler returns decides what happens to the message: see [Outcome].
//   - [Middleware] wraps handlers: [Timeout], [Recover], retry.With, and those of the packages
//     under middleware.
//
// # Guarantees
//
// hopback acknowledges a message only after its handler has succeeded, or after the broker has
// confirmed the retry copy that replaces it. A crash in between can duplicate a message; it
// can't lose one. So handlers should be idempotent. DESIGN.md lists the invariants.
//
// This package is stable: see docs/versions.md#stability.
package client

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// Conn is a connection to a broker. It reconnects by itself when it is lost, as often as it
// takes, until you call [Conn.Close]. Open one with [Connect]; a program usually needs only one.
// It is safe for concurrent use.
//
// A Conn serves any number of consumers and publishers. It is a pool of AMQP connections:
//
//   - An AMQP connection carries 64 sessions, or fewer if the broker says so. The Conn keeps
//     four of them for itself.
//   - A publisher needs one session and a consumer two: one to receive, and one for its retry
//     copies. Both reserve their sessions when they start.
//   - When all sessions are in use, the Conn opens another AMQP connection, up to
//     [Config.MaxConnections]. It closes that connection after a minute without a session.
//   - Losing one connection doesn't affect the others.
type Conn struct {
	door
	cfg    Config
	log    *slog.Logger
	hooks  *instrumentHooks // nil: no Instrument
	unhook func()           // reports Close to it; set by Connect
	pool   *link.Pool
	events *observer // of Config.OnEvent
	// starving is after how long without a delivery a consumer checks its queue.
	starving time.Duration

	closeOnce sync.Once
	closeErr  error
	closed    chan struct{} // closed when Close is done
	clock     brokerClock
	preparing preparations
	mgmt      *Management
	locks     lockOwners

	mu    sync.Mutex
	users map[closer]struct{}
}

// closer is a consumer or a publisher of a Conn, which must stop before the Conn closes.
type closer interface {
	Shut(ctx context.Context) error
}

// Broker describes the broker, as it introduced itself when the connection was last opened. With
// several AMQP connections, it is the broker of the first one that is up. While none is up,
// Broker returns the zero [Broker].
func (c *Conn) Broker() Broker {
	if w := c.pool.Up(); w != nil {
		return brokerOf(w)
	}
	return Broker{}
}

// Management returns a client for the broker's management node. Pass it to the functions of
// package declare, such as declare.Apply.
func (c *Conn) Management() *Management { return c.mgmt }

// State is the state of a [Conn] at one moment. With several AMQP connections, it describes the
// one in the worst state.
type State struct {
	// Connected reports whether all AMQP connections are up. If neither Connected nor Closed is
	// set, the Conn is rebuilding at least one.
	Connected bool
	// Closed reports whether Close has been called.
	Closed bool
	// Connections is the number of AMQP connections that are up.
	Connections int
	// Since is when Connected last changed.
	Since time.Time
	// Generation is the number of AMQP connections opened so far, including rebuilt and
	// additional ones. The first is 1.
	Generation uint64
	// Endpoint is the URL of the first connection's endpoint, without its password.
	Endpoint string
	// Broker describes the broker of the first connection that is up. While none is up, it is
	// the zero [Broker].
	Broker Broker
	// BlockedSince is when the broker stopped accepting messages on a connection because of a
	// memory or disk alarm. It is zero if no connection is blocked.
	BlockedSince time.Time
	// Attempts is how many attempts to rebuild a connection have failed in a row. If several
	// connections are being rebuilt, it is the highest of their numbers.
	Attempts int
	// Err is why a connection is down: at first the error that ended it, later the error of the
	// last attempt to rebuild it. It is nil if no connection is down.
	Err error
}

// State returns whether the connections are up, and the error if they aren't. To be notified of
// changes, set [Config.OnEvent].
func (c *Conn) State() State {
	s := State{Connected: true, Closed: c.isClosing()}
	s.Since, s.Generation, s.Endpoint = c.pool.State(func(c link.ConnState) {
		if c.Live == nil {
			s.Connected = false
			s.Attempts = max(s.Attempts, c.Attempts)
			if s.Err == nil {
				s.Err = c.Why
			}
			return
		}
		if s.Connections++; s.Connections == 1 {
			s.Broker = brokerOf(c.Live)
		}
		if s.BlockedSince.IsZero() || !c.BlockedSince.IsZero() && c.BlockedSince.Before(s.BlockedSince) {
			s.BlockedSince = c.BlockedSince
		}
	})
	return s
}

func (c *Conn) isClosing() bool { return failure.IsClosed(c.pool.Closing) }

// join registers u, which Close must stop before it closes the connection.
func (c *Conn) join(u closer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosing() {
		return failure.ErrClosed
	}
	c.users[u] = struct{}{}
	return nil
}

func (c *Conn) leave(u closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.users, u)
}

// Broker describes a broker, as it introduced itself when the connection opened. See
// [Conn.Broker].
type Broker struct {
	Product string // "RabbitMQ"
	Version string // "4.3.6"
	Node    string // "rabbit@host"
	Cluster string // the cluster's name
}

// AtLeast reports whether the broker's version is major.minor or later. It returns false if the
// version can't be parsed.
func (b Broker) AtLeast(major, minor int) bool {
	return oldbroker.Version(b.Version).AtLeast(major, minor)
}

// brokerOf is the broker at the other end of a connection.
func brokerOf(w *link.Wire) Broker {
	return Broker{Product: w.Says("product"), Version: w.Version, Node: w.Node, Cluster: w.Says("cluster_name")}
}

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
