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
)

// More faults, for a RabbitMQ in memory. Those of Run that need processes or nodes are
// done in another way: a worker that is killed loses its network and is started again.
const (
	CutAtFrame        Kind = "cut-at-frame"        // a connection ends before or after one of its next frames
	OneWay            Kind = "one-way"             // what is sent one way on open connections is dropped, for ever
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
)

// SimulatedKinds are the faults of a Simulation.
var SimulatedKinds = []Kind{
	Reset, EverythingReset, ConnectionsBlowUp, CutAtFrame, HalfOpen, OneWay, Latency, AnswersHeld, AnswersLate, Refuse,
	BrokerKilled, BrokerStopped, MemoryAlarm, DiskAlarm, WorkerKilled, WorkerDrained, LeaderMoved, ClockDiffers,
	QueueForgotten, DelayDeleted, DelayRedeclared, ExchangeDeleted, BindingDeleted, ForwardsStuck, DeadQueueFull, DeadQueueDeleted,
}

// told are the faults that somebody must tell of, if there are connections that they hit.
var told = map[Kind]bool{
	EverythingReset: true, ConnectionsBlowUp: true, HalfOpen: true, Refuse: true, BrokerKilled: true, BrokerStopped: true,
	DelayRedeclared: true, ForwardsStuck: true,
}

// simFault is one fault of a schedule.
type simFault struct {
	kind  Kind
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
		f := simFault{kind: bag[0], lasts: 500*time.Millisecond + time.Duration(r.Int64N(int64(11*time.Second))), dice: rand.New(rand.NewPCG(s.Seed, 1000+uint64(i)))}
		bag = bag[1:]
		faults = append(faults, f)
	}
	return faults
}

// breakAll does one fault after the other.
func (s *simulation) breakAll(ctx context.Context) (done, silent map[Kind]int) {
	done, silent = map[Kind]int{}, map[Kind]int{}
	for i, f := range s.schedule() {
		at := time.Duration(i)*faultEvery + 5*time.Second
		s.hopeless()
		pauseFor(ctx, at-time.Since(s.began))
		if ctx.Err() != nil {
			return done, silent
		}
		s.quiet = append(s.quiet, span{s.quietSince(), time.Since(s.began)})
		heard, harms := s.heard.Load(), s.harms.Load()
		s.say("fault %d: %s for %v", i, f.kind, f.lasts)
		heal := s.inject(ctx, f)
		pauseFor(ctx, f.lasts)
		if heal != nil {
			heal()
		}
		s.say("fault %d: %s is over", i, f.kind)
		healed := time.Since(s.began)
		done[f.kind]++
		pauseFor(ctx, calm)
		after := healed + calm
		if f.kind == HalfOpen || f.kind == OneWay {
			after = healed + zombie
		}
		s.quiet = append(s.quiet, span{after, after})
		if s.heard.Load() == heard {
			silent[f.kind]++
			if told[f.kind] && s.harms.Load() > harms {
				s.wrong(Silence, 0, "fault %d, %s for %v: no event and no log told of it", i, f.kind, f.lasts)
			}
		}
	}
	return done, silent
}

// Silence is a fault that nobody told of.
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
		if publisher && side != Workers || worker && side != Publishers {
			found = append(found, c)
		}
	}
	return found
}

// stuckFor is how long ForwardsStuck lasts: until those that fail would hold every slot.
const stuckFor = 6 * time.Minute

// inject does a fault, and returns what undoes it; nil if nothing has to.
func (s *simulation) inject(ctx context.Context, f simFault) (heal func()) {
	r := f.dice
	side := []Side{Publishers, Workers, Both}[r.IntN(3)]
	l := s.lanes[r.IntN(len(s.lanes))]
	w := l.workers[r.IntN(len(l.workers))]
	direction := []hopbacktest.Direction{hopbacktest.FromClient, hopbacktest.ToClient}[r.IntN(2)]
	one := func(do func(*hopbacktest.Connection)) {
		if all := s.conns(side); len(all) > 0 {
			do(all[r.IntN(len(all))])
		}
	}
	cutAll := func(side Side) {
		for _, c := range s.conns(side) {
			c.Cut()
		}
	}
	switch f.kind {
	case Reset:
		one((*hopbacktest.Connection).Cut)
	case EverythingReset:
		cutAll(Both)
	case ConnectionsBlowUp:
		for end := time.Now().Add(f.lasts); time.Now().Before(end); {
			cutAll(side)
			pauseFor(ctx, time.Second)
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
			c.Silence(hopbacktest.FromClient)
			c.Silence(hopbacktest.ToClient)
		}
	case OneWay:
		for _, c := range s.conns(side) {
			c.Silence(direction)
		}
	case Latency:
		s.broker.SetLatency(time.Duration(1+r.IntN(1500)) * time.Millisecond)
		return func() { s.broker.SetLatency(0) }
	case AnswersHeld:
		return s.broker.HoldAnswers()
	case AnswersLate:
		s.broker.DelayAnswers(time.Duration(1+r.IntN(5000)) * time.Millisecond)
		return func() { s.broker.DelayAnswers(0) }
	case Refuse:
		for _, d := range []Side{Publishers, Workers} {
			s.down[d].Store(side == Both || side == d)
		}
		cutAll(side)
		return func() {
			s.down[Publishers].Store(false)
			s.down[Workers].Store(false)
		}
	case BrokerKilled:
		s.conns(Both)
		s.broker.Kill()
		return s.broker.Restart
	case BrokerStopped:
		s.conns(Both)
		s.broker.Stop()
		return s.broker.Restart
	case MemoryAlarm, DiskAlarm:
		a := map[Kind]hopbacktest.Alarm{MemoryAlarm: hopbacktest.MemoryAlarm, DiskAlarm: hopbacktest.DiskAlarm}[f.kind]
		s.broker.SetAlarm(a, true)
		return func() { s.broker.SetAlarm(a, false) }
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
		_ = s.broker.Queue(l.queue).MoveLeader([]string{"rabbit@a", "rabbit@b", "rabbit@c"}[r.IntN(3)])
	case ClockDiffers:
		by := time.Duration(r.Int64N(int64(2*time.Hour))) - time.Hour
		if r.IntN(2) == 0 {
			by /= 600 // seconds
		}
		w.ahead.Store(int64(by))
		w.drain(0)
	default:
		return s.breakTopology(ctx, f, l)
	}
	return nil
}

