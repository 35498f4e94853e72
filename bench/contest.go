package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// contest is one kind of work, done by all its contestants on the same broker in
// turn.
type contest struct {
	name, title string
	quick, long bool // quick: also with -quick; long: only with -long
	drawn       bool // in the SVG
	budget      bool // also with -client
	postgres    bool // needs one
	real        bool // needs what a hopbacktest broker hasn't
	maxRounds   int
	contestants []contestant
	pairs       []pair
	limits      []limit
	run         func(ctx context.Context, l *lab, p contestant, size int) (metrics, error)
}

type contestant struct {
	name  string
	peer  any
	fewer int // takes 1/fewer of the messages, since it is slow
	needs func(client.Broker) bool
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

// judged says whether a limit for the client's CPU is set.
func (c contest) judged() bool {
	return c.budget && slices.ContainsFunc(c.pairs, func(p pair) bool { return p.cpu > 0 })
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
	nOfficial  = "official client"
	n091       = "amqp091-go"
	nWatermill = "watermill-amqp"

	nBatch      = "hopback, batches"
	nHop100     = "hopback, 100 handlers"
	nRepublish  = "hopback republish"
	nTraced     = "hopback, otel"
	nDeadLetter = "hopback dead-letter"
	nCentral    = "hopback central"
	nPublished  = "hopback central, published"
	nTwoCentral = "two hopback central"
	nNative     = "hopback native"
	nTextbook   = "textbook (go-amqp)"
	nOffBook    = "textbook (official)"
	n091Book    = "textbook (amqp091-go)"
	nRawDead    = "go-amqp modify, dead"
	nRawNative  = "go-amqp modify, native"
)

// basicContests are those of publishing and consuming small messages.
func basicContests() []contest {
	return []contest{
		{
			name: "publish", title: "publish, confirmed, 256 B", quick: true, drawn: true, budget: true, run: runPublish(256),
			contestants: []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: nOne, peer: rawOneByOne{}, fewer: 10},
				{name: nOfficial, peer: official{}}, {name: n091, peer: amqp091Peer{}}, {name: nWatermill, peer: watermillPeer{}, fewer: 2}},
			pairs: []pair{{ours: nHop, peer: nRaw, faster: 1.2, cpu: 0.5}, {ours: nHop, peer: nOne, faster: 15}, {ours: nHop, peer: nOfficial},
				{ours: nHop, peer: n091, faster: 1, cpu: 0.75}, {ours: nHop, peer: nWatermill}},
			limits: []limit{{who: nHop, metric: rate, least: 80_000, memory: true}},
		},
		{
			name: "publish-alone", title: "publish, confirmed, 256 B, by one caller, one message at a time", budget: true, run: runPublish(256),
			contestants: []contestant{{name: nHop, peer: hopback{callers: 1}, fewer: 4}, {name: nOne, peer: rawOneByOne{}, fewer: 4}, {name: n091, peer: amqp091Peer{alone: true}, fewer: 4}},
			pairs:       []pair{{ours: nHop, peer: nOne, faster: 1, cpu: 0.85}, {ours: nHop, peer: n091}},
		},
		{
			name: "consume", title: "consume and accept, no-op handler, 256 B", quick: true, drawn: true, budget: true, run: runConsume(256, false),
			contestants: consumers(),
			pairs: []pair{{ours: nHop, peer: nRaw, faster: 1.05, cpu: 0.45, allocs: 6}, {ours: nHop, peer: nOfficial},
				{ours: nHop, peer: n091, faster: 1, cpu: 0.45}, {ours: nHop, peer: nWatermill}},
			limits: []limit{{who: nHop, metric: rate, least: 130_000, memory: true}},
		},
		{
			name: "consume-16", title: "consume and accept, 16 no-op handlers, 256 B", budget: true, run: runConsume(256, false),
			contestants: []contestant{{name: nHop, peer: hopback{handlers: 16}}, {name: nRaw, peer: rawPipelined{handlers: 16}}, {name: n091, peer: amqp091Peer{handlers: 16}}},
			pairs:       []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.45}, {ours: nHop, peer: n091, faster: 1, cpu: 0.45}},
			limits:      []limit{{who: nHop, metric: rate, least: 130_000, memory: true}},
		},
		{
			name: "consume-json", title: "consume and accept, typed JSON handler, 256 B", quick: true, drawn: true, run: runConsume(256, true),
			contestants: consumers(),
			pairs: []pair{{ours: nHop, peer: nRaw, faster: 0.95, allocs: 6}, {ours: nHop, peer: nOfficial},
				{ours: nHop, peer: n091}, {ours: nHop, peer: nWatermill}},
		},
	}
}

