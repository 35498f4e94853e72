package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/backoff"
)

// More faults, for a RabbitMQ in memory. Those of Run that need processes or nodes are
// done in another way: a worker that is killed loses its network and is started again.
const (
	CutAtFrame        Kind = "cut-at-frame"        // a connection ends before or after one of its next frames
	OneWay            Kind = "one-way"             // what is sent one way on open connections is dropped, permanently
	Latency           Kind = "latency"             // everything takes longer, each way
	AnswersHeld       Kind = "answers-held"        // no publish and no request is answered for a while
	AnswersLate       Kind = "answers-late"        // each is answered late
	BrokerStopped     Kind = "broker-stopped"      // in order, and started again
	ClockDiffers      Kind = "clock-differs"       // a worker is started again with another clock, by seconds or hours
	QueueForgotten    Kind = "queue-forgotten"     // a work queue is gone with all that it held, and declared again
	DelayDeleted      Kind = "delay-deleted"       // a delay or hold queue is, and declared again
	DelayRedeclared   Kind = "delay-redeclared"    // without a time to live, and repaired
	ExchangeDeleted   Kind = "exchange-deleted"    // one that retries or deaths go through, and declared again
	BindingDeleted    Kind = "binding-deleted"     // one of those, and declared again
	ForwardsStuck     Kind = "forwards-stuck"      // nothing takes the copies of a lane for minutes; what doesn't fail flows on
	DeadQueueFull     Kind = "dead-queue-full"     // a dead-letter queue takes no more for a while
	EverythingReset   Kind = "everything-reset"    // all connections end at once
	DeadQueueDeleted  Kind = "dead-queue-deleted"  // a dead-letter queue is gone, and declared again
	ConnectionsBlowUp Kind = "connections-blow-up" // connections of one side end every second

	ClockJumps          Kind = "clock-jumps"           // a worker's clock is set while it runs, by seconds or hours
	DelayFull           Kind = "delay-full"            // the delay or hold queues of a lane take no more for a while
	ParkingFull         Kind = "parking-full"          // the parking queue takes no more, and retries have no way back
	ParkingDeleted      Kind = "parking-deleted"       // it is gone, and declared again
	QueueRedeclared     Kind = "queue-redeclared"      // a work queue is declared otherwise, without dead-lettering, and repaired
	DeadQueueRedeclared Kind = "dead-queue-redeclared" // with a delivery limit, and repaired
	ExchangeRedeclared  Kind = "exchange-redeclared"   // of another type, without bindings or an alternate exchange, and repaired
	BindingRedeclared   Kind = "binding-redeclared"    // with another key or other headers, and repaired
	PolicyDeleted       Kind = "policy-deleted"        // the policy that limits a work queue is gone, and set again
	PolicyRedeclared    Kind = "policy-redeclared"     // it has a narrow limit of length or deliveries, and is repaired
)

// SimulatedKinds are the faults of a Simulation.
var SimulatedKinds = []Kind{
	Reset, EverythingReset, ConnectionsBlowUp, CutAtFrame, HalfOpen, OneWay, Latency, AnswersHeld, AnswersLate, Refuse,
	BrokerKilled, BrokerStopped, MemoryAlarm, DiskAlarm, WorkerKilled, WorkerDrained, LeaderMoved, ClockDiffers, ClockJumps,
	QueueForgotten, QueueRedeclared, DelayDeleted, DelayRedeclared, DelayFull, ForwardsStuck, DeadQueueDeleted, DeadQueueRedeclared, DeadQueueFull,
	ParkingDeleted, ParkingFull, ExchangeDeleted, ExchangeRedeclared, BindingDeleted, BindingRedeclared, PolicyDeleted, PolicyRedeclared,
	ForeignBinding, ForeignFull, Purged, OldDefinitions, PermissionsGone, AlarmAtStart, HandlersHang, Resharded, MembersDeleted, Poisoned, Paused, GroupPaused,
}

