package chaos

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/retry"
)

// Other people, who share the broker.
const (
	// Neighbor is a team with another queue, other delays, and mostly another strategy on the exchanges and
	// the parking queue of lane "republish".
	Neighbor = "neighbor"
	// Forwarder is a queue to which handlers of lane "republish" forward copies of what they handle.
	Forwarder = "forwarder"
	// Partitioned is a group of package partition.
	Partitioned = "partitioned"
	// Centralized is a team whose workers only reject, with hopback's central retrier behind them.
	Centralized = "central"
	// Stranger sends malformed, large, and forged messages to the queues of the others.
	Stranger = "stranger"
)

// Actors are all of them.
var Actors = []string{Neighbor, Forwarder, Centralized, Partitioned, Scheduled, Parking, Fair, Recurring, Limited, Called, Stranger}

// What an operator does who doesn't know hopback.
const (
	ForeignBinding  Kind = "foreign-binding"  // a queue of others is bound to an exchange, and may stay so
	ForeignFull     Kind = "foreign-full"     // it is bound, and takes nothing
	Purged          Kind = "purged"           // a queue is purged
	OldDefinitions  Kind = "old-definitions"  // definitions that were exported at the start are imported
	PermissionsGone Kind = "permissions-gone" // the workers' user may not configure, write, or read for a while
	AlarmAtStart    Kind = "alarm-at-start"   // a lane's workers are away, and come back in an alarm
	HandlersHang    Kind = "handlers-hang"    // a worker's handlers don't return, not even when their ctx ends
)

// neighborDelays share one delay queue with simDelays.
var neighborDelays = [maxRetries]time.Duration{3 * time.Second, 15 * time.Second, time.Minute}

// sharing are the lanes that have exchanges and a parking queue in common with l, l included, and the
// stranger, whose messages are in all queues.
func (l *simLane) sharing() (all []*simLane) {
	for _, o := range l.all() {
		if o.prefix == l.prefix || o.name == Stranger {
			all = append(all, o)
		}
	}
	return all
}

// breaks notes that something of the lane is broken from now on, for a time.
func (l *simLane) breaks(from, lasts time.Duration) {
	for _, o := range l.sharing() {
		o.ledger.Broken()
		o.broken = append(o.broken, span{from, from + lasts})
	}
}

// step notes what is done.
func (s *simulation) step(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.say("%s", text)
	s.steps = append(s.steps, fmt.Sprintf("%v: %s", time.Since(s.began).Round(time.Second), text))
}

// operate does what is above. It reports whether kind is one of those.
func (s *simulation) operate(ctx context.Context, f simFault, l *simLane) (heal func(), done bool) {
	d := &damage{simulation: s, ctx: ctx, l: l, r: f.dice}
	from := time.Since(s.began)
	switch f.kind {
	case ForeignBinding, ForeignFull:
		return d.bindForeign(f.kind), true
	case Purged:
		queues := l.queues()
		d.purge(queues[d.r.IntN(len(queues))])
	case OldDefinitions:
		s.step("the definitions of the start are imported again")
		d.restore(s.definitions)
	case PermissionsGone:
		for _, l := range s.lanes {
			l.breaks(from, f.lasts+deadLetterRetry)
		}
		allowed := [3]string{".*", ".*", ".*"}
		i := d.r.IntN(3)
		allowed[i] = []string{"", "^work-.*"}[d.r.IntN(2)]
		s.step("the workers' user may configure, write, and read %q", allowed)
		d.permit(allowed)
		return func() { d.permit([3]string{".*", ".*", ".*"}) }, true
	case AlarmAtStart:
		const away, raised = 70 * time.Second, 60 * time.Second
		s.step("the workers of lane %s are away for %v, and a memory alarm begins before they are back", l.name, away)
		for _, w := range l.workers {
			w.drain(away)
		}
		backoff.Sleep(ctx, raised)
		s.broker.SetMemoryAlarm(true)
		if l.group == nil && l.name != Centralized { // a group needs to publish, to know its members, and the retrier to look at its topology
			s.owed = append(s.owed, owed{l.n, span{from + 15*time.Second, from + raised}, from + away + 30*time.Second})
		}
		return func() { s.broker.SetMemoryAlarm(false) }, true
	case Paused, GroupPaused:
		return s.pauseOne(ctx, f), true
	case HandlersHang:
		w := l.workers[d.r.IntN(len(l.workers))]
		s.step("handlers of worker %d of lane %s don't return for %v", w.n, l.name, f.lasts)
		w.hangs.Store(int64(from + f.lasts))
		backoff.Sleep(ctx, time.Duration(d.r.Int64N(int64(f.lasts))))
		switch d.r.IntN(3) {
		case 0:
			s.step("worker %d is killed", w.n)
			w.kill(0)
		case 1:
			s.step("worker %d is stopped", w.n)
			w.drain(0)
		}
	default:
		return nil, false
	}
	return nil, true
}