func contests() []contest {
	all := basicContests()
	// Traces that aren't sampled, and metrics.
	two := []contestant{{name: nTraced, peer: hopback{traced: true}}, {name: nHop, peer: hopback{}}}
	followed := []pair{{ours: nTraced, peer: nHop, faster: 0.85, allocs: 5}}
	all = append(all,
		contest{name: "otel-publish", title: "publish, confirmed, 256 B, with OpenTelemetry and without", quick: true, contestants: two, pairs: followed, run: runPublish(256)},
		contest{name: "otel-consume", title: "consume and accept, 256 B, with OpenTelemetry and without", quick: true, contestants: two, pairs: followed, run: runConsume(256, false)})
	// A batch of 100 against a handler of single messages, with as many handlers and with one.
	// With 256 under way there would be two batches and a half, so that every third would wait
	// for the broker.
	const five = 500
	batches := []contestant{{name: nBatch, peer: hopback{batch: 100, window: five}}, {name: nHop, peer: hopback{window: five}}, {name: nHop100, peer: hopback{handlers: 100, window: five}}}
	all = append(all, contest{
		name: "batch", title: "consume and accept, typed JSON handler, 256 B, in batches of 100 and one by one", contestants: batches,
		pairs: []pair{{ours: nBatch, peer: nHop, faster: 1}, {ours: nBatch, peer: nHop100}}, run: runConsume(256, true),
	}, contest{
		name: "batch-1ms", title: "the same with a handler that takes 1 ms, as a statement in a database does", contestants: slowed(batches, time.Millisecond),
		pairs: []pair{{ours: nBatch, peer: nHop, faster: 1}, {ours: nBatch, peer: nHop100}}, run: runConsume(256, true),
	})
	for _, concurrency := range []int{1, 16, 256} {
		all = append(all, failing(concurrency))
	}
	all = append(all, contest{
		name: "central", title: "every message fails: handled by the central retrier, and by the decorator with 16 handlers", run: runCentral,
		contestants: []contestant{{name: nCentral, peer: centralPeer{}}, {name: nPublished, peer: centralPeer{published: true}}, {name: nRepublish, peer: hopback{strategy: retry.StrategyRepublish}}},
		pairs:       []pair{{ours: nCentral, peer: nRepublish, faster: 1}, {ours: nPublished, peer: nRepublish, faster: 1}},
	})
	all = append(all, contest{
		name: "central-whole", title: "the same from the work queue on: rejected, dead-lettered, forwarded", run: runCentral,
		contestants: []contestant{{name: nCentral, peer: centralPeer{whole: true}}, {name: nRepublish, peer: hopback{strategy: retry.StrategyRepublish}}},
		pairs:       []pair{{ours: nCentral, peer: nRepublish}},
	})
	const twice = "failures handled by two central retriers, and by one"
	for _, c := range []struct {
		name, title string
		one         centralPeer
		fewer       int
		faster      float64
	}{
		{name: "central-two", title: twice},
		{
			name: "central-two-far", title: fmt.Sprintf("the same, %v away, with a window of %d each", farBroker, farWindow),
			one: centralPeer{distance: farBroker, window: farWindow}, fewer: 4, faster: 1.6,
		},
	} {
		both := c.one
		both.instances = 2
		all = append(all, contest{
			name: c.name, title: c.title, run: runCentral,
			contestants: []contestant{{name: nTwoCentral, peer: both, fewer: c.fewer}, {name: nCentral, peer: c.one, fewer: c.fewer}},
			pairs:       []pair{{ours: nTwoCentral, peer: nCentral, faster: c.faster}},
		})
	}
	all = append(all, contest{
		name: "latency", title: "from Publish to the handler, at a tenth of full load, 256 B", quick: true, run: runLatency,
		contestants: []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: nOfficial, peer: official{}}, {name: n091, peer: amqp091Peer{}}},
		pairs:       []pair{{ours: nHop, peer: nRaw}, {ours: nHop, peer: nOfficial}, {ours: nHop, peer: n091}},
	})
	all = append(all, calling(1), calling(64))
	for _, d := range []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second} {
		all = append(all, contest{
			name: "lateness-" + d.String(), title: "lateness over an asked delay of " + d.String() + ", idle broker", quick: d < time.Second, maxRounds: 3, run: runLateness(d),
			contestants: []contestant{{name: nRepublish, peer: hopback{strategy: retry.StrategyRepublish}}, {name: nDeadLetter, peer: hopback{strategy: retry.StrategyDeadLetter}},
				{name: nNative, peer: hopback{strategy: retry.StrategyNative}, needs: since43}, {name: nTextbook, peer: rawOneByOne{}}, {name: nRawNative, peer: rawModify{native: true}, needs: since43}},
			pairs:  []pair{{ours: nRepublish, peer: nTextbook}, {ours: nNative, peer: nRawNative}},
			limits: []limit{{who: nRepublish, metric: p99, most: 10}, {who: nDeadLetter, metric: p99, most: 10}, {who: nNative, metric: p99, most: 10}},
		})
	}
	all = append(all, contest{
		name: "recovery", title: "from a cut connection to the next message handled", run: runRecovery, maxRounds: 5,
		contestants: []contestant{{name: nHop, peer: hopback{}}, {name: nOfficial, peer: official{}}, {name: nWatermill, peer: watermillPeer{}}},
		pairs:       []pair{{ours: nHop, peer: nOfficial}, {ours: nHop, peer: nWatermill}},
	})
	for _, size := range []int{64, 1 << 10, 16 << 10, 128 << 10, 1 << 20} {
		name := sizeName(size)
		three := []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: n091, peer: amqp091Peer{}}}
		publish, consume := []pair{{ours: nHop, peer: nRaw}, {ours: nHop, peer: n091}}, []pair{{ours: nHop, peer: nRaw}, {ours: nHop, peer: n091}}
		rounds, budget := 3, size == 16<<10
		if budget {
			rounds = 0
			publish = []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.6}, {ours: nHop, peer: n091, faster: 1, cpu: 1.05}}
			consume = []pair{{ours: nHop, peer: nRaw, faster: 1, cpu: 0.65}, {ours: nHop, peer: n091, faster: 1, cpu: 0.75}}
		}
		all = append(all,
			contest{name: "publish-" + name, title: "publish, confirmed, " + name, maxRounds: rounds, budget: budget, contestants: three, pairs: publish, run: runPublish(size)},
			contest{name: "consume-" + name, title: "consume and accept, " + name, maxRounds: rounds, budget: budget, contestants: three, pairs: consume, run: runConsume(size, false)})
	}
	all = append(all, idleContest(), streamContest())
	shared := func(name, title string, long bool, queues ...int) contest {
		c := contest{name: name, title: title, long: long, maxRounds: 3, run: runShared}
		for _, q := range queues {
			c.contestants = append(c.contestants, contestant{name: queuesName(q), peer: q})
		}
		for _, q := range queues[1:] {
			c.pairs = append(c.pairs, pair{ours: queuesName(q), peer: queuesName(queues[0])})
		}
		return c
	}
	all = append(all, relayContests()...)
	return append(all,
		shared("shared", "each message fails once, comes back after 1 s: queues sharing one delay queue", false, 1, 100),
		shared("shared-1000", "the same with 1,000 queues", true, 1, 1000),
		contest{
			name: "parked", title: "client heap with messages parked in delay (-parked of them)", long: true, maxRounds: 1, run: runParked,
			contestants: []contestant{{name: nRepublish, peer: hopback{strategy: retry.StrategyRepublish}}, {name: nNative, peer: hopback{strategy: retry.StrategyNative}, needs: since43}},
			limits:      []limit{{who: nRepublish, metric: heap, most: 4}, {who: nNative, metric: heap, most: 4}},
		})
}