// lasting are the faults that last longer than the others: a lane's messages have to meet
// with them.
var lasting = map[Kind]time.Duration{
	ForwardsStuck: 6 * time.Minute, // until those that fail would hold every slot
	DelayFull:     2 * time.Minute, ParkingFull: 2 * time.Minute, DeadQueueFull: 5 * time.Minute,
	ExchangeRedeclared: time.Minute, BindingRedeclared: time.Minute, PolicyRedeclared: time.Minute,
	ForeignBinding: time.Minute, ForeignFull: time.Minute, AlarmAtStart: 3 * time.Minute, HandlersHang: 2 * time.Minute, Resharded: 3 * time.Minute, Poisoned: time.Minute, Paused: time.Minute, GroupPaused: time.Minute,
}

// stretched are the faults that last for hours in a simulation of days.
var stretched = []Kind{Refuse, BrokerKilled, BrokerStopped, MemoryAlarm, DiskAlarm, WorkerKilled, WorkerDrained, PolicyDeleted, Paused}

// mustBeNotified are the faults that must be reported if they hit something.
var mustBeNotified = map[Kind]bool{
	EverythingReset: true, ConnectionsBlowUp: true, HalfOpen: true, Refuse: true, BrokerKilled: true, BrokerStopped: true,
	QueueForgotten: true, QueueRedeclared: true, DelayRedeclared: true, ForwardsStuck: true, DeadQueueRedeclared: true,
}

// simFault is one fault of a schedule.
type simFault struct {
	n     int // in the whole schedule
	kind  Kind
	idle  time.Duration // before it
	lasts time.Duration
	dice  *rand.Rand // what is left to chance
}

// schedule is a pure function of the seed. Every kind comes once before one comes again.
func (s *simulation) schedule() []simFault {
	r := rand.New(rand.NewPCG(s.Seed, 0x73696d))
	var faults []simFault
	var bag []Kind
	for i := range s.Faults {
		if len(bag) == 0 {
			bag = append(bag, s.Kinds...)
			r.Shuffle(len(bag), func(i, j int) { bag[i], bag[j] = bag[j], bag[i] })
		}
		f := simFault{n: i, kind: bag[0], lasts: 500*time.Millisecond + time.Duration(r.Int64N(int64(11*time.Second))), dice: rand.New(rand.NewPCG(s.Seed, 1000+uint64(i)))}
		if f.idle = firstFault; s.Stretch > 1 { // half a day, and up to four
			f.idle = min(time.Duration(rand.New(rand.NewPCG(s.Seed, 2000+uint64(i))).ExpFloat64()*float64(s.stretch(time.Minute))), s.stretch(8*time.Minute))
		}
		if d := lasting[f.kind]; d > 0 {
			f.lasts = d
		}
		if slices.Contains(stretched, f.kind) {
			f.lasts = s.stretch(f.lasts)
		}
		bag = bag[1:]
		if s.Only == nil || slices.Contains(s.Only, i) {
			faults = append(faults, f)
		}
	}
	return faults
}

// breakAll does one fault after the other.
func (s *simulation) breakAll(ctx context.Context, faults []simFault) (done, silent map[Kind]int) {
	done, silent = map[Kind]int{}, map[Kind]int{}
	for i, f := range faults {
		s.hopeless()
		backoff.Sleep(ctx, f.idle)
		if ctx.Err() != nil {
			return done, silent
		}
		s.quiet = append(s.quiet, span{s.quietSince(), time.Since(s.began)})
		s.glance(faults[:i])
		s.use()
		heard, harms := s.heard.Load(), s.harms.Load()
		s.step("fault %d: %s for %v", f.n, f.kind, f.lasts)
		close(s.during[i])
		heal := s.inject(ctx, f)
		backoff.Sleep(ctx, f.lasts)
		if heal != nil {
			heal()
		}
		s.say("fault %d: %s is over", f.n, f.kind)
		healed := time.Since(s.began)
		done[f.kind]++
		backoff.Sleep(ctx, calm+3*(s.idleTimeout()-simIdle))
		after := time.Since(s.began)
		if f.kind == HalfOpen || f.kind == OneWay {
			after = healed + zombie + 3*(s.heartbeat()-time.Minute)
		}
		s.quiet = append(s.quiet, span{after, after})
		s.judge(i, f, s.heard.Load() != heard, s.harms.Load() > harms, silent)
		close(s.after[i])
		backoff.Sleep(ctx, s.stretch(sendingAfter))
	}
	return done, silent
}

