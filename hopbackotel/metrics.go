package hopbackotel

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/hopback/hopback/client/instrument"
)

// Buckets of durations, as the conventions have them, and of delays.
var (
	seconds = []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	late    = []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600}
	sizes   = []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
)

// numbers are the metrics.
type numbers struct {
	retries, deaths           metric.Int64Counter
	took, processed, lateness metric.Float64Histogram
	ranges                    metric.Int64Histogram

	destinations, queues, reasons, errors names
	meter                                 metric.Meter
	sent, consumed                        totals
	observed                              observed

	mu      sync.Mutex
	known   map[string]*measuredQueue
	watched []*watched
	// past are the counts of Conns that were closed.
	past counts
}

// watched is a Conn.
type watched struct{ stats func() instrument.Stats }

// counts are what only grows.
type counts struct {
	lost, rebuilt uint64
	blocked       time.Duration
}

// observed are the metrics that are asked for.
type observed struct {
	handling, unsettled, ready, forwarding, stalled, unconfirmed, queued metric.Int64ObservableUpDownCounter
	connections, sessions, blockedNow, consumers, publishers             metric.Int64ObservableUpDownCounter
	requesters, calls, partitions, paused, stuck                         metric.Int64ObservableUpDownCounter
	lost, rebuilt, sent, consumed                                        metric.Int64ObservableCounter
	blocked                                                              metric.Float64ObservableCounter
	oldest, idle                                                         metric.Float64ObservableGauge
}

func newNumbers(m metric.Meter, most int) *numbers {
	n := &numbers{
		meter:        m,
		destinations: names{most: most}, queues: names{most: most}, reasons: names{most: most}, errors: names{most: most},
		known: map[string]*measuredQueue{},
	}
	n.took = histogram(m, "messaging.client.operation.duration", "Duration of publishing (until the broker's confirmation) and of settling (until it is written).", seconds)
	n.processed = histogram(m, "messaging.process.duration", "Duration of handlers.", seconds)
	n.retries = made(m.Int64Counter("hopback.retries", metric.WithUnit("{message}"), metric.WithDescription("Number of failed attempts that are followed by a retry.")))
	n.deaths = made(m.Int64Counter("hopback.deaths", metric.WithUnit("{message}"), metric.WithDescription("Number of messages that were dead-lettered, by reason.")))
	n.lateness = histogram(m, "hopback.retry.lateness", "Delay of a retry beyond what was asked for.", late)
	n.ranges = made(m.Int64Histogram("hopback.settlement.range", metric.WithUnit("{delivery}"), metric.WithDescription("Number of deliveries that one settlement frame settles."), metric.WithExplicitBucketBoundaries(sizes...)))
	n.observed.make(m)
	o := &n.observed
	_ = made(m.RegisterCallback(n.observe, o.handling, o.unsettled, o.ready, o.forwarding, o.stalled, o.unconfirmed, o.queued,
		o.connections, o.sessions, o.blockedNow, o.consumers, o.publishers, o.requesters, o.calls, o.partitions, o.paused, o.stuck, o.lost, o.rebuilt, o.blocked, o.oldest, o.idle, o.sent, o.consumed))
	return n
}

