package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hopback/hopback/retry"
)

// contest is one kind of work, done by all its contestants on the same broker in
// turn.
type contest struct {
	name, title string
	real        bool // needs what a hopbacktest broker doesn't have
	maxRounds   int
	contestants []contestant
	pairs       []pair
	limits      []limit
	run         func(ctx context.Context, l *lab, p contestant, size int) (metrics, error)
}

type contestant struct {
	name  string
	peer  any
	fewer int // gets 1/fewer of the messages, since it is slow
}

// pair is a ratio to show, and the target for it: zero means none.
type pair struct {
	ours, peer string
	faster     float64 // rate: at least so many times the peer's
	cpu        float64 // CPU a message: at most so many times the peer's
	allocs     float64 // allocations a message: at most so many more than the peer's
}

// limit is a target for a figure itself: at most, or at least. With memory it holds
// with a hopbacktest broker only, which isn't what the clients wait for.
type limit struct {
	who, metric string
	most, least float64
	memory      bool
}

// rivals are the contestants of pairs with a limit for the client's CPU.
func (c contest) rivals() []contestant {
	var all []contestant
	for _, p := range c.contestants {
		if slices.ContainsFunc(c.pairs, func(q pair) bool { return q.cpu > 0 && (q.ours == p.name || q.peer == p.name) }) {
			all = append(all, p)
		}
	}
	return all
}

// names of contestants
const (
	nHop       = "hopback"
	nRaw       = "go-amqp pipelined"
	nOne       = "go-amqp one by one"
	n091       = "amqp091-go"
	nRepublish = "hopback republish"
	nTraced    = "hopback, otel"
)

func contests() []contest {
	three := []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: n091, peer: amqp091Peer{}}}
	// Traces that aren't sampled, and metrics.
	two := []contestant{{name: nTraced, peer: hopback{traced: true}}, {name: nHop, peer: hopback{}}}
	traced := []pair{{ours: nTraced, peer: nHop, faster: 0.85, allocs: 5}}
	return append([]contest{
		{
			name: "publish", title: "publish, confirmed, 256 B", run: runPublish(256), contestants: three,
			pairs:  []pair{{ours: nHop, peer: nRaw, faster: 1.2, cpu: 0.5}, {ours: nHop, peer: n091, faster: 1, cpu: 0.75}},
			limits: []limit{{who: nHop, metric: rate, least: 80_000, memory: true}},
		},
		{
			name: "publish-alone", title: "publish, confirmed, 256 B, by one caller, one message at a time", run: runPublish(256),
			contestants: []contestant{{name: nHop, peer: hopback{callers: 1}, fewer: 4}, {name: nOne, peer: rawOneByOne{}, fewer: 4}},
			pairs:       []pair{{ours: nHop, peer: nOne, faster: 1, cpu: 0.85}},
		},
		{
			name: "consume", title: "consume and accept, no-op handler, 256 B", run: runConsume(256), contestants: three,
			pairs:  []pair{{ours: nHop, peer: nRaw, faster: 1.05, cpu: 0.45, allocs: 6}, {ours: nHop, peer: n091, faster: 1, cpu: 0.45}},
			limits: []limit{{who: nHop, metric: rate, least: 130_000, memory: true}},
		},
		{
			name: "consume-16", title: "consume and accept, 16 no-op handlers, 256 B", run: runConsume(256),
			contestants: []contestant{{name: nHop, peer: hopback{handlers: 16}}, {name: nRaw, peer: rawPipelined{handlers: 16}}, {name: n091, peer: amqp091Peer{handlers: 16}}},
			pairs:       []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.45}, {ours: nHop, peer: n091, faster: 1, cpu: 0.45}},
			limits:      []limit{{who: nHop, metric: rate, least: 130_000, memory: true}},
		},
		failing(1), failing(16), failing(256),
		{
			name: "publish-16KiB", title: "publish, confirmed, 16 KiB", run: runPublish(16 << 10), contestants: three,
			pairs: []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.6}, {ours: nHop, peer: n091, faster: 1, cpu: 1.05}},
		},
		{
			name: "consume-16KiB", title: "consume and accept, 16 KiB", run: runConsume(16 << 10), contestants: three,
			pairs: []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.65}, {ours: nHop, peer: n091, faster: 1, cpu: 0.75}},
		},
		{name: "otel-publish", title: "publish, confirmed, 256 B, with OpenTelemetry and without", contestants: two, pairs: traced, run: runPublish(256)},
		{name: "otel-consume", title: "consume and accept, 256 B, with OpenTelemetry and without", contestants: two, pairs: traced, run: runConsume(256)},
		idleContest(), streamContest(),
	}, fairContests()...)
}

func failing(concurrency int) contest {
	return contest{
		name: fmt.Sprintf("fail-%d", concurrency), title: fmt.Sprintf("every message fails, handler concurrency %d", concurrency), run: runFailing(concurrency),
		contestants: []contestant{{name: nRepublish, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}},
		pairs:       []pair{{ours: nRepublish, peer: nRaw, faster: 1, cpu: 0.6}},
		limits:      []limit{{who: nRepublish, metric: rate, least: 40_000, memory: true}},
	}
}

// fit bounds what a run puts into the broker to 64 MiB.
func fit(n, size int) int { return max(min(n, 64<<20/size), 8) }

func warmUp(n int) int { return max(n/10, 1) }

func runPublish(size int) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		n = fit(n, size)
		queue, err := l.queue(ctx)
		if err != nil {
			return nil, err
		}
		m := l.newMeter(warmUp(n), n)
		if err := c.peer.(publishPeer).publish(ctx, l.url, queue, body(size), m); err != nil {
			return nil, err
		}
		return m.metrics(), l.holds(ctx, queue, uint64(m.total()))
	}
}

func runConsume(size int) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		n = fit(n, size)
		queue, err := l.queue(ctx)
		if err != nil {
			return nil, err
		}
		m := l.newMeter(warmUp(n), n)
		if err := l.fill(ctx, queue, body(size), m.total()); err != nil {
			return nil, err
		}
		settleDown()
		if err := c.peer.(consumePeer).consume(ctx, l.url, queue, m); err != nil {
			return nil, err
		}
		return m.metrics(), l.holds(ctx, queue, 0)
	}
}

// failDelay keeps each message away after its first failure, until the run is over.
const failDelay = 10 * time.Minute

func runFailing(concurrency int) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		bed, err := l.retryBed(ctx, 1)
		if err != nil {
			return nil, err
		}
		m := l.newMeter(max(warmUp(n), 2*concurrency), n)
		if err := l.fill(ctx, bed.queues[0], body(256), m.total()); err != nil {
			return nil, err
		}
		settleDown()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- c.peer.(failPeer).fail(ctx, l.url, bed, concurrency, m) }()
		select {
		case <-m.done:
		case err := <-ended:
			return nil, fmt.Errorf("ended early: %w", err)
		case <-ctx.Done():
			cancel()
			<-ended
			return nil, ctx.Err()
		}
		// What is in flight may end, and nothing may be left.
		if err := l.holds(ctx, bed.queues[0], 0); err != nil {
			return nil, err
		}
		cancel()
		return m.metrics(), <-ended
	}
}

// retryBed is a topology for retries, with its own names, and its work queues. Its policy
// retries by Republish, once.
type retryBed struct {
	queues []string
	policy retry.Policy
}