func consumers() []contestant {
	return []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: nOfficial, peer: official{}},
		{name: n091, peer: amqp091Peer{}}, {name: nWatermill, peer: watermillPeer{}}}
}

// slowed are contestants whose handlers take d.
func slowed(all []contestant, d time.Duration) []contestant {
	var slow []contestant
	for _, c := range all {
		p := c.peer.(hopback)
		p.takes = d
		c.peer = p
		if p.batch == 0 && p.handlers == 0 {
			c.fewer = 10
		}
		slow = append(slow, c)
	}
	return slow
}

func failing(concurrency int) contest {
	slow := map[int]int{1: 20, 16: 4, 256: 2}[concurrency]
	c := contest{
		name: fmt.Sprintf("fail-%d", concurrency), title: fmt.Sprintf("every message fails, handler concurrency %d", concurrency),
		quick: concurrency == 1, drawn: true, budget: true, run: runFailing(concurrency),
		contestants: []contestant{{name: nRepublish, peer: hopback{strategy: retry.StrategyRepublish}}, {name: nDeadLetter, peer: hopback{strategy: retry.StrategyDeadLetter}},
			{name: nNative, peer: hopback{strategy: retry.StrategyNative}, needs: since43},
			{name: nTextbook, peer: rawOneByOne{}, fewer: slow}, {name: nOffBook, peer: official{}, fewer: slow}, {name: n091Book, peer: amqp091Peer{}, fewer: slow},
			{name: nRawDead, peer: rawModify{}}, {name: nRawNative, peer: rawModify{native: true}, needs: since43}},
	}
	targets := map[string]float64{}
	rawNative := 0.0
	c.contestants = append(c.contestants, contestant{name: nRaw, peer: rawPipelined{}})
	c.pairs = append(c.pairs, pair{ours: nRepublish, peer: nRaw, faster: 1, cpu: 0.6})
	c.limits = []limit{{who: nRepublish, metric: rate, least: 40_000, memory: true}}
	if concurrency == 1 {
		targets = map[string]float64{nRepublish: 12, nDeadLetter: 20, nNative: 20}
		rawNative = 1.1
	}
	c.pairs = append(c.pairs, pair{ours: nDeadLetter, peer: nRawDead}, pair{ours: nNative, peer: nRawNative, faster: rawNative})
	for _, ours := range []string{nRepublish, nDeadLetter, nNative} {
		c.pairs = append(c.pairs, pair{ours: ours, peer: nTextbook, faster: targets[ours]})
	}
	c.pairs = append(c.pairs, pair{ours: nRepublish, peer: nOffBook}, pair{ours: nRepublish, peer: n091Book})
	return c
}