func (o *observed) make(m metric.Meter) {
	for _, x := range []struct {
		to               *metric.Int64ObservableUpDownCounter
		name, unit, what string
	}{
		{&o.handling, "hopback.handling", "{message}", "Number of running handlers."},
		{&o.stuck, "hopback.handling.stuck", "{message}", "Number of running handlers that count as stuck."},
		{&o.unsettled, "hopback.unsettled", "{message}", "Number of deliveries that consumers hold."},
		{&o.ready, "hopback.ready", "{message}", "Number of held deliveries that wait for a handler."},
		{&o.forwarding, "hopback.forwarding", "{message}", "Number of copies that wait for the broker's confirmation."},
		{&o.stalled, "hopback.forwarding.stalled", "{message}", "Number of copies that wait because their address doesn't accept messages."},
		{&o.unconfirmed, "hopback.unconfirmed", "{message}", "Number of published messages that wait for the broker's confirmation."},
		{&o.queued, "hopback.queued", "{message}", "Number of published messages that wait to be sent."},
		{&o.connections, "hopback.connections", "{connection}", "Number of AMQP connections that are up."},
		{&o.sessions, "hopback.sessions", "{session}", "Number of open sessions."},
		{&o.blockedNow, "hopback.connections.blocked", "{connection}", "Number of connections on which the broker accepts no messages because of an alarm."},
		{&o.consumers, "hopback.consumers", "{consumer}", "Number of consumers, by whether they have a link to their queue."},
		{&o.paused, "hopback.consumers.paused", "{consumer}", "Number of consumers that are paused."},
		{&o.publishers, "hopback.publishers", "{publisher}", "Number of publishers."},
		{&o.requesters, "hopback.requesters", "{requester}", "Number of requesters, by whether they can receive replies."},
		{&o.partitions, "hopback.partitions", "{partition}", "Number of partitions that belong to this process: 0 or 1 for each of a group's queues."},
		{&o.calls, "hopback.calls", "{call}", "Number of calls that wait for their replies."},
	} {
		*x.to = made(m.Int64ObservableUpDownCounter(x.name, metric.WithUnit(x.unit), metric.WithDescription(x.what)))
	}
	o.sent = made(m.Int64ObservableCounter("messaging.client.sent.messages", metric.WithUnit("{message}"), metric.WithDescription("Number of messages that producers attempted to send to the broker.")))
	o.consumed = made(m.Int64ObservableCounter("messaging.client.consumed.messages", metric.WithUnit("{message}"), metric.WithDescription("Number of messages that were delivered to the application.")))
	o.lost = made(m.Int64ObservableCounter("hopback.connections.lost", metric.WithUnit("{connection}"), metric.WithDescription("Number of AMQP connections that were lost.")))
	o.rebuilt = made(m.Int64ObservableCounter("hopback.reconnects", metric.WithUnit("{connection}"), metric.WithDescription("Number of lost AMQP connections that were rebuilt.")))
	o.blocked = made(m.Float64ObservableCounter("hopback.blocked.time", metric.WithUnit("s"), metric.WithDescription("Time in which the broker accepted no messages because of alarms, summed over all connections.")))
	o.oldest = made(m.Float64ObservableGauge("hopback.handling.oldest", metric.WithUnit("s"), metric.WithDescription("How long the longest-running handler has been running.")))
	o.idle = made(m.Float64ObservableGauge("hopback.idle", metric.WithUnit("s"), metric.WithDescription("Time since the last delivery of a consumer.")))
}

// histogram is one of durations.
func histogram(m metric.Meter, name, what string, buckets []float64) metric.Float64Histogram {
	return made(m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(what), metric.WithExplicitBucketBoundaries(buckets...)))
}

// made reports what the metrics' provider refuses. The metric does nothing then.
func made[M any](x M, err error) M {
	if err != nil {
		otel.Handle(err)
	}
	return x
}

// errorType is the value of error.type; "" for nil.
func (n *numbers) errorType(err error) string {
	if err == nil {
		return ""
	}
	return n.errors.bounded(typeOf(err))
}

// byError has the options of a metric for each error.type. There is a bounded number.
type byError[O any] struct {
	base []attribute.KeyValue
	make func(attribute.Set) O
	ok   []O // for ""

	mu    sync.RWMutex
	known map[string][]O
}

func newByError[O any](base []attribute.KeyValue, of func(attribute.Set) O) *byError[O] {
	return &byError[O]{base: base, make: of, ok: []O{of(attribute.NewSet(base...))}}
}