func (d *damage) permit(allowed [3]string) {
	if err := d.broker.SetPermissions("worker", "/", allowed[0], allowed[1], allowed[2]); err != nil {
		d.wrong(ViolationStuck, 0, "permissions: %v", err)
	}
}

// leadsOn says that an exchange of hopback leads on by its alternate exchange, so a foreign binding takes
// messages from it. DESIGN.md says why there are such; doctor reports those bindings.
func leadsOn(x declare.Exchange) bool {
	return strings.HasSuffix(x.Name, "dead_letter_exchange.sort") || strings.HasSuffix(x.Name, "requeue_exchange") || strings.HasSuffix(x.Name, "failed_exchange") || strings.Contains(x.Name, ".sort.")
}

// bindForeign declares another queue and binds it to an exchange of the lane. That may cost nobody a
// message. Half of these bindings stay.
func (d *damage) bindForeign(kind Kind) (heal func()) {
	x := declare.Exchange{Name: d.l.queue, Type: declare.ExchangeFanout} // of a group
	if d.l.group == nil {
		others := slices.DeleteFunc(slices.Clone(d.l.topology.Exchanges), leadsOn)
		x = others[d.r.IntN(len(others))]
	}
	name := fmt.Sprintf("foreign-%d", len(d.foreign))
	d.foreign[name] = true
	b := declare.Binding{Source: x.Name, Queue: name}
	switch x.Type {
	case declare.ExchangeTopic:
		b.Key = []string{"#", "*.*." + d.l.queue, "*.*.#"}[d.r.IntN(3)]
	case declare.ExchangeHeaders:
		b.Match = declare.MatchAll
		if d.r.IntN(2) == 0 {
			b.Match = declare.MatchAllWithX
			b.Headers = map[string]any{"x-last-death-queue": d.l.queue}
		}
	default:
		b.Key = d.l.queue
	}
	d.step("queue %s is bound to %s exchange %s with %q %v", name, x.Type, x.Name, b.Key, b.Headers)
	d.apply(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: name, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited}}, Bindings: []declare.Binding{b}})
	stays := d.r.IntN(2) == 0
	if kind == ForeignFull {
		from := time.Since(d.began)
		d.l.breaks(from, 2*time.Minute+deadLetterRetry)
		for _, l := range append(slices.Clone(d.lanes), d.strange) { // several may use the exchange
			if l != nil {
				l.ledger.Multiplies()
			}
		}
		healed := d.full(name)
		return func() {
			if x.Type != declare.ExchangeHeaders { // RabbitMQ would keep its dead letters until it restarts: see kept
				d.deleteBinding(b)
			}
			healed()
		}
	}
	if stays {
		return nil
	}
	return func() { d.deleteBinding(b) }
}

// purge empties a queue, and notes what was in it.
func (d *damage) purge(name string) {
	d.step("queue %s is purged", name)
	q := d.broker.Queue(name)
	thaw, err := q.Freeze()
	if err != nil {
		return // it is gone
	}
	d.loses(name)
	d.noteGone(name)
	_ = q.Empty()
	thaw()
}