// breakTopology does what an operator does by mistake.
func (s *simulation) breakTopology(ctx context.Context, f simFault, l *simLane) (heal func()) {
	r, m := f.dice, s.admin.Management()
	l.ledger.Broken()
	repair := func() {
		s.insist(ctx, "repair lane "+l.name, func(ctx context.Context) error { return l.declare(ctx) })
	}
	dead := l.policies[0].Names.DeadLetterQueue(l.queue)
	var waiting []string // delay and hold queues
	for _, q := range l.queues() {
		if q != l.queue && q != dead && !strings.Contains(q, "parking") {
			waiting = append(waiting, q)
		}
	}
	switch f.kind {
	case QueueForgotten:
		s.drop(ctx, l, l.queue)
	case DeadQueueDeleted:
		s.drop(ctx, l, dead)
	case DelayDeleted:
		if len(waiting) > 0 {
			s.drop(ctx, l, waiting[r.IntN(len(waiting))])
		}
	case DelayRedeclared:
		if len(waiting) == 0 {
			return nil
		}
		name := waiting[r.IntN(len(waiting))]
		s.drop(ctx, l, name)
		s.insist(ctx, "redeclare "+name, func(ctx context.Context) error {
			_, err := declare.Apply(ctx, m, declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: name, DeadLetter: declare.Drop(), DeliveryLimit: declare.Unlimited}}})
			return err
		})
		// A worker that starts now must not take it.
		s.harms.Add(1)
		for _, w := range l.workers {
			w.drain(0)
		}
		return func() { // the operator's way out: what is in it is lost, and noted
			s.drop(ctx, l, name)
			repair()
		}
	case ExchangeDeleted:
		name := l.topology.Exchanges[r.IntN(len(l.topology.Exchanges))].Name
		s.say("exchange %s", name)
		s.insist(ctx, "delete exchange "+name, func(ctx context.Context) error {
			err := declare.DeleteExchange(ctx, m, name)
			if errors.Is(err, declare.ErrMissing) {
				return nil
			}
			return err
		})
	case BindingDeleted:
		b := l.topology.Bindings[r.IntN(len(l.topology.Bindings))]
		s.say("binding %+v", b)
		s.insist(ctx, "delete a binding", func(ctx context.Context) error { return declare.DeleteBinding(ctx, m, b) })
	case ForwardsStuck:
		l = s.lanes[0]
		l.ledger.Broken()
		exchange := l.policies[0].Names.Prefix + "retry_exchange"
		s.insist(ctx, "delete exchange "+exchange, func(ctx context.Context) error { return declare.DeleteExchange(ctx, m, exchange) })
		from, failed := time.Since(s.began), l.failed.Load()
		pauseFor(ctx, stuckFor)
		s.harms.Add(l.failed.Load() - failed)
		s.flowing = append(s.flowing, flowing{l.n, span{from + stuckFor/3, from + stuckFor}})
	case DeadQueueFull:
		_ = s.broker.SetPolicy("/", "full", hopbacktest.Policy{
			Pattern: "^" + regexp.QuoteMeta(dead) + "$", ApplyTo: "queues", Definition: map[string]any{"max-length": int64(1), "overflow": "reject-publish"},
		})
		return func() { s.broker.DeletePolicy("/", "full", false) }
	}
	return repair
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
			s.wrong(Stuck, 0, "%s: %v", what, err)
			return
		}
		pauseFor(ctx, time.Second)
	}
}

// drop deletes a queue, and notes what was in it.
func (s *simulation) drop(ctx context.Context, l *simLane, name string) {
	s.say("queue %s", name)
	q := s.broker.Queue(name)
	// Nothing comes between the look at it and its end.
	if _, err := q.Freeze(); err != nil {
		return // it is gone already
	}
	for _, m := range q.Messages() {
		id, err := readMessage(m.Message, l.number, l.n)
		if err != nil {
			l.ledger.Foreign("in " + name + ": " + err.Error())
			continue
		}
		l.ledger.Gone(id)
	}
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