func sizeName(n int) string {
	switch {
	case n >= 1<<20:
		return strconv.Itoa(n>>20) + "MiB"
	case n >= 1<<10:
		return strconv.Itoa(n>>10) + "KiB"
	}
	return strconv.Itoa(n) + "B"
}

func queuesName(n int) string {
	if n == 1 {
		return "1 queue"
	}
	return fmt.Sprintf("%d queues", n)
}

// With these in "central-two-far" one instance does some hundred messages a second, whatever
// else goes on: it waits for round trips, and the broker has next to nothing to do.
const (
	farBroker = 200 * time.Millisecond // in each direction
	farWindow = 250
)

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
		if err := c.peer.(publishPeer).publish(ctx, l.url, queue, orderBody(size), m); err != nil {
			return nil, err
		}
		return m.metrics(), l.holds(ctx, queue, uint64(m.total()))
	}
}

func runConsume(size int, json bool) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		n = fit(n, size)
		queue, err := l.queue(ctx)
		if err != nil {
			return nil, err
		}
		m := l.newMeter(warmUp(n), n)
		if err := l.fill(ctx, queue, orderBody(size), m.total()); err != nil {
			return nil, err
		}
		settleDown()
		if err := c.peer.(consumePeer).consume(ctx, l.url, queue, json, m); err != nil {
			return nil, err
		}
		return m.metrics(), l.holds(ctx, queue, 0)
	}
}