// judge counts a fault that nobody reported. If it has done harm, it must be reported.
func (s *simulation) judge(i int, f simFault, notified, harmed bool, silent map[Kind]int) {
	if notified {
		return
	}
	silent[f.kind]++
	if mustBeNotified[f.kind] && harmed {
		s.wrong(Silence, 0, "fault %d, %s for %v: no event and no log reported it", i, f.kind, f.lasts)
	}
}

// Silence is a fault that nobody reported.
const Silence ViolationKind = "silence"

// dial is the network of one side.
func (s *simulation) dial(side Side) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if down := s.down[side]; down != nil && down.Load() {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		return s.broker.Dial(ctx, network, address)
	}
}

// conns are the connections of a side; neither the administrator's nor those of who
// looks at the dead.
func (s *simulation) conns(side Side) (found []*hopbacktest.Connection) {
	defer func() { s.harms.Add(int64(len(found))) }()
	for _, c := range s.broker.Connections() {
		name := c.Info().Container
		publisher, worker := strings.HasPrefix(name, "publisher-"), strings.HasPrefix(name, "worker-")
		if publisher && side != SideWorkers || worker && side != SidePublishers {
			found = append(found, c)
		}
	}
	return found
}

// inject does a fault, and returns what undoes it; nil if nothing has to.
func (s *simulation) inject(ctx context.Context, f simFault) (heal func()) {
	r := f.dice
	side := []Side{SidePublishers, SideWorkers, SideBoth}[r.IntN(3)]
	l := s.lanes[r.IntN(len(s.lanes))]
	w := l.workers[r.IntN(len(l.workers))]
	if heal, done := s.operateGroup(ctx, f); done {
		return heal
	}
	if heal, done := s.operate(ctx, f, l); done {
		return heal
	}
	direction := []hopbacktest.Direction{hopbacktest.DirectionFromClient, hopbacktest.DirectionToClient}[r.IntN(2)]
	one := func(do func(*hopbacktest.Connection)) {
		if all := s.conns(side); len(all) > 0 {
			do(all[r.IntN(len(all))])
		}
	}
	switch f.kind {
	case Reset:
		one((*hopbacktest.Connection).Cut)
	case EverythingReset:
		s.cutAll(SideBoth)
	case ConnectionsBlowUp:
		for end := time.Now().Add(f.lasts); time.Now().Before(end); {
			s.cutAll(side)
			backoff.Sleep(ctx, time.Second)
		}
	case CutAtFrame:
		n := 1 + r.IntN(40)
		one(func(c *hopbacktest.Connection) {
			if r.IntN(2) == 0 {
				c.CutBefore(direction, n)
			} else {
				c.CutAfter(direction, n)
			}
		})
	case HalfOpen:
		for _, c := range s.conns(side) {
			c.Silence(hopbacktest.DirectionFromClient)
			c.Silence(hopbacktest.DirectionToClient)
		}
	case OneWay:
		for _, c := range s.conns(side) {
			c.Silence(direction)
		}
	case Latency, AnswersHeld, AnswersLate, Refuse:
		return s.block(f, side)
	case BrokerKilled:
		s.conns(SideBoth)
		s.broker.Kill()
		return s.broker.Restart
	case BrokerStopped:
		s.conns(SideBoth)
		s.broker.Stop()
		return s.broker.Restart
	case MemoryAlarm:
		s.broker.SetMemoryAlarm(true)
		return func() { s.broker.SetMemoryAlarm(false) }
	case DiskAlarm:
		s.broker.SetDiskAlarm(true)
		return func() { s.broker.SetDiskAlarm(false) }
	case WorkerKilled:
		if r.IntN(4) == 0 {
			for _, w := range l.workers {
				w.kill(f.lasts)
			}
		} else {
			w.kill(f.lasts)
		}
	case WorkerDrained:
		w.drain(f.lasts)
	case LeaderMoved:
		queue := l.queue
		if l.group != nil || l.fair != nil {
			all := l.queues()
			queue = all[r.IntN(len(all))]
		}
		_ = s.broker.Queue(queue).MoveLeader([]string{"rabbit@a", "rabbit@b", "rabbit@c"}[r.IntN(3)])
	case ClockDiffers, ClockJumps:
		s.shiftClock(f, l, w)
	default:
		return s.breakTopology(ctx, f, l)
	}
	return nil
}