// noteGone notes that what is in a queue is destroyed.
func (s *simulation) noteGone(queue string) {
	for _, m := range s.broker.Queue(queue).Messages() {
		if m.Message == nil || special(m.Message) {
			s.unreadGone.Add(1)
			continue
		}
		if s.goneRecurring(queue, m.Message) {
			continue
		}
		l, id, err := s.read(m.Message)
		if err != nil {
			s.wrong(ViolationGhost, 0, "in %s: %v", queue, err)
			continue
		}
		l.ledger.Gone(id)
	}
}

// export returns the broker's definitions.
func (s *simulation) export() []byte { return s.http(http.MethodGet, nil) }

// restore imports them.
func (d *damage) restore(definitions []byte) { d.http(http.MethodPost, definitions) }

func (s *simulation) http(method string, body []byte) []byte {
	req := httptest.NewRequest(method, "/api/definitions", bytes.NewReader(body))
	req.SetBasicAuth("guest", "guest")
	req.Header.Set("Content-Type", "application/json")
	rec := httptest.NewRecorder()
	s.broker.HTTPHandler().ServeHTTP(rec, req)
	if rec.Code >= http.StatusBadRequest {
		s.wrong(ViolationStuck, 0, "definitions: %d %s", rec.Code, rec.Body)
	}
	return rec.Body.Bytes()
}

// diverted notes what a foreign queue has, and nobody else: an operator has deleted a binding, and a
// foreign one has kept the message from being parked.
func (s *simulation) diverted() {
	for name := range s.foreign {
		for _, m := range s.broker.Queue(name).Messages() {
			if l, id, err := s.read(m.Message); err == nil && l.wasBroken(l.ledger.lastCall(id)) {
				l.ledger.Gone(id)
			}
		}
	}
}

// wasBroken says that something of the lane was broken at a time, or soon afterwards.
func (l *simLane) wasBroken(at time.Duration) bool {
	return slices.ContainsFunc(l.broken, func(q span) bool { return q.from <= at+l.stretch(simDelays[maxRetries-1])+healthyWithin && at <= q.to })
}

// isDeadLetterQueue says that the queue is one of the dead.
func (s *simulation) isDeadLetterQueue(queue string) bool {
	return slices.ContainsFunc(s.lanes, func(l *simLane) bool {
		_, is := l.deadLetterQueues()[queue]
		return is
	})
}

// unreadable is how many messages of a queue can't be decoded.
func (s *simulation) unreadable(queue string) (n int) {
	for _, m := range s.broker.Queue(queue).Messages() {
		if m.Message == nil {
			n++
		}
	}
	return n
}

// sweep accounts for messages that nobody can read.
func (s *simulation) sweep() {
	var found int64
	seen := map[string]bool{}
	for _, l := range s.lanes {
		for queue := range l.deadLetterQueues() {
			if !seen[queue] {
				seen[queue] = true
				found += int64(s.unreadable(queue))
			}
		}
	}
	var foreign int64 // may be copies, or what a deleted binding has left to a queue of others: see diverted
	for name := range s.foreign {
		foreign += int64(s.unreadable(name))
	}
	if sent, gone := s.unread.Load(), s.unreadGone.Load(); found+gone+foreign < sent {
		s.wrong(ViolationLost, 0, "%d messages that can't be read were accepted; %d are in the queues of the dead, and %d were deleted or dead-lettered", sent, found, gone)
	}
}

// keyless begins the message-ids of messages that have no key, in a group whose Key panics over them.
const keyless = "keyless-"

// makeStrange makes the account of the stranger's messages.
func (s *simulation) makeStrange(total int) {
	if slices.Contains(s.Without, Stranger) {
		return
	}
	s.strange = &simLane{simulation: s, script: s.script, n: len(s.lanes), name: Stranger, total: total, tasks: make(chan uint32, total)}
	s.add(s.strange)
}