func (b *byError[O]) of(kind string) []O {
	if kind == "" {
		return b.ok
	}
	b.mu.RLock()
	o := b.known[kind]
	b.mu.RUnlock()
	if o != nil {
		return o
	}
	o = []O{b.make(attribute.NewSet(append(slices.Clone(b.base), semconv.ErrorTypeKey.String(kind))...))}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known == nil {
		b.known = map[string][]O{}
	}
	b.known[kind] = o
	return o
}

func addOption(s attribute.Set) metric.AddOption       { return metric.WithAttributeSet(s) }
func recordOption(s attribute.Set) metric.RecordOption { return metric.WithAttributeSet(s) }

// total is one series of a metric that grows with each message. It is observed, and not
// added to: counting costs no call of the metrics' provider.
type total struct {
	n   atomic.Int64
	set metric.ObserveOption
}

// totals are the series of one metric.
type totals struct {
	mu  sync.Mutex
	all map[attribute.Distinct]*total
}

func (t *totals) of(s attribute.Set) *total {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.all[s.Equivalent()]
	if x == nil {
		x = &total{set: metric.WithAttributeSet(s)}
		if t.all == nil {
			t.all = map[attribute.Distinct]*total{}
		}
		t.all[s.Equivalent()] = x
	}
	return x
}

func (t *totals) observe(to metric.Observer, o metric.Int64Observable) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.all {
		if n := x.n.Load(); n > 0 {
			to.ObserveInt64(o, n, x.set)
		}
	}
}

// counted counts messages of one place.
type counted struct{ totals *byError[*total] }

func (c counted) count(kind string) { c.totals.of(kind)[0].n.Add(1) }

// timed is a histogram of one place.
type timed struct {
	histogram metric.Float64Histogram
	options   *byError[metric.RecordOption]
}

func (t timed) record(ctx context.Context, kind string, d time.Duration) {
	t.histogram.Record(ctx, d.Seconds(), t.options.of(kind)...)
}

// measuredTarget is an address in metrics.
type measuredTarget struct {
	sent counted
	took timed
}

func (n *numbers) target(name, template string) *measuredTarget {
	base := []attribute.KeyValue{semconv.MessagingSystemRabbitMQ, semconv.MessagingOperationName("publish")}
	if template != "" {
		base = append(base, semconv.MessagingDestinationTemplate(n.destinations.bounded(template)))
	} else {
		base = append(base, semconv.MessagingDestinationName(n.destinations.bounded(name)))
	}
	return &measuredTarget{
		sent: counted{newByError(base, n.sent.of)},
		took: timed{n.took, newByError(append(slices.Clone(base), semconv.MessagingOperationTypeSend), recordOption)},
	}
}

// measuredQueue is a work queue in metrics.
type measuredQueue struct {
	n         *numbers
	name      attribute.KeyValue
	consumed  counted
	processed timed
	settled   timed

	// By strategy, and deaths by reason; their number is bounded.
	retries, deaths places[string, byError[metric.AddOption]]
	lateness        places[string, byError[metric.RecordOption]]
}

// by has the options of a metric of a queue for each value of an attribute.
func by[O any](q *measuredQueue, key attribute.Key, of func(attribute.Set) O) places[string, byError[O]] {
	return places[string, byError[O]]{most: math.MaxInt, make: func(value string) *byError[O] {
		return newByError([]attribute.KeyValue{q.name, key.String(value)}, of)
	}}
}

// queue returns what is known about a queue. All queues beyond so many are one.
func (n *numbers) queue(name string) *measuredQueue {
	name = n.queues.bounded(valid(name))
	n.mu.Lock()
	defer n.mu.Unlock()
	if q := n.known[name]; q != nil {
		return q
	}
	q := &measuredQueue{n: n, name: semconv.MessagingDestinationName(name)}
	q.retries, q.deaths, q.lateness = by(q, attributeStrategy, addOption), by(q, attributeReason, addOption), by(q, attributeStrategy, recordOption)
	of := func(operation string, more ...attribute.KeyValue) []attribute.KeyValue {
		return append([]attribute.KeyValue{semconv.MessagingSystemRabbitMQ, semconv.MessagingOperationName(operation), q.name}, more...)
	}
	q.consumed = counted{newByError(of("process"), n.consumed.of)}
	q.processed = timed{n.processed, newByError(of("process"), recordOption)}
	q.settled = timed{n.took, newByError(of("settle", semconv.MessagingOperationTypeSettle), recordOption)}
	n.known[name] = q
	return q
}

