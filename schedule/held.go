package schedule

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/oldbroker"
)

const (
	// holdersFor is how long an answer about a queue holds: someone may delete the queue, and
	// declare another one by its name.
	holdersFor = 10 * time.Second
	maxHolders = 1000
)

// holders knows which queues hold a published message until its delivery time.
type holders struct {
	mu    sync.Mutex
	known map[string]holder
}

type holder struct {
	holds bool
	until time.Time
}

// holds reports whether a queue is certain to hold messages until their time, and to deliver them
// then: a quorum queue of RabbitMQ 4.4 or later. It asks the broker, unless it has asked recently.
//
// While the connection is being rebuilt, it waits: there may be no ladder.
//
// It is false for a queue with a ttl, which RabbitMQ counts from the publishing: the message would
// expire at its time. It is false for one that drops its oldest message when it is full, because
// waiting messages can make such a queue hang. A RabbitMQ policy that does either isn't seen;
// "hopback topology verify" reports it.
func (h *holders) holds(ctx context.Context, conn *client.Conn, queue string) bool {
	if b := brokerOf(ctx, conn); b.Version == "" || oldbroker.Of(b.AtLeast).DeliversPublishedAtOnce {
		return false
	}
	now := time.Now()
	h.mu.Lock()
	answer, ok := h.known[queue]
	h.mu.Unlock()
	if ok && now.Before(answer.until) {
		return answer.holds
	}
	info, err := declare.Inspect(ctx, conn.Management(), queue)
	for connectionLost(err) && backoff.Sleep(ctx, 100*time.Millisecond) {
		info, err = declare.Inspect(ctx, conn.Management(), queue)
	}
	if ctx.Err() != nil {
		return false // and nothing is published
	}
	answer = holder{holds: err == nil && holdsPublished(info), until: now.Add(holdersFor)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known == nil || len(h.known) >= maxHolders {
		h.known = map[string]holder{}
	}
	h.known[queue] = answer
	return answer.holds
}

// brokerOf waits for a connection, and returns the version of its broker, which is empty if ctx ends, if
// conn is closed, or if the broker doesn't name one.
func brokerOf(ctx context.Context, conn *client.Conn) client.Broker {
	version, _ := inside.Of(conn).AwaitVersion(ctx)
	return client.Broker{Version: version}
}

// readClock reads the broker's clock. While the connection is being rebuilt, it waits.
func (p *Publisher[T]) readClock(ctx context.Context) (brokerclock.Reading, error) {
	for {
		r, err := inside.Of(p.conn).ReadClock(ctx)
		if !connectionLost(err) || !backoff.Sleep(ctx, 100*time.Millisecond) {
			return r, err
		}
	}
}

// connectionLost reports whether err says nothing about the broker, but that the connection was lost.
func connectionLost(err error) bool {
	lost := errors.Is(err, client.ErrConnectionLost) || errors.Is(err, client.ErrOutcomeUnknown)
	return lost && !errors.Is(err, client.ErrClosed)
}

func holdsPublished(q declare.QueueInfo) bool {
	if q.Type != "quorum" || q.Arguments["x-message-ttl"] != nil {
		return false
	}
	limited := q.Arguments["x-max-length"] != nil || q.Arguments["x-max-length-bytes"] != nil
	return !limited || q.Arguments["x-overflow"] == string(declare.OverflowRejectPublish)
}