// targets are the lanes to which the stranger sends: those that have its delays.
func (s *simulation) targets() (all []*simLane) {
	for _, l := range s.lanes {
		if l.name != Neighbor && l.name != Forwarder && l.name != Centralized {
			all = append(all, l)
		}
	}
	return all
}

// target is where the stranger's message goes, and the dice for the rest of it.
func (l *simLane) target(id uint32) (*simLane, *rand.Rand) {
	r := rand.New(rand.NewPCG(l.Seed, l.script.dice(l.n, id, 300)))
	all := l.targets()
	return all[r.IntN(len(all))], r
}

// openStrange has the stranger send what is asked for, until the function that it returns is called.
func (s *simulation) openStrange(ctx context.Context) (end func()) {
	var conns [2]*client.Conn // the second one rewrites what it sends
	for i := range conns {
		cfg := s.config("stranger", i, SidePublishers)
		if i == 1 {
			dial := cfg.Dial
			cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := dial(ctx, network, address)
				if err != nil {
					return nil, err
				}
				return &rewriting{c}, nil
			}
		}
		for conns[i] == nil && ctx.Err() == nil {
			var err error
			if conns[i], err = client.Connect(ctx, s.broker.URL(), cfg); err != nil {
				backoff.Sleep(ctx, time.Second)
			}
		}
	}
	var publishers [2]*client.Publisher[*client.Message]
	for i, conn := range conns {
		for conn != nil && publishers[i] == nil && ctx.Err() == nil {
			var err error
			if publishers[i], err = client.NewPublisher[*client.Message](ctx, conn, address.Address{}, client.PublisherConfig{}); err != nil {
				backoff.Sleep(ctx, time.Second)
			}
		}
	}
	var working sync.WaitGroup
	working.Go(func() {
		for id := range s.strange.tasks {
			working.Go(func() { s.sendStrange(ctx, publishers, id) })
		}
	})
	return func() {
		close(s.strange.tasks)
		working.Wait()
		for _, c := range conns {
			if c != nil {
				closeConn(c)
			}
		}
	}
}

// sendStrange sends one of the stranger's messages.
func (s *simulation) sendStrange(ctx context.Context, publishers [2]*client.Publisher[*client.Message], id uint32) {
	l := s.strange
	all := l.targets()
	to, r := l.target(id)
	where := address.Queue(to.queue)
	if to.group != nil {
		where = to.group.current()[0].Address(fmt.Sprintf("strange-%d", id%5))
	}
	if publishers[0] == nil || publishers[1] == nil {
		return
	}
	if kind := r.IntN(16); kind == 0 || kind == 1 && to.group != nil && to.group.keyed {
		// It can't be read, or has no key.
		m, p := client.NewMessage(bytes.Clone(poison)), publishers[1]
		m.Properties.MessageID = fmt.Sprintf("unread-%d", id)
		if kind == 1 {
			m, p = client.NewMessage([]byte("no key")), publishers[0]
			m.Properties.MessageID = fmt.Sprintf("%s%d", keyless, id)
		} else if r.IntN(2) == 0 {
			m.Data[0], m.ApplicationProperties = []byte("a char"), map[string]any{"smile": smile}
		}
		client.PublishTo(where)(m)
		once, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := p.Publish(once, m); err == nil {
			s.unread.Add(1)
		}
		return
	}
	forge := &simLane{simulation: s, script: l.script, n: l.n, ledger: l.ledger, edit: func(m *client.Message, _ uint32) {
		forge(m, rand.New(rand.NewPCG(s.Seed, l.script.dice(l.n, id, 301))), to.queue, all[int(id)%len(all)].queue)
		if to.group != nil && id%2 == 0 { // as a forwarded copy brings along
			m.Annotations["x-opt-hopback-routing-key"] = fmt.Sprintf("strange-%d", id)
		}
		client.PublishTo(where)(m)
		if to.fair != nil {
			to.strangeTenant(m, id)
		}
	}}
	if to.group != nil {
		to.inOrder(l.ledger, fmt.Sprintf("strange-%d", id%5), id, func() { forge.publish(ctx, publishers[0], id) })
		return
	}
	forge.publish(ctx, publishers[0], id)
}