// block has the broker answer late, or not at all.
func (s *simulation) block(f simFault, side Side) (heal func()) {
	r := f.dice
	switch f.kind {
	case Latency:
		s.broker.SetLatency(time.Duration(1+r.IntN(1500)) * time.Millisecond)
		return func() { s.broker.SetLatency(0) }
	case AnswersHeld:
		return s.broker.HoldAnswers()
	case AnswersLate:
		s.broker.DelayAnswers(time.Duration(1+r.IntN(5000)) * time.Millisecond)
		return func() { s.broker.DelayAnswers(0) }
	case Refuse:
		for _, d := range []Side{SidePublishers, SideWorkers} {
			s.down[d].Store(side == SideBoth || side == d)
		}
		s.cutAll(side)
		return func() {
			s.down[SidePublishers].Store(false)
			s.down[SideWorkers].Store(false)
		}
	}
	return nil
}

func (s *simulation) cutAll(side Side) {
	for _, c := range s.conns(side) {
		c.Cut()
	}
}

// shiftClock sets a worker's clock, with a new start of the worker or while it runs.
func (s *simulation) shiftClock(f simFault, l *simLane, w *simWorker) {
	r := f.dice
	if f.kind == ClockDiffers {
		by := time.Duration(r.Int64N(int64(2*time.Hour))) - time.Hour
		if r.IntN(2) == 0 {
			by /= 600 // seconds
		}
		w.ahead.Store(int64(s.stretch(by)))
		w.drain(0)
		return
	}
	by := time.Duration(r.Int64N(int64(6*time.Hour))) - 3*time.Hour
	if r.IntN(2) == 0 {
		by /= 1800 // seconds
	}
	// Its next retry is stamped with the current clock, and may wait once more when the
	// worker has learned better.
	from := time.Since(s.began)
	l.broken = append(l.broken, span{from, from + clockRelearned + l.script.delay(maxRetries-1)})
	w.ahead.Store(int64(s.stretch(by)))
}

// clockRelearned is how long after a jump of its clock a worker may give a message the
// wrong time. It asks for the broker's time when a message fails.
const clockRelearned = 10 * time.Minute