func runFailing(concurrency int) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		const delay = 10 * time.Minute // so that each message fails once
		bed, err := l.retryBed(ctx, 1, delay)
		if err != nil {
			return nil, err
		}
		m := l.newMeter(max(warmUp(n), 2*concurrency), n)
		if err := l.fill(ctx, bed.queues[0], orderBody(256), m.total()); err != nil {
			return nil, err
		}
		settleDown()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			ended <- c.peer.(failPeer).fail(ctx, l.url, bed, concurrency, func([]byte) (time.Duration, bool) { m.tick(); return delay, true })
		}()
		select {
		case <-m.done:
		case err := <-ended:
			return nil, fmt.Errorf("ended early: %w", err)
		case <-ctx.Done():
			cancel()
			<-ended
			return nil, ctx.Err()
		}
		// What is under way may end, and nothing may be left.
		if err := l.holds(ctx, bed.queues[0], 0); err != nil {
			return nil, err
		}
		cancel()
		return m.metrics(), <-ended
	}
}

// runCentral handles failures that are in the failed queue: rejected ones, or those that
// their worker has published. With whole a worker rejects them meanwhile. Its peer, a decorator, handles messages that fail in their work
// queue.
func runCentral(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	central, ok := c.peer.(centralPeer)
	if !ok {
		return runFailing(16)(ctx, l, c, n)
	}
	bed, err := l.retryBed(ctx, 1, 10*time.Minute)
	if err != nil {
		return nil, err
	}
	cfg := retry.CentralConfig{Queues: bed.queues}
	t, err := retry.CentralTopology(bed.policy, cfg)
	if err != nil {
		return nil, err
	}
	if err := l.apply(ctx, t); err != nil {
		return nil, err
	}
	if err := retry.TakeOver(ctx, l.conn.Management(), bed.policy, cfg); err != nil {
		return nil, err
	}
	// The first window costs no settlement.
	m := l.newMeter(max(warmUp(n), 2*central.prefetch()*central.all()), n)
	switch {
	case central.whole:
		err = l.fill(ctx, bed.queues[0], orderBody(256), m.total())
	case central.published:
		err = l.fillVia(ctx, address.Exchange(bed.policy.Names.Prefix+"given_up_exchange", bed.queues[0]), orderBody(256), m.total())
	default:
		err = l.reject(ctx, bed.queues[0], cfg.FailedQueueOf(bed.policy), m.total())
	}
	if err != nil {
		return nil, err
	}
	settleDown()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- central.run(ctx, l.url, bed, cfg, m) }()
	select {
	case <-m.done:
	case err := <-ended:
		return nil, fmt.Errorf("ended early: %w", err)
	case <-ctx.Done():
		cancel()
		<-ended
		return nil, ctx.Err()
	}
	if err := l.holds(ctx, cfg.FailedQueueOf(bed.policy), 0); err != nil {
		return nil, err
	}
	cancel()
	return m.metrics(), <-ended
}

