package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/retry"
)

// Of the contests "fair": two workers with eight slots each have handlers of 5 ms. 200 quiet tenants have 200
// messages a second in all. Noisy ones have their messages at once.
const (
	quietTenants = 200
	quietEvery   = 5 * time.Millisecond
	fairHandler  = 5 * time.Millisecond
	fairWorkers  = 2
	fairSlots    = 8
	// fairBefore is for how long only the quiet have messages.
	fairBefore = 2 * time.Second
)

// Metrics of the contest: milliseconds from publishing to the handler, of the quiet. drained is the p99 after
// the burst was published.
const (
	quietP50 = "quiet p50"
	quietP99 = "quiet p99"
	drained  = "drained p99"
	// left is how much of the slots that the quiet tenants' handlers leave the noisy tenants' use, from 0 to 1.
	left = "slots left"
	// atBroker is how many microseconds of its CPU the broker needs for a message, with what it does while idle.
	atBroker = "broker cpu"
)

// fairPeer is how the messages are consumed.
type fairPeer struct {
	shared, alone bool
	apart         bool // the noisy have a queue, and workers, for themselves
	noisy         noisy
}

// noisy is what the noisy tenants do.
type noisy struct {
	tenants int
	handler time.Duration
	fails   bool // each attempt does; there are two retries
}

const (
	nPlain     = "plain queue"
	nFair      = "fair queue"
	nApart     = "queues apart"
	nQuiet     = "quiet alone, plain"
	nFairQuiet = "quiet alone, fair"
)

func fairContests() (all []contest) {
	for _, x := range []struct {
		name, title string
		noisy       noisy
		fewer       int
	}{
		{"fair", "one tenant's burst next to 200 quiet tenants, handlers of 5 ms", noisy{1, fairHandler, false}, 1},
		{"fair-10", "the same with the bursts of ten tenants", noisy{10, fairHandler, false}, 1},
		{"fair-slow", "the same with one tenant's burst, whose handlers take 200 ms", noisy{1, 200 * time.Millisecond, false}, 40},
		{"fair-failing", "the same with one tenant's burst, whose handlers always fail: two retries after 1 s", noisy{1, fairHandler, true}, 3},
	} {
		all = append(all, contest{
			name: x.name, title: x.title, run: runFair, maxRounds: 3,
			contestants: []contestant{
				{name: nPlain, peer: fairPeer{noisy: x.noisy}, fewer: x.fewer}, {name: nFair, peer: fairPeer{shared: true, noisy: x.noisy}, fewer: x.fewer},
				{name: nApart, peer: fairPeer{apart: true, noisy: x.noisy}, fewer: x.fewer},
				{name: nQuiet, peer: fairPeer{alone: true}, fewer: 10}, {name: nFairQuiet, peer: fairPeer{shared: true, alone: true}, fewer: 10},
			},
			pairs: []pair{{ours: nFair, peer: nPlain}},
		})
	}
	return all
}

// fairRun is one run.
type fairRun struct {
	*meter
	mu    sync.Mutex
	quiet []time.Duration
	late  []time.Duration
	after bool // the burst is published
	peer  fairPeer
	// quietBusy and noisyBusy are how long the handlers of the quiet and of the noisy took in the measured stretch, in ns.
	quietBusy, noisyBusy atomic.Int64
}

// spend is a handler's work.
func (r *fairRun) spend(handler time.Duration, busy *atomic.Int64) {
	began := time.Now()
	time.Sleep(handler)
	if n := r.ticks.Load(); n >= r.warm && n < int64(r.total()) {
		busy.Add(int64(time.Since(began)))
	}
}

// left is the metric of that name.
func (r *fairRun) left() float64 {
	quiet, noisy := time.Duration(r.quietBusy.Load()), time.Duration(r.noisyBusy.Load())
	if r.peer.apart {
		quiet = 0
	}
	return noisy.Seconds() / (fairWorkers*fairSlots*r.to.at.Sub(r.from.at).Seconds() - quiet.Seconds())
}

func (r *fairRun) handle(ctx context.Context, d *client.Delivery) error {
	m := d.Message()
	sent, _ := m.ApplicationProperties["sent"].(int64)
	waited := time.Since(time.Unix(0, sent))
	if isNoisy(*m.Properties.GroupID) {
		if retry.Attempt(ctx) == 1 {
			r.tick()
		}
		r.spend(r.peer.noisy.handler, &r.noisyBusy)
		if r.peer.noisy.fails {
			return errFails
		}
		return nil
	}
	r.mu.Lock()
	r.quiet = append(r.quiet, waited)
	if r.after {
		r.late = append(r.late, waited)
	}
	r.mu.Unlock()
	if r.peer.alone {
		r.tick()
	}
	r.spend(fairHandler, &r.quietBusy)
	return nil
}

func isNoisy(tenant string) bool { return strings.HasPrefix(tenant, "noisy") }

var errFails = errors.New("it always fails")