// breakTopology does what an operator does by mistake.
func (s *simulation) breakTopology(ctx context.Context, f simFault, l *simLane) (heal func()) {
	if f.kind == ForwardsStuck || l.group != nil || f.kind == QueueRedeclared && l.name == Centralized {
		l = s.lanes[0] // plain workers check nothing: their broker drops what they reject
	}
	from := time.Since(s.began)
	l.breaks(from, f.lasts+deadLetterRetry)
	d := &damage{simulation: s, ctx: ctx, l: l, r: f.dice}
	if heal, done := d.breakQueue(f.kind); done {
		return heal
	}
	switch f.kind {
	case ExchangeDeleted:
		name := l.topology.Exchanges[d.r.IntN(len(l.topology.Exchanges))].Name
		s.step("exchange %s is deleted", name)
		d.deleteExchange(name)
	case ExchangeRedeclared:
		x := l.topology.Exchanges[d.r.IntN(len(l.topology.Exchanges))]
		other := declare.Exchange{Name: x.Name, Type: declare.ExchangeFanout}
		if x.Type == declare.ExchangeFanout {
			other.Type = declare.ExchangeTopic
		}
		s.step("exchange %s is deleted, and declared as another type", x.Name)
		d.deleteExchange(x.Name)
		d.apply(declare.Topology{Exchanges: []declare.Exchange{other}})
		return func() {
			d.deleteExchange(x.Name)
			d.repair()
		}
	case BindingDeleted, BindingRedeclared:
		b := l.topology.Bindings[d.r.IntN(len(l.topology.Bindings))]
		s.step("binding %+v is deleted or changed", b)
		d.deleteBinding(b)
		if f.kind == BindingRedeclared {
			other := b
			other.Key = "elsewhere"
			if len(b.Headers) > 0 {
				other.Headers = map[string]any{"elsewhere": true}
			}
			d.apply(declare.Topology{Bindings: []declare.Binding{other}})
			return func() {
				d.deleteBinding(other)
				d.repair()
			}
		}
	case PolicyDeleted:
		s.broker.DeletePolicy("/", l.name, false)
		return l.setPolicy
	case PolicyRedeclared:
		narrow := map[string]any{"max-length": int64(2), "overflow": "reject-publish"}
		if d.r.IntN(2) == 0 {
			narrow = map[string]any{"delivery-limit": int64(3)}
		}
		s.setPolicy(l.name, "^"+regexp.QuoteMeta(l.queue)+"$", narrow)
		return l.setPolicy
	case ForwardsStuck:
		d.deleteExchange(l.policies[0].Names.Prefix + "retry_exchange")
		failed := l.failed.Load()
		return func() {
			s.harms.Add(l.failed.Load() - failed)
			s.flowing = append(s.flowing, flowing{l.n, span{from + f.lasts/3, from + f.lasts}})
			d.repair()
		}
	}
	return d.repair
}

// damage is what is done to a lane's topology.
type damage struct {
	*simulation
	ctx context.Context
	l   *simLane
	r   *rand.Rand
}

func (d *damage) repair() {
	for _, l := range d.l.sharing() {
		if l.name != Stranger {
			d.insist(d.ctx, "repair lane "+l.name, l.declare)
		}
	}
}

func (d *damage) apply(t declare.Topology) {
	d.insist(d.ctx, "declare otherwise", func(ctx context.Context) error {
		_, err := declare.Apply(ctx, d.admin.Management(), t)
		return err
	})
}

func (d *damage) deleteExchange(name string) {
	d.insist(d.ctx, "delete exchange "+name, func(ctx context.Context) error {
		err := declare.DeleteExchange(ctx, d.admin.Management(), name)
		if errors.Is(err, declare.ErrNotFound) {
			return nil
		}
		return err
	})
}

func (d *damage) deleteBinding(b declare.Binding) {
	d.insist(d.ctx, "delete a binding", func(ctx context.Context) error { return declare.DeleteBinding(ctx, d.admin.Management(), b) })
}

// redeclare deletes a queue, and declares it otherwise. A worker that starts now must
// not take it. The way out is the operator's: what is in it is lost, and noted.
func (d *damage) redeclare(q declare.QuorumQueue, bindings ...declare.Binding) (heal func()) {
	d.drop(q.Name)
	d.apply(declare.Topology{Queues: []declare.Queue{q}, Bindings: bindings})
	d.harms.Add(1)
	for _, w := range d.l.workers {
		w.drain(0)
	}
	return func() {
		d.drop(q.Name)
		d.repair()
	}
}

// full has queues accept nothing more.
func (d *damage) full(names ...string) (heal func()) {
	for i, n := range names {
		names[i] = regexp.QuoteMeta(n)
	}
	d.setPolicy("full", "^("+strings.Join(names, "|")+")$", map[string]any{"max-length": int64(1), "overflow": "reject-publish"})
	return func() { d.broker.DeletePolicy("/", "full", false) }
}