func (q *measuredQueue) retried(ctx context.Context, reason, kind string) {
	q.n.retries.Add(ctx, 1, q.retries.get(q.n.reasons.bounded(valid(reason))).of(kind)...)
}

func (q *measuredQueue) died(ctx context.Context, reason string) {
	q.n.deaths.Add(ctx, 1, q.deaths.get(q.n.reasons.bounded(valid(reason))).ok...)
}

func (q *measuredQueue) late(ctx context.Context, reason string, by time.Duration) {
	q.n.lateness.Record(ctx, max(by, 0).Seconds(), q.lateness.get(q.n.reasons.bounded(reason)).ok...)
}

// watch has the numbers of a Conn observed until closed is called.
func (n *numbers) watch(stats func() instrument.Stats) (closed func()) {
	w := &watched{stats}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watched = append(n.watched, w)
	return func() {
		s := stats()
		n.mu.Lock()
		defer n.mu.Unlock()
		n.past.lost += s.Lost
		n.past.rebuilt += s.Rebuilt
		n.past.blocked += s.Blocked
		n.watched = slices.DeleteFunc(n.watched, func(other *watched) bool { return other == w })
	}
}

// observe is called by the metrics' reader.
func (n *numbers) observe(_ context.Context, to metric.Observer) error {
	n.mu.Lock()
	all := slices.Clone(n.watched)
	sums := &snapshot{past: n.past, consumers: map[string]*consumerStats{}, publishers: map[string]*publisherStats{}, stuck: map[string]int64{}}
	n.mu.Unlock()
	for _, w := range all {
		n.add(sums, w.stats())
	}
	o := &n.observed
	n.sent.observe(to, o.sent)
	n.consumed.observe(to, o.consumed)
	to.ObserveInt64(o.connections, int64(sums.connections))
	to.ObserveInt64(o.sessions, int64(sums.sessions))
	to.ObserveInt64(o.blockedNow, int64(sums.blockedNow))
	to.ObserveInt64(o.lost, int64(sums.past.lost))
	to.ObserveInt64(o.rebuilt, int64(sums.past.rebuilt))
	to.ObserveFloat64(o.blocked, sums.past.blocked.Seconds())
	for name, c := range sums.consumers {
		n.observeConsumers(to, name, c)
	}
	for name, stuck := range sums.stuck {
		to.ObserveInt64(o.stuck, stuck, metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(name))))
	}
	n.observeRequesters(to, sums.requesters)
	for name, p := range sums.publishers {
		set := metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(name)))
		to.ObserveInt64(o.unconfirmed, int64(p.Unconfirmed), set)
		to.ObserveInt64(o.queued, int64(p.Queued), set)
		to.ObserveInt64(o.publishers, p.number, set)
	}
	return nil
}

// snapshot is what all connections report at one moment.
type snapshot struct {
	connections, sessions, blockedNow int

	past       counts                     // with those of closed connections
	consumers  map[string]*consumerStats  // by queue
	publishers map[string]*publisherStats // by destination
	stuck      map[string]int64           // by queue
	requesters []instrument.RequesterStats
}

type consumerStats struct {
	instrument.ConsumerStats
	owners int64
	paused int64
	links  [2]int64 // consumers without and with a link
}

type publisherStats struct {
	instrument.PublisherStats
	number int64
}