// declare returns the queues by whether the tenant is noisy.
func (p fairPeer) declare(ctx context.Context, l *lab, q fair.Queue, policy retry.Policy) (map[bool]string, error) {
	queues := map[bool]string{false: q.Name, true: q.Name}
	topology, err := q.Topology(policy, declare.QuorumQueue{})
	if err == nil {
		err = l.apply(ctx, topology)
	}
	if err == nil && p.apart {
		queues[true] = q.Name + ".apart"
		if topology, err = retry.Topology(policy, declare.QuorumQueue{Name: queues[true]}); err == nil {
			err = l.apply(ctx, topology)
		}
	}
	return queues, err
}

func runFair(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	p := c.peer.(fairPeer)
	if p.alone { // for as long as a burst would take
		n = int(10 * time.Duration(n) * fairHandler / (fairWorkers * fairSlots) / quietEvery)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	q := fair.Queue{Name: l.name()}
	policy := retry.Policy{Strategy: retry.StrategyNative, MaxRetries: 2, Backoff: retry.Delays(time.Second), Names: retry.Names{Prefix: q.Name + "."}}
	queues, err := p.declare(ctx, l, q, policy)
	if err != nil {
		return nil, err
	}
	r := &fairRun{meter: l.newMeter(warmUp(n), n), peer: p}
	work := func(queue string) error {
		conn, err := client.Connect(ctx, l.url, client.Config{Logger: quiet})
		if err != nil {
			return err
		}
		running.Go(func() {
			var err error
			if p.shared {
				err = fair.Consume(ctx, conn, q, client.HandlerFunc(r.handle), fair.Config{Concurrency: fairSlots, Retry: policy})
			} else {
				err = conn.Consume(ctx, queue, retry.With(policy)(client.HandlerFunc(r.handle)), client.ConsumerConfig{Concurrency: fairSlots})
			}
			cancel(err)
			_ = conn.Close(context.WithoutCancel(ctx))
		})
		return nil
	}
	for i := range 2 * fairWorkers {
		if noisy := i%2 == 1; p.apart || !noisy {
			if err := work(queues[noisy]); err != nil {
				return nil, err
			}
		}
	}
	publisher, err := client.NewPublisher[string](ctx, l.conn, address.Address{}, client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return nil, err
	}
	defer func() { _ = publisher.Close(context.WithoutCancel(ctx)) }()
	to := func(tenant string) func(*client.Message) {
		edit := q.To(tenant)
		if !p.shared {
			edit = client.PublishTo(address.Queue(queues[isNoisy(tenant)]))
		}
		return func(m *client.Message) {
			edit(m)
			m.Properties.GroupID = &tenant
			m.ApplicationProperties = map[string]any{"sent": time.Now().UnixNano()}
		}
	}
	before := brokerCPU()
	running.Go(func() { publishQuiet(ctx, publisher, to) })
	if !p.alone {
		if err := r.burst(ctx, publisher, to); err != nil {
			return nil, err
		}
	}
	select {
	case <-r.done:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	m := r.metrics()
	r.mu.Lock()
	defer r.mu.Unlock()
	if after := brokerCPU(); after > before {
		m[atBroker] = float64((after - before).Microseconds()) / float64(r.total())
	}
	m[quietP50], m[quietP99] = millis(r.quiet, 0.5), millis(r.quiet, 0.99)
	if !p.alone {
		m[drained], m[left] = millis(r.late, 0.99), r.left()
	}
	return m, nil
}

// publishQuiet publishes the quiet tenants' messages until ctx ends.
func publishQuiet(ctx context.Context, publisher *client.Publisher[string], to func(tenant string) func(*client.Message)) {
	random := rand.New(rand.NewPCG(1, 2))
	var publishing sync.WaitGroup
	defer publishing.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(random.ExpFloat64() * float64(quietEvery))):
		}
		tenant := fmt.Sprint("quiet", random.IntN(quietTenants))
		publishing.Go(func() { _ = publisher.Publish(ctx, "quiet", to(tenant)) })
	}
}

// burst publishes the noisy tenants' messages at once.
func (r *fairRun) burst(ctx context.Context, publisher *client.Publisher[string], to func(tenant string) func(*client.Message)) error {
	select {
	case <-time.After(fairBefore):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	r.mu.Lock()
	r.quiet = r.quiet[:0]
	r.mu.Unlock()
	next := 0
	err := publisher.PublishAll(ctx, make([]string, r.total()), func(_ string, m *client.Message) {
		to(fmt.Sprint("noisy", next%r.peer.noisy.tenants))(m)
		next++
	})
	r.mu.Lock()
	r.after = true
	r.mu.Unlock()
	if err != nil {
		return errors.Join(errors.New("publish the burst"), err)
	}
	return nil
}

func millis(all []time.Duration, q float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)].Microseconds()) / 1000
}

// brokerCPU is what all RabbitMQs of this machine have used of the CPU; 0 if that can't be read.
func brokerCPU() (used time.Duration) {
	const perSecond = 100 // USER_HZ, on all of Linux's platforms
	names, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil || !strings.Contains(string(text), "(beam.smp)") {
			continue
		}
		_, rest, _ := strings.Cut(string(text), ") ")
		if fields := strings.Fields(rest); len(fields) > 12 { // utime and stime are the 14th and 15th in all
			user, _ := strconv.Atoi(fields[11])
			system, _ := strconv.Atoi(fields[12])
			used += time.Duration(user+system) * time.Second / perSecond
		}
	}
	return used
}
