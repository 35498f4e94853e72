package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// inFlight is how many messages each peer may have in flight: unconfirmed when it
// publishes, unsettled when it consumes.
const inFlight = 256

// lab is the broker, and what was made on it.
type lab struct {
	path
	conn   *client.Conn
	broker client.Broker
	prefix string
	// profile is the file for the present run's CPU profile, or nil.
	profile *os.File

	named int
	// made is what cleanUp has to delete.
	queues, exchanges map[string]bool
	streams           map[int]string // by their number of messages
}

func openLab(ctx context.Context, p path) (*lab, error) {
	conn, err := client.Connect(ctx, p.url, client.Config{Name: "hopback-bench-lab", Logger: quiet})
	if err != nil {
		return nil, err
	}
	l := &lab{
		path: p, conn: conn, broker: conn.Broker(), prefix: "bench-" + strings.ToLower(rand.Text()[:6]) + "-",
		queues: map[string]bool{}, exchanges: map[string]bool{}, streams: map[int]string{},
	}
	// What the management starts is to be there before the first run, since what a
	// run leaves behind is counted.
	if _, err := declare.DeleteQueue(ctx, conn.Management(), l.name()); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// quiet is for code that would write to the terminal during a measurement.
var quiet = slog.New(slog.DiscardHandler)

func (l *lab) close() {
	for _, name := range l.streams {
		l.queues[name] = true
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l.cleanUp(ctx)
	_ = l.conn.Close(ctx)
}

func (l *lab) cleanUp(ctx context.Context) {
	for q := range l.queues {
		if _, err := declare.DeleteQueue(ctx, l.conn.Management(), q); err == nil {
			delete(l.queues, q)
		}
	}
	for x := range l.exchanges {
		if declare.DeleteExchange(ctx, l.conn.Management(), x) == nil {
			delete(l.exchanges, x)
		}
	}
}

// newMeter is the meter of a run, with a profile if one is wanted.
func (l *lab) newMeter(warm, n int) *meter {
	m := newMeter(warm, n)
	m.profile = l.profile
	return m
}

func (l *lab) name() string {
	l.named++
	return fmt.Sprintf("%s%d", l.prefix, l.named)
}

// queue makes an empty quorum queue.
func (l *lab) queue(ctx context.Context) (string, error) {
	q := declare.QuorumQueue{Name: l.name(), DeadLetter: declare.Drop()}
	return q.Name, l.apply(ctx, declare.Topology{Queues: []declare.Queue{q}})
}

func (l *lab) apply(ctx context.Context, t declare.Topology) error {
	for _, q := range t.Queues {
		switch q := q.(type) {
		case declare.QuorumQueue:
			l.queues[q.Name] = true
		case declare.Stream: // all runs of a contest share it, until close
		default:
			return fmt.Errorf("a %T isn't cleaned up here", q)
		}
	}
	for _, x := range t.Exchanges {
		l.exchanges[x.Name] = true
	}
	_, err := declare.Apply(ctx, l.conn.Management(), t)
	return err
}

// retryBed has the queues for republishing.
func (l *lab) retryBed(ctx context.Context, queues int) (*retryBed, error) {
	prefix := l.name()
	b := &retryBed{policy: retry.Policy{MaxRetries: 1, Backoff: retry.Delays(failDelay), Names: retry.Names{Prefix: prefix + "."}, Strategy: retry.StrategyRepublish}}
	var work []declare.QuorumQueue
	for i := range queues {
		b.queues = append(b.queues, fmt.Sprintf("%s.work%d", prefix, i))
		work = append(work, declare.QuorumQueue{Name: b.queues[i], DeliveryLimit: 20})
	}
	t, err := retry.Topology(b.policy, work...)
	if err != nil {
		return nil, err
	}
	return b, l.apply(ctx, t)
}

// fill puts n messages into a queue.
func (l *lab) fill(ctx context.Context, queue string, body []byte, n int) error {
	return hopback{}.publish(ctx, l.url, queue, body, newMeter(1, n-1))
}

// holds waits until so many messages are ready in the queue.
func (l *lab) holds(ctx context.Context, queue string, want uint64) error {
	var got uint64
	for range 50 {
		info, err := declare.Inspect(ctx, l.conn.Management(), queue)
		if err != nil {
			return err
		}
		if got = info.Messages; got == want {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("queue %s holds %d messages, not %d: this run lost or repeated some", queue, got, want)
}

// body is a message of size bytes.
func body(size int) []byte { return []byte(strings.Repeat("n", size)) }

// messageIDs are cheap to make: no peer is to be slowed by them.
var messageIDs atomic.Uint64

var errFailed = errors.New("the bank timed out")