// breakQueue does the faults of queues. It reports whether kind is one of them.
func (d *damage) breakQueue(kind Kind) (heal func(), done bool) {
	l := d.l
	dead, parking := l.policies[0].Names.DeadLetterQueue(l.queue), l.policies[0].Names.ParkingQueue()
	var waiting []string // delay and hold queues
	for _, q := range l.queues() {
		if q != l.queue && q != dead && q != parking {
			waiting = append(waiting, q)
		}
	}
	heal = d.repair
	switch kind {
	case QueueForgotten:
		d.harms.Add(1)
		d.drop(l.queue)
	case QueueRedeclared:
		heal = d.redeclare(declare.QuorumQueue{Name: l.queue, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
	case DeadQueueDeleted:
		d.drop(dead)
	case DeadQueueRedeclared:
		q := declare.QuorumQueue{Name: dead, DeliveryLimit: 1, DeadLetter: declare.DeadLetterTarget{Exchange: l.policies[0].Names.Prefix + "parking_exchange"}}
		for _, b := range l.topology.Bindings {
			if b.Queue == dead {
				return d.redeclare(q, b), true
			}
		}
	case ParkingDeleted:
		d.drop(parking)
	case DelayDeleted:
		if len(waiting) > 0 {
			d.drop(waiting[d.r.IntN(len(waiting))])
		}
	case DelayRedeclared:
		if len(waiting) > 0 {
			heal = d.redeclare(declare.QuorumQueue{Name: waiting[d.r.IntN(len(waiting))], DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited})
		}
	case DelayFull:
		if len(waiting) > 0 {
			heal = d.full(waiting...)
		}
	case DeadQueueFull:
		l.drainers[dead].pause()
		emptied := d.full(dead)
		heal = func() {
			emptied()
			l.drainers[dead].resume()
		}
	case ParkingFull:
		l.drainers[parking].pause()
		emptied := d.full(parking)
		for _, b := range l.topology.Bindings {
			if b.Queue == l.queue {
				d.deleteBinding(b) // of what comes back
			}
		}
		heal = func() {
			emptied()
			d.repair()
			l.drainers[parking].resume()
		}
	default:
		return nil, false
	}
	return heal, true
}

// setPolicy sets a policy of a broker that runs.
func (s *simulation) setPolicy(name, pattern string, definition map[string]any) {
	if err := s.broker.SetPolicy("/", name, hopbacktest.Policy{Pattern: pattern, ApplyTo: "queues", Definition: definition}); err != nil {
		s.wrong(ViolationStuck, 0, "set policy %s: %v", name, err)
	}
}

// setPolicy sets the policy that the lane's work queue has.
func (l *simLane) setPolicy() {
	l.simulation.setPolicy(l.name, "^"+regexp.QuoteMeta(l.queue)+"$", map[string]any{"max-length": int64(1_000_000), "overflow": "reject-publish"})
}

// insist does something until it works.
func (s *simulation) insist(ctx context.Context, what string, do func(context.Context) error) {
	began := time.Now()
	for ctx.Err() == nil {
		once, cancel := context.WithTimeout(ctx, 30*time.Second)
		err := do(once)
		cancel()
		if err == nil {
			return
		}
		if time.Since(began) > 10*time.Minute {
			s.wrong(ViolationStuck, 0, "%s: %v", what, err)
			return
		}
		backoff.Sleep(ctx, time.Second)
	}
}

// drop deletes a queue, and notes what was in it.
func (s *simulation) drop(name string) {
	s.step("queue %s is deleted", name)
	q := s.broker.Queue(name)
	// Nothing comes between the look at it and its end.
	if _, err := q.Freeze(); err != nil {
		return // it is gone already
	}
	s.loses(name)
	s.noteGone(name)
	_ = q.Forget()
}

// parseSimulated reads a list of kinds, separated by commas; nil is all.
func parseSimulated(list string) (kinds []Kind, err error) {
	if list == "all" {
		return nil, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		k := Kind(strings.TrimSpace(name))
		if !slices.Contains(SimulatedKinds, k) {
			return nil, argument.New("kinds", name, "is no fault of a simulation", fmt.Sprintf("use some of %v", SimulatedKinds))
		}
		kinds = append(kinds, k)
	}
	return kinds, nil
}