// runLatency sends at a tenth of what a raw publisher and a raw consumer do together.
func runLatency(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	full, err := l.fullLoad(ctx, n)
	if err != nil {
		return nil, err
	}
	queue, err := l.queue(ctx)
	if err != nil {
		return nil, err
	}
	settleDown()
	n = max(n/5, 200)
	warm := warmUp(n)
	every := time.Duration(10 / full * float64(time.Second))
	in := make(chan []byte, warm+n) // never blocks: a slow peer doesn't slow the clock
	var mu sync.Mutex
	var took []time.Duration
	got := 0
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	start := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- c.peer.(streamPeer).stream(ctx, l.url, queue, in, sync.OnceFunc(func() { close(start) }), func(body []byte) {
			d := time.Duration(time.Now().UnixNano() - int64(binary.BigEndian.Uint64(body)))
			mu.Lock()
			defer mu.Unlock()
			if got++; got > warm {
				took = append(took, d)
			}
			if got == warm+n {
				close(done)
			}
		})
	}()
	select {
	case <-start:
	case err := <-ended:
		return nil, fmt.Errorf("ended early: %w", err)
	}
	for i, next := 0, time.Now(); i < warm+n && ctx.Err() == nil; i++ {
		time.Sleep(time.Until(next))
		next = next.Add(every)
		body := make([]byte, 256)
		binary.BigEndian.PutUint64(body, uint64(time.Now().UnixNano()))
		in <- body
	}
	select {
	case <-done:
	case err := <-ended:
		return nil, fmt.Errorf("ended early: %w", err)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	cancel()
	err = <-ended
	return timings(took), err
}

// fullLoad is measured once.
func (l *lab) fullLoad(ctx context.Context, n int) (float64, error) {
	if l.full > 0 {
		return l.full, nil
	}
	queue, err := l.queue(ctx)
	if err != nil {
		return 0, err
	}
	n = max(n/2, 1000)
	in, out := newMeter(warmUp(n), n), newMeter(warmUp(n), n)
	published := make(chan error, 1)
	go func() { published <- rawPipelined{}.publish(ctx, l.url, queue, orderBody(256), in) }()
	if err := (rawPipelined{}).consume(ctx, l.url, queue, false, out); err != nil {
		return 0, err
	}
	l.full = out.metrics()[rate]
	return l.full, <-published
}

func runLateness(delay time.Duration) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		n = min(max(n/200, 20), 100)
		bed, err := l.retryBed(ctx, 1, delay)
		if err != nil {
			return nil, err
		}
		conn, hangUp, err := hopConnect(ctx, l.url)
		if err != nil {
			return nil, err
		}
		defer hangUp()
		p, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(bed.queues[0]), client.PublisherConfig{Codec: client.RawCodec{}})
		if err != nil {
			return nil, err
		}
		var mu sync.Mutex
		due := map[uint64]time.Time{}
		var late []time.Duration
		done := make(chan struct{})
		const warm = 5
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			ended <- c.peer.(failPeer).fail(ctx, l.url, bed, 1, func(body []byte) (time.Duration, bool) {
				id, now := binary.BigEndian.Uint64(body), time.Now()
				mu.Lock()
				defer mu.Unlock()
				at, again := due[id]
				if !again {
					due[id] = now.Add(delay)
					return delay, true
				}
				if id >= warm {
					if late = append(late, now.Sub(at)); len(late) == n {
						close(done)
					}
				}
				return 0, false
			})
		}()
		for id := range uint64(warm + n) {
			body := make([]byte, 256)
			binary.BigEndian.PutUint64(body, id)
			if err := p.Publish(ctx, body); err != nil {
				return nil, err
			}
			time.Sleep(20 * time.Millisecond) // 50 a second: an idle broker
		}
		select {
		case <-done:
		case err := <-ended:
			return nil, fmt.Errorf("ended early: %w", err)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		cancel()
		err = <-ended
		mu.Lock()
		defer mu.Unlock()
		return timings(late), err
	}
}

