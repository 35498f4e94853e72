package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// inFlight is how many messages each peer may have under way: unconfirmed when it
// publishes, unsettled when it consumes.
const inFlight = 256

// lab is the broker, and what was made on it.
type lab struct {
	path
	conn   *client.Conn
	broker client.Broker
	prefix string
	full   float64 // messages a second at full load; see fullLoad
	rounds int
	store  store
	// profile is the file for the present run's CPU profile, or nil.
	profile *os.File

	mu    sync.Mutex
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

// quiet is for what would write to the terminal amid a measurement.
var quiet = slog.New(slog.DiscardHandler)

func (l *lab) close() {
	l.mu.Lock()
	for _, name := range l.streams {
		l.queues[name] = true
	}
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l.store.close()
	l.cleanUp(ctx)
	_ = l.conn.Close(ctx)
}

func (l *lab) cleanUp(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
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

// newMeter is the meter of a run, of which a profile may be wanted.
func (l *lab) newMeter(warm, n int) *meter {
	m := newMeter(warm, n)
	m.profile = l.profile
	return m
}

func (l *lab) name() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.named++
	return fmt.Sprintf("%s%d", l.prefix, l.named)
}

// queue makes an empty quorum queue.
func (l *lab) queue(ctx context.Context) (string, error) {
	q := declare.QuorumQueue{Name: l.name(), DeadLetter: declare.Drop()}
	return q.Name, l.apply(ctx, declare.Topology{Queues: []declare.Queue{q}})
}

func (l *lab) apply(ctx context.Context, t declare.Topology) error {
	l.mu.Lock()
	for _, q := range t.Queues {
		switch q := q.(type) {
		case declare.QuorumQueue:
			l.queues[q.Name] = true
		case declare.Stream: // all runs of a contest share it, until close
		default:
			l.mu.Unlock()
			return fmt.Errorf("a %T isn't cleaned up here", q)
		}
	}
	for _, x := range t.Exchanges {
		l.exchanges[x.Name] = true
	}
	l.mu.Unlock()
	_, err := declare.Apply(ctx, l.conn.Management(), t)
	return err
}

// retryBed is a topology for retries, with names of its own, and its work queues.
type retryBed struct {
	queues []string
	delays []time.Duration
	policy retry.Policy // without a strategy
}

// retryBed has the queues for republishing and for dead-lettering, so that all
// peers work in the same surroundings.
func (l *lab) retryBed(ctx context.Context, queues int, delays ...time.Duration) (*retryBed, error) {
	prefix := l.name()
	b := &retryBed{delays: delays, policy: retry.Policy{MaxRetries: len(delays), Backoff: retry.Delays(delays...), Names: retry.Names{Prefix: prefix + "."}}}
	var work []declare.QuorumQueue
	for i := range queues {
		b.queues = append(b.queues, fmt.Sprintf("%s.work%d", prefix, i))
		work = append(work, declare.QuorumQueue{Name: b.queues[i], DeliveryLimit: 20})
	}
	all := b.policy
	all.Strategy = retry.StrategyAuto
	t, err := retry.Topology(all, work...)
	if err != nil {
		return nil, err
	}
	return b, l.apply(ctx, t)
}

// fill puts n messages into a queue.
func (l *lab) fill(ctx context.Context, queue string, body []byte, n int) error {
	return l.fillVia(ctx, address.Queue(queue), body, n)
}

func (l *lab) fillVia(ctx context.Context, to address.Address, body []byte, n int) error {
	return hopback{}.publishTo(ctx, l.url, to, body, newMeter(1, n-1))
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

// order is the typed message of the JSON cases.
type order struct {
	ID       string   `json:"id"`
	Customer string   `json:"customer"`
	Cents    int      `json:"cents"`
	Paid     bool     `json:"paid"`
	Items    []string `json:"items"`
	Note     string   `json:"note"`
}

// orderBody is an order of exactly size bytes.
func orderBody(size int) []byte {
	o := order{ID: "o-1000001", Customer: "customer-77", Cents: 1995, Paid: true, Items: []string{"apples", "pears", "plums"}}
	b, _ := json.Marshal(o)
	o.Note = strings.Repeat("n", max(size-len(b), 0))
	b, _ = json.Marshal(o)
	return b
}

// messageIDs are cheap to make: no peer is to be slowed by them.
var messageIDs atomic.Uint64

var errFailed = errors.New("the bank timed out")