const smile = uint32(0x1f600)

// poison is a body that becomes a list of lists. Each claims to have as many elements as there
// are bytes left. A decoder that makes room for what is claimed takes more than a gigabyte.
var poison = func() []byte {
	const size = 200_000
	b := binary.BigEndian.AppendUint32(make([]byte, 0, size), uint32(size-4))
	for range 500 {
		left := uint32(size - len(b) - 9)
		b = binary.BigEndian.AppendUint32(append(b, 0xd0), left+4)
		b = binary.BigEndian.AppendUint32(b, left)
	}
	return append(b, bytes.Repeat([]byte{0x40}, size-len(b))...)
}()

// rewriting is a connection that sends what a correct client can't.
type rewriting struct{ net.Conn }

func (c *rewriting) Write(b []byte) (int, error) {
	size := binary.BigEndian.AppendUint32(nil, uint32(len(poison)))
	b = bytes.ReplaceAll(b, append([]byte{0, 0x53, 0x75, 0xb0}, size...), append([]byte{0, 0x53, 0x77, 0xd0}, size...))
	return c.Conn.Write(bytes.ReplaceAll(b, []byte{0x70, 0, 1, 0xf6, 0}, []byte{0x73, 0, 1, 0xf6, 0}))
}

// forge gives a message annotations that only hopback writes, with wrong values, or what no codec
// expects.
func forge(m *client.Message, r *rand.Rand, queue, other string) {
	forged := []struct {
		key    string
		values []any
	}{
		{"x-opt-hopback-retries", []any{int64(-1), "many", []any{int64(1)}} /* a positive count is documented to count */},
		{"x-opt-hopback-queue", []any{queue, other, int64(1)}},
		{"x-opt-hopback-exchange", []any{"amq.topic", "nowhere", ""}},
		{"x-opt-hopback-routing-key", []any{"delay.1000." + other, other, "*", int64(5)}},
		{"x-opt-hopback-delay", []any{int64(1), int64(-5), "1s"}},
		{"x-opt-hopback-history", []any{"[]", "{", int64(0), []any{"x"}, strings.Repeat("h", 40_000)}},
		{"x-opt-hopback-reason", []any{"exhausted", "permanent", int64(1)}},
		{"x-opt-hopback-error", []any{"forged", int64(1)}},
		{"x-opt-hopback-known-count", []any{int64(50), int64(-50), "x"}},
		{"x-opt-hopback-replays", []any{int64(9), "x"}},
		{"x-opt-hopback-replay", []any{"r1"}},
		{"x-opt-hopback-lives", []any{int64(40), "x"}},
		{"x-opt-hopback-marker", []any{"0", "seal/1", true, int64(3)}},
		{"x-opt-hopback-stream", []any{"log"}},
		{"x-opt-hopback-offset", []any{int64(1 << 40)}},
		{"x-opt-hopback-parked", []any{int64(1), true}},
		{"x-opt-hopback-schedule-due", []any{int64(1), int64(1) << 60}},
		{"x-opt-hopback-schedule-to", []any{"/queues/" + other}},
		{"x-opt-hopback-first-failure", []any{"1970"}}, // a time counts, and gives up
		{"x-opt-hopback-tenant", []any{"noisy-0", int64(5), strings.Repeat("t", 300)}},
		{"x-opt-hopback-attempts", []any{"[]", int64(7)}},
		{"x-first-death-queue", []any{other}},
		{"x-last-death-queue", []any{other}},
		{"x-death", []any{"x"}},
		{"x-delivery-count", []any{int64(100)}},
		{"x-basic-type", []any{"order"}},
	}
	if m.Annotations == nil {
		m.Annotations = map[any]any{}
	}
	for range 1 + r.IntN(4) {
		f := forged[r.IntN(len(forged))]
		m.Annotations[f.key] = f.values[r.IntN(len(f.values))]
	}
	switch r.IntN(8) {
	case 0:
		m.ApplicationProperties = map[string]any{"n": int8(-1), "b": []byte{0, 255}, "t": time.Unix(0, 0).UTC(), "f": 1.5, "": "an empty name", "u": uint64(1 << 63)}
	case 1:
		m.ApplicationProperties = map[string]any{"large": strings.Repeat("x", 100_000+r.IntN(100_000))}
	case 2:
		text := strings.Repeat("s", 5_000)
		m.Properties.Subject, m.Properties.ReplyTo = &text, &text
		m.Properties.CorrelationID = uint64(7)
	}
}