// runRecovery cuts the consumer's connection and lets it connect again at once.
func runRecovery(ctx context.Context, l *lab, c contestant, _ int) (metrics, error) {
	queue, err := l.queue(ctx)
	if err != nil {
		return nil, err
	}
	cutter, err := newCutter(l.url)
	if err != nil {
		return nil, err
	}
	defer cutter.close()
	conn, hangUp, err := hopConnect(ctx, l.url)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	p, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(queue), client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var cutAt atomic.Int64
	flowing, back := make(chan struct{}), make(chan time.Duration, 1)
	var n atomic.Int64
	ended := make(chan error, 1)
	go func() {
		ended <- c.peer.(recoverPeer).survive(ctx, cutter.url, queue, func(body []byte) {
			if n.Add(1) == 20 {
				close(flowing)
			}
			sent, cut := int64(binary.BigEndian.Uint64(body)), cutAt.Load()
			if cut > 0 && sent > cut {
				select {
				case back <- time.Duration(time.Now().UnixNano() - cut):
				default:
				}
			}
		})
	}()
	stop := make(chan struct{})
	fed := make(chan error, 1)
	go func() {
		for {
			body := make([]byte, 256)
			binary.BigEndian.PutUint64(body, uint64(time.Now().UnixNano()))
			if err := p.Publish(ctx, body); err != nil {
				fed <- err
				return
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-stop:
				fed <- nil
				return
			}
		}
	}()
	wait := func(c <-chan struct{}) error {
		select {
		case <-c:
			return nil
		case err := <-ended:
			return fmt.Errorf("ended early: %w", err)
		case err := <-fed:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := wait(flowing); err != nil {
		return nil, err
	}
	cutAt.Store(time.Now().UnixNano())
	cutter.cut()
	took := make(chan struct{})
	var d time.Duration
	go func() {
		defer close(took)
		select {
		case d = <-back:
		case <-ctx.Done():
		}
	}()
	if err := wait(took); err != nil {
		return nil, err
	}
	close(stop)
	if err := <-fed; err != nil {
		return nil, err
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(5 * time.Second): // the official client may hang in its recovery
	}
	return timings([]time.Duration{d}), nil
}

// consumersPerConn keeps within the 64 sessions of a connection: a consumer that
// forwards has two.
const consumersPerConn = 30

// runShared has every message fail once and come back after a second, through one
// delay queue for all.
func runShared(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	queues := c.peer.(int)
	const delay = time.Second
	bed, err := l.retryBed(ctx, queues, delay)
	if err != nil {
		return nil, err
	}
	n = max(n, 2*queues)
	m := newMeter(1, 2*n-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := retry.With(bed.policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		m.tick()
		if retry.Count(d.Message()) == 0 {
			return errFailed
		}
		return nil
	}))
	var consuming sync.WaitGroup
	errs := make(chan error, queues)
	defer consuming.Wait()
	defer cancel()
	var conn *client.Conn
	for i, q := range bed.queues {
		if i%consumersPerConn == 0 {
			fresh, hangUp, err := hopConnect(ctx, l.url)
			if err != nil {
				return nil, err
			}
			defer hangUp()
			conn = fresh
		}
		conn := conn
		consuming.Go(func() {
			errs <- conn.Consume(ctx, q, h, client.ConsumerConfig{Prefetch: inFlight})
		})
	}
	pconn, hangUp, err := hopConnect(ctx, l.url)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	p, err := client.NewPublisher[[]byte](ctx, pconn, address.Address{}, client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return nil, err
	}
	body := orderBody(256)
	var turn atomic.Int64
	if err := together(inFlight, n, func() error {
		q := bed.queues[int(turn.Add(1))%queues]
		return p.Publish(ctx, body, client.PublishTo(address.Queue(q)))
	}); err != nil {
		return nil, err
	}
	select {
	case <-m.done:
	case err := <-errs:
		return nil, fmt.Errorf("ended early: %w", err)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	// The one second in which nothing need happen is no work.
	m.from.at = m.from.at.Add(delay)
	return m.metrics(), nil
}