// add adds what one connection reports.
func (n *numbers) add(sums *snapshot, s instrument.Stats) {
	sums.past.lost += s.Lost
	sums.past.rebuilt += s.Rebuilt
	sums.past.blocked += s.Blocked
	sums.connections, sums.sessions, sums.blockedNow = sums.connections+s.Connections, sums.sessions+s.Sessions, sums.blockedNow+s.BlockedNow
	for _, c := range s.Consumers {
		name := n.queues.bounded(valid(c.Queue))
		x := sums.consumers[name]
		if x == nil {
			x = &consumerStats{}
			sums.consumers[name] = x
		}
		x.Handling += c.Handling
		if c.Handling > 0 && (x.Oldest.IsZero() || c.Oldest.Before(x.Oldest)) {
			x.Oldest = c.Oldest
		}
		x.Unsettled, x.Ready, x.Forwarding, x.Stalled = x.Unsettled+c.Unsettled, x.Ready+c.Ready, x.Forwarding+c.Forwarding, x.Stalled+c.Stalled
		if c.Delivered.After(x.Delivered) {
			x.Delivered = c.Delivered
		}
		x.Partition = x.Partition || c.Partition
		if c.Owner {
			x.owners++
		}
		if c.Paused {
			x.paused++
		}
		if c.Up {
			x.links[1]++
		} else {
			x.links[0]++
		}
	}
	for _, q := range s.Stuck {
		sums.stuck[n.queues.bounded(valid(q.Queue))] += int64(q.Handlers)
	}
	sums.requesters = append(sums.requesters, s.Requesters...)
	for _, p := range s.Publishers {
		name := "(per message)"
		if !p.To.IsZero() {
			name = destination(p.To)
		}
		name = n.destinations.bounded(name)
		x := sums.publishers[name]
		if x == nil {
			x = &publisherStats{}
			sums.publishers[name] = x
		}
		x.Queued, x.Unconfirmed = x.Queued+p.Queued, x.Unconfirmed+p.Unconfirmed
		x.number++
	}
}

// observeConsumers reports the consumers of one queue.
func (n *numbers) observeConsumers(to metric.Observer, queue string, c *consumerStats) {
	o := &n.observed
	set := metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(queue)))
	to.ObserveInt64(o.handling, int64(c.Handling), set)
	oldest := 0.0
	if c.Handling > 0 {
		oldest = time.Since(c.Oldest).Seconds()
	}
	to.ObserveFloat64(o.oldest, oldest, set)
	to.ObserveInt64(o.unsettled, int64(c.Unsettled), set)
	to.ObserveInt64(o.ready, int64(c.Ready), set)
	to.ObserveInt64(o.forwarding, int64(c.Forwarding), set)
	to.ObserveInt64(o.stalled, int64(c.Stalled), set)
	to.ObserveInt64(o.paused, c.paused, set)
	if !c.Delivered.IsZero() {
		to.ObserveFloat64(o.idle, time.Since(c.Delivered).Seconds(), set)
	}
	if c.Partition {
		to.ObserveInt64(o.partitions, c.owners, set)
	}
	for i, links := range c.links {
		to.ObserveInt64(o.consumers, links, metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(queue), attributeUp.Bool(i == 1))))
	}
}

func (n *numbers) observeRequesters(to metric.Observer, all []instrument.RequesterStats) {
	calls, up := map[string]int64{}, map[string][2]int64{} // requesters without and with a link
	for _, r := range all {
		name := n.destinations.bounded(destination(r.To))
		links := up[name]
		if r.Up {
			links[1]++
		} else {
			links[0]++
		}
		up[name] = links
		calls[name] += int64(r.Waiting)
	}
	for name, links := range up {
		to.ObserveInt64(n.observed.calls, calls[name], metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(name))))
		for i, number := range links {
			to.ObserveInt64(n.observed.requesters, number, metric.WithAttributeSet(attribute.NewSet(semconv.MessagingDestinationName(name), attributeUp.Bool(i == 1))))
		}
	}
}