// central is the configuration of the central retrier.
func (l *simLane) central() retry.CentralConfig {
	return retry.CentralConfig{Queues: []string{l.queue}}
}

// retrier runs an instance of the central retrier until life ends.
func (w *simWorker) retrier(life, clocked context.Context, conn *client.Conn) {
	l := w.lane
	for life.Err() == nil {
		err := conn.Consume(clocked, l.central().FailedQueueOf(w.policy), retry.Central(w.policy, l.central()), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true, Grace: 10 * time.Second})
		if err != nil && life.Err() == nil {
			l.heard.Add(1)
			l.say("worker-%s-%d: central retrier: %v", l.name, w.n, err)
			backoff.Sleep(life, 5*time.Second)
		}
	}
}

// forward sends a copy of a message on, to another queue, as a handler's result.
func (w *simWorker) forward(ctx, life context.Context, conn *client.Conn, d *client.Delivery) error {
	l := w.lane
	of, id, err := l.read(d.Message())
	if err != nil || of != l || l.name != "republish" || l.script.dice(l.n, id, 200)%3 != 0 {
		return nil
	}
	i := slices.IndexFunc(l.lanes, func(o *simLane) bool { return o.name == Forwarder })
	if fate := l.script.Fate(l.n, id); i < 0 || fate.End != EndHandled || retry.Attempt(ctx) < fate.Attempts() {
		return nil
	}
	to := l.lanes[i]
	m, fresh := client.Copy(d.Message()), to.script.makeMessage(l.number, to.n, id)
	m.Data, m.Properties.MessageID = fresh.Data, fresh.Properties.MessageID
	p, err := w.forwards(life, conn, to.queue)
	if err != nil {
		backoff.Sleep(ctx, time.Second)
		return client.Requeue{Err: err} // no attempt: the message's fate hasn't begun
	}
	to.ledger.forwarding(id)
	known := AnswerRefused
	for {
		err := p.Publish(ctx, m)
		switch {
		case err == nil:
			to.answered(id, AnswerAccepted)
			return nil
		case !client.SafeToRetry(err):
			known = AnswerUnknown
		}
		if ctx.Err() != nil {
			to.ledger.forwarded(id, known, l.now())
			return context.Cause(ctx)
		}
		backoff.Sleep(ctx, time.Second)
	}
}

// forwards returns the publisher of a connection.
func (w *simWorker) forwards(life context.Context, conn *client.Conn, queue string) (*client.Publisher[*client.Message], error) {
	w.mu.Lock()
	p := w.forwarding.publisher
	if w.forwarding.conn != conn {
		p = nil
	}
	w.mu.Unlock()
	if p != nil {
		return p, nil
	}
	p, err := client.NewPublisher[*client.Message](life, conn, address.Queue(queue), client.PublisherConfig{}) // perhaps one too many: it ends with conn
	if err != nil {
		return nil, fmt.Errorf("no publisher: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forwarding.conn, w.forwarding.publisher = conn, p
	return p, nil
}
