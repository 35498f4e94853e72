package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// Simulation is a run with a RabbitMQ in memory. In a testing/synctest bubble its time
// is virtual: hours of it take seconds. It does to that RabbitMQ what can't be done to a
// real one at this rate, and counts as Run does.
//
// The schedule is a pure function of the seed. What the goroutines make of it isn't, in
// every detail: a seed repeats the faults and the fates, not each interleaving.
type Simulation struct {
	Seed uint64
	// Version is "4.3.6", the default, "4.0.5", or "4.4.0".
	Version string
	// Messages in all lanes together. Default: 5,000.
	Messages int
	// Faults is how many. Default: 60.
	Faults int
	// Kinds of faults. Default: all of SimulatedKinds.
	Kinds []Kind
	// Only are the numbers of the faults of the schedule that are done. Default: all.
	Only []int
	// Without are the actors that are left out: see Actors. Default: none.
	Without []string
	// Lanes are the lanes that there are, besides "republish". Default: all, as far as the version has them.
	Lanes []string
	// Stretch is by how much the time between faults, the delays of retries, the times of scheduled, parked and
	// recurring messages, and pauses are longer. With 720, a minute becomes half a day. Default: 1.
	Stretch int
	// Out gets a log of the run. Default: none.
	Out io.Writer
}

// Simulated is what a Simulation has counted.
type Simulated struct {
	Seed uint64
	Tally
	Lanes  map[string]Tally
	Faults map[Kind]int
	// Silent are the faults after which no event and no line of any log came.
	Silent map[Kind]int
	// Virtual is how long it took by the clock of the bubble.
	Virtual time.Duration
	// Healthy is the longest that a message waited whose handler never fails, of those
	// that were accepted when no fault had been there for a while.
	Healthy time.Duration
	// Due is how many retries were due then.
	Due int
	// Claimed is how many parked messages were claimed.
	Claimed int
	// Laned is how many messages of lane "fair" came by one of its queue's lanes.
	Laned int
	// Recurred is how many recurring messages came for times at which nothing was broken.
	Recurred int
	// Steps says in order what was done, and for how long.
	Steps []string
	// Names are those of the lanes.
	Names []string
	// Usage is what was in use before each fault, from the end of the first day on.
	Usage      []usage
	Violations []Violation
	Count      map[ViolationKind]int
}

// More of what can be wrong.
const (
	Starved ViolationKind = "starved" // a message that never fails waited though no fault was there
	Stalled ViolationKind = "stalled" // a retry that was due waited so

	Memory     ViolationKind = "memory"     // all simulations together took more than a few messages are worth
	Multiplied ViolationKind = "multiplied" // it was handled more than once though nothing was broken
)

const (
	// firstFault is from the end of the messages behind a fault to the next fault.
	firstFault = 5 * time.Second
	// sendingAfter is for how long messages are sent when all is well again.
	sendingAfter = 20 * time.Second
	// calm is how long after a fault healthy messages may be late.
	calm = 125 * time.Second
	// zombie is the same where connections fell silent: RabbitMQ ends one after up to three
	// minutes, and delivers to it until then.
	zombie = 190 * time.Second
	// healthyWithin is how long they may wait after that, and retries that are due.
	healthyWithin = 10 * time.Second
	// deadLetterRetry is how long a broken route of a lane can block retries: the broker tries to
	// dead-letter a message again after three minutes.
	deadLetterRetry = 200 * time.Second
	// simPatience is for how long nothing may move at the end.
	simPatience = 30 * time.Minute
	// simIdle is longer than idleTimeout: signs of life cost time in a bubble, too.
	simIdle = 12 * time.Second
	// giveUpAfter is longer than a message takes for all of its retries, even with every fault,
	// and shorter than clocks differ.
	giveUpAfter = 45 * time.Minute
	simWorkers  = 2
	// refusedPause is what publishers wait after a refusal: of several queues, some may have taken
	// the message each time.
	refusedPause = 5 * time.Second
	simSenders   = 3
)

// simDelays are before each retry.
var simDelays = [maxRetries]time.Duration{time.Second, 15 * time.Second, 2 * time.Minute}

// simulation is a running Simulation.
type simulation struct {
	Simulation
	script Script
	number uint64
	began  time.Time
	broker *hopbacktest.Broker
	lanes  []*simLane
	// strange has the messages of somebody who sends to the other lanes' queues, or is nil.
	strange *simLane
	// unread are its messages that can't be decoded: those that were accepted, and those that
	// were in a queue that was deleted or purged.
	unread, unreadGone atomic.Int64
	// foreign are the queues of others, which may be bound to hopback's exchanges.
	foreign map[string]bool
	// definitions are those of the start.
	definitions []byte
	view        *simView
	steps       []string
	usage       []usage
	admin       *client.Conn
	// heard counts events and log lines that report something.
	heard atomic.Int64
	// claimed counts messages that were claimed by their token.
	claimed atomic.Int64
	// laned counts messages of noisy tenants that came by a lane.
	laned atomic.Int64
	// giveUp ends the run early.
	giveUp func()
	// harms counts the connections that faults have hit.
	harms atomic.Int64
	// down refuses new connections of publishers, of workers.
	down map[Side]*atomic.Bool

	mu      sync.Mutex
	trouble violations
	// during and after are closed when a fault begins, and when its effects are over.
	during, after []chan struct{}
	quiet         []span // without a fault, and some time after one
	flowing       []flowing
	healthy       time.Duration
	due           int      // retries that were due when nothing was broken
	waits         [][]wait // by lane: of healthy messages
	owed          []owed
	recurrences   int // for times at which nothing was broken
}

// owed says that healthy messages which a lane's queue accepted in span are to be handled by a time,
// although something is broken.
type owed struct {
	lane int
	span
	by time.Duration
}

type span struct{ from, to time.Duration }

// flowing is a lane on which healthy messages flow although something is broken.
type flowing struct {
	lane int
	span
}

// wait is when a message was accepted, when it was due, at least then, and when it was handled first.
type wait struct{ accepted, due, handled time.Duration }

// Run runs it. It returns when all that it has started has ended.
func (c Simulation) Run(ctx context.Context) (*Simulated, error) {
	if c.Version == "" {
		c.Version = "4.3.6"
	}
	if c.Messages == 0 {
		c.Messages = 5_000
	}
	if c.Faults == 0 {
		c.Faults = 60
	}
	if c.Stretch == 0 {
		c.Stretch = 1
	}
	if len(c.Kinds) == 0 {
		c.Kinds = SimulatedKinds
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	if c.Stretch > 1 { // on some day of the year
		time.Sleep(time.Duration(rand.New(rand.NewPCG(c.Seed, 0x646179)).Int64N(int64(366 * 24 * time.Hour))))
	}
	s := &simulation{
		Simulation: c, foreign: map[string]bool{}, script: Script{Seed: c.Seed, Delays: c.stretchAll(simDelays)}, number: c.Seed, began: time.Now(),
		down: map[Side]*atomic.Bool{SidePublishers: new(atomic.Bool), SideWorkers: new(atomic.Bool)},
	}
	var err error
	if s.broker, err = hopbacktest.New(hopbacktest.Config{Version: c.Version, Nodes: []string{"rabbit@a", "rabbit@b", "rabbit@c"}, Heartbeat: s.heartbeat()}); err != nil {
		return nil, err
	}
	defer s.broker.Close()
	if s.admin, err = client.Connect(ctx, s.broker.URL(), s.config("admin", 0, "")); err != nil {
		return nil, err
	}
	defer closeConn(s.admin)
	s.broker.AddUser("worker", "worker")
	if err := s.broker.SetPermissions("worker", "/", ".*", ".*", ".*"); err != nil {
		return nil, err
	}
	if err := s.makeLanes(ctx); err != nil {
		return nil, err
	}
	return s.run(ctx)
}

func (s *simulation) now() uint32 { return uint32(time.Since(s.began).Milliseconds()) }

func (s *simulation) say(format string, args ...any) {
	fmt.Fprintf(s.Out, "%10s  %s\n", time.Since(s.began).Round(time.Millisecond), fmt.Sprintf(format, args...))
}

func (s *simulation) wrong(kind ViolationKind, lane int, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble.add(Violation{Kind: kind, Lane: lane, Detail: fmt.Sprintf(format, args...)})
}

// notifiesOfAFault says that an event isn't one of those that there are without a fault: a link
// that is up for the first time.
func notifiesOfAFault(e client.Event) bool { return e.Kind != client.EventUp || e.Down > 0 }

// ordinary reports whether a log line is about a dead letter that the script expects.
func ordinary(r slog.Record) (is bool) {
	if strings.HasPrefix(r.Message, "hopback: a handler panicked") {
		return true
	}
	if r.Message != "hopback: a message is dead-lettered" {
		return false
	}
	r.Attrs(func(a slog.Attr) bool {
		switch client.Reason(a.Value.String()) {
		case retry.ReasonPermanent, retry.ReasonExhausted, reasonDeclined:
			is = is || a.Key == "reason"
		}
		return !is
	})
	return is
}

// Handle, Enabled and the rest make a log of s that counts its warnings.
type simLog struct {
	s   *simulation
	who string
}

func (l simLog) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }
func (l simLog) WithAttrs([]slog.Attr) slog.Handler               { return l }
func (l simLog) WithGroup(string) slog.Handler                    { return l }
func (l simLog) Handle(_ context.Context, r slog.Record) error {
	if !ordinary(r) {
		l.s.heard.Add(1)
	}
	if l.s.Out != io.Discard {
		line := l.who + ": " + r.Level.String() + " " + r.Message
		r.Attrs(func(a slog.Attr) bool {
			if a.Key != "stack" {
				line += " " + a.String()
			}
			return true
		})
		l.s.say("%s", line)
	}
	return nil
}

// config is how everything connects; side is empty for what faults spare.
func (s *simulation) config(name string, n int, side Side) client.Config {
	return client.Config{
		Name: fmt.Sprintf("%s-%d", name, n), Dial: s.dial(side), IdleTimeout: s.idleTimeout(),
		Reconnect: client.ReconnectBackoff{Min: 20 * time.Millisecond, Max: 5 * time.Second},
		Logger:    slog.New(simLog{s, fmt.Sprintf("%s-%d", name, n)}),
		OnEvent: func(e client.Event) {
			if notifiesOfAFault(e) {
				s.heard.Add(1)
			}
		},
	}
}

// makeLanes declares what every lane needs.
func (s *simulation) makeLanes(ctx context.Context) error {
	names := []string{"republish", "dead-letter"}
	if s.Version != "4.0.5" {
		names = append(names, "native")
	}
	names = append(names, "versions", "crowd") // see simLane
	for _, actor := range Actors {
		if actor != Stranger && s.affords(actor) && !slices.Contains(s.Without, actor) && (actor != Partitioned && actor != Fair || s.Version != "4.0.5") && (actor != Parking || s.Version == "4.4.0") {
			names = append(names, actor)
		}
	}
	if s.Lanes != nil {
		names = slices.DeleteFunc(names, func(name string) bool { return name != "republish" && !slices.Contains(s.Lanes, name) })
	}
	total := s.Messages / len(names)
	for i, name := range names {
		l := &simLane{simulation: s, script: s.script, n: i, name: name, queue: "work-" + name, prefix: name + ".", total: total, parked: make(chan uint32, total)}
		strategy := retry.Strategy(name)
		switch name {
		case "versions", "crowd", Forwarder, Scheduled, Parking, Recurring:
			strategy = retry.StrategyRepublish
		case Limited, Called:
			strategy = []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter}[s.Seed%2]
		case Centralized:
			strategy, l.script.Plain = retry.StrategyRepublish, true
		case Neighbor:
			l.prefix, l.script.Delays = "republish.", s.stretchAll(neighborDelays)
			strategy = []retry.Strategy{retry.StrategyDeadLetter, retry.StrategyRepublish}[s.Seed%2]
		case Fair:
			strategy = []retry.Strategy{retry.StrategyNative, retry.StrategyRepublish}[s.Seed%2]
		case Partitioned:
			if err := s.makeGroup(ctx, l); err != nil {
				return err
			}
			continue
		}
		later := l.script.Delays
		for k := range later {
			later[k] *= 2
		}
		for _, d := range [][maxRetries]time.Duration{l.script.Delays, later} {
			l.policies = append(l.policies, retry.Policy{
				MaxRetries: maxRetries, Backoff: retry.Delays(d[:]...), Strategy: strategy, Worker: "simulation", Names: retry.Names{Prefix: l.prefix},
				GiveUpAfter: s.stretch(giveUpAfter),
			})
		}
		if name != "versions" {
			l.policies = l.policies[:1]
		}
		switch name {
		case Fair:
			s.makeFair(l)
		case Recurring:
			s.makeRecurring(l)
		case Limited:
			s.makeLimited(l)
		}
		s.add(l)
		l.setPolicy()
		if err := l.declare(ctx); err != nil {
			return err
		}
	}
	s.makeStrange(total)
	s.definitions = s.export()
	return nil
}

// add gives a lane its account.
func (s *simulation) add(l *simLane) {
	l.ledger = NewLedger(l.script, l.n, l.total)
	l.ledger.times.off = true
	s.waits = append(s.waits, make([]wait, l.total))
	if l.name != Stranger {
		s.lanes = append(s.lanes, l)
	}
}

// all are the lanes, and the strange one.
func (s *simulation) all() []*simLane {
	if s.strange == nil {
		return s.lanes
	}
	return append(slices.Clone(s.lanes), s.strange)
}

func (s *simulation) run(ctx context.Context) (*Simulated, error) {
	work, stop := context.WithCancel(ctx)
	defer stop()
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	for _, l := range s.lanes {
		if err := l.open(work, &running); err != nil {
			return nil, err
		}
	}
	ctx, s.giveUp = context.WithCancel(ctx)
	defer s.giveUp()
	schedule := s.schedule()
	for range schedule {
		s.during, s.after = append(s.during, make(chan struct{})), append(s.after, make(chan struct{}))
	}
	var senders sync.WaitGroup
	endStrange := func() {}
	if s.strange != nil {
		endStrange = s.openStrange(ctx)
	}
	endOperator, endView := s.openOperator(ctx), s.openView(work)
	for n := range simSenders {
		senders.Go(func() { s.send(ctx, n, schedule) })
	}
	faults, silent := s.breakAll(ctx, schedule)
	senders.Wait()
	endStrange()
	endOperator()
	s.drain(ctx)
	s.checkSlots(ctx)
	s.checkView(ctx)
	endView()
	s.checkUsage()
	s.quiet = append(s.quiet, span{s.quietSince(), time.Since(s.began)})
	s.sweep()

	rep := &Simulated{
		Seed: s.Seed, Lanes: map[string]Tally{}, Faults: faults, Silent: silent, Virtual: time.Since(s.began),
		Count: map[ViolationKind]int{}, Steps: s.steps, Usage: s.usage,
	}
	stop()
	running.Wait()
	for _, l := range s.all() {
		rep.Names = append(rep.Names, l.name)
		s.checkWaits(l)
		s.checkRetries(l)
		s.checkRecurring(l, time.Now().Add(-time.Minute))
		v := l.ledger.Check(1)
		rep.Tally.add(v.Tally)
		rep.Lanes[l.name] = v.Tally
		rep.Violations = append(rep.Violations, v.Violations...)
		for k, n := range v.Count {
			rep.Count[k] += n
		}
	}
	rep.Healthy, rep.Due, rep.Claimed = s.healthy, s.due, int(s.claimed.Load())
	rep.Recurred, rep.Laned = s.recurrences, int(s.laned.Load())
	rep.Violations = append(rep.Violations, s.trouble.list...)
	for k, n := range s.trouble.count {
		rep.Count[k] += n
	}
	return rep, nil
}

// hopeless gives the run up when so much is wrong already that the rest would only take
// time.
func (s *simulation) hopeless() {
	n := 0
	for _, l := range s.all() {
		n += l.ledger.Wrong()
	}
	if n > 20 {
		s.giveUp()
	}
}

func (s *simulation) quietSince() time.Duration {
	if len(s.quiet) == 0 {
		return calm
	}
	return s.quiet[len(s.quiet)-1].to
}

// checkWaits looks for healthy messages that waited though nothing was broken.
func (s *simulation) checkWaits(l *simLane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, w := range s.waits[l.n] {
		if w.accepted == 0 || w.handled == 0 || l.script.Fate(l.n, uint32(id)) != (Fate{EndHandled, 0}) || l.waitsForItsKey(uint32(id)) || l.isNoisy(uint32(id)) {
			continue
		}
		for _, o := range s.owed {
			if o.lane == l.n && o.from <= w.accepted && w.accepted <= o.to && w.handled > o.by {
				s.trouble.add(Violation{Starved, l.n, uint32(id), fmt.Sprintf("accepted at %v, when no worker was there, and handled only at %v, though workers were back and it was due by %v", w.accepted, w.handled, o.by)})
			}
		}
		well := slices.ContainsFunc(s.flowing, func(f flowing) bool { return f.lane == l.n && f.has(w.accepted) && f.has(w.due) })
		if !well && (!s.isQuiet(w.accepted, w.due) || w.due > w.accepted && l.isBroken(w.due)) {
			continue
		}
		s.healthy = max(s.healthy, w.handled-w.due)
		if n := l.ledger.handled[id]; n > 1 && !well && !s.script.Impatient(l.n, uint32(id)) {
			s.trouble.add(Violation{Multiplied, l.n, uint32(id), fmt.Sprintf("accepted at %v, when nothing was broken, and handled %d times", w.accepted, n)})
		}
		if d := w.handled - w.due; d > healthyWithin {
			s.trouble.add(Violation{Starved, l.n, uint32(id), fmt.Sprintf("accepted at %v, due at %v, and handled %v after it", w.accepted, w.due, d)})
		}
	}
}

// checkRetries looks for retries that came late though nothing was broken.
func (s *simulation) checkRetries(l *simLane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, first := range l.ledger.first {
		for k := range maxRetries {
			if first[k] == 0 || first[k+1] == 0 {
				continue
			}
			delay := l.script.delay(k)
			if l.name == "versions" || l.name == Stranger {
				delay *= 2 // as the later version's are
			}
			due, came := ms(first[k]-1)+delay, ms(first[k+1]-1)
			if !s.isQuiet(due, due) || l.isBroken(due) {
				continue
			}
			if failed := due - delay; s.Stretch > 1 && !s.isQuiet(failed, failed) {
				continue // a fault may have held its copy for an hour
			}
			s.due++
			if l.waitedElsewhere(due, ms(first[k+1])-ms(first[k])) || l.isNoisy(uint32(id)) {
				continue
			}
			if late := came - due; late > healthyWithin {
				s.trouble.add(Violation{Stalled, l.n, uint32(id), fmt.Sprintf("retry %d was due at %v, and came %v after it", k+1, due, late)})
			}
		}
	}
}

// waitedElsewhere says that a retry has waited for another delay of the policy, some time after something of
// the lane was broken: a worker looks again only when a message fails, and that message takes another way
// round what isn't broken any more.
func (l *simLane) waitedElsewhere(due, waited time.Duration) bool {
	if !slices.ContainsFunc(l.broken, func(q span) bool { return q.from <= due && due <= q.to+l.stretch(10*time.Minute) }) {
		return false
	}
	return slices.ContainsFunc(l.script.Delays[:], func(d time.Duration) bool { return d <= waited+ms(earlyTolerance) && waited <= d+time.Second })
}

// isQuiet says that nothing was broken from one time to another, and for as long as something may take.
func (s *simulation) isQuiet(from, to time.Duration) bool {
	return slices.ContainsFunc(s.quiet, func(q span) bool { return q.has(from) && q.has(to) })
}

// isBroken says that messages of the lane may wait at a time because something of it was broken.
func (l *simLane) isBroken(at time.Duration) bool {
	return slices.ContainsFunc(l.broken, func(q span) bool { return q.from <= at+healthyWithin && at <= q.to })
}

func (q span) has(at time.Duration) bool { return q.from <= at && at+healthyWithin <= q.to }

// send is one of the publishers. Each has a connection, and publishes to all lanes.
func (s *simulation) send(ctx context.Context, n int, faults []simFault) {
	conn, err := s.connect(ctx, "publisher", n, SidePublishers)
	if err != nil {
		s.wrong(ViolationStuck, 0, "publisher %d: %v", n, err)
		return
	}
	defer closeConn(conn)
	r := rand.New(rand.NewPCG(s.Seed, 100+uint64(n)))
	var sending sync.WaitGroup
	defer sending.Wait()
	publishers := s.publishers(ctx, conn)
	next := 0
	// burst sends messages up to one, a few at once so that there is something to overlap,
	// within a time from when something happens.
	burst := func(to int, begins <-chan struct{}, within time.Duration) {
		select {
		case <-begins:
		case <-ctx.Done():
		}
		began, first := time.Now(), next
		for ; next < to; next++ {
			due := within * time.Duration((next-first)/4*4) / time.Duration(to-first)
			backoff.Sleep(ctx, due-time.Since(began)+time.Duration(r.IntN(1000))*time.Millisecond)
			for i, l := range s.lanes {
				id := uint32(next*simSenders + n)
				switch l.name {
				case Forwarder, Recurring: // its messages come from another lane's handlers, or its groups
				case Fair:
					l.publishFair(ctx, &sending, publishers[i], id)
				case Partitioned:
					sending.Go(func() { l.inOrder(l.ledger, l.key(id), id, func() { l.publish(ctx, publishers[i], id) }) })
				default:
					sending.Go(func() { l.publish(ctx, publishers[i], id) })
				}
			}
			if s.strange != nil {
				s.strange.tasks <- uint32(next*simSenders + n)
			}
		}
	}
	each := s.lanes[0].total / simSenders
	for i, f := range faults {
		burst((2*i+1)*each/(2*len(faults)), s.during[i], f.lasts)
		burst((i+1)*each/len(faults), s.after[i], s.stretch(sendingAfter))
	}
}

// publish sends a message of the lane, and notes what is known of it.
func (l *simLane) publish(ctx context.Context, p publishing, id uint32) {
	l.ledger.Sending(id)
	answer := (&lane{run: &run{script: l.script, number: l.number, edit: l.edit, again: refusedPause}, n: l.n}).send(ctx, p, id)
	l.answered(id, answer)
}

func (l *simLane) answered(id uint32, answer Answer) {
	l.ledger.Answered(id, answer, l.now())
	if answer == AnswerAccepted {
		l.mu.Lock()
		defer l.mu.Unlock()
		w := &l.waits[l.n][id]
		w.accepted = time.Since(l.began)
		w.due = max(w.due, w.accepted, ms(l.ledger.due(id)))
	}
}

// connect connects until it works.
func (s *simulation) connect(ctx context.Context, name string, n int, side Side) (*client.Conn, error) {
	for {
		conn, err := client.Connect(ctx, s.broker.URL(), s.config(name, n, side))
		if err == nil || ctx.Err() != nil {
			return conn, err
		}
		backoff.Sleep(ctx, time.Second)
	}
}

// drain waits until every message has ended and every queue is empty.
func (s *simulation) drain(ctx context.Context) {
	last, moved := -1, time.Now()
	for {
		open, left := 0, ""
		for _, l := range s.all() {
			open += l.ledger.Open()
		}
		ended := open == 0
		for _, l := range s.all() {
			for _, q := range l.queues() {
				n := s.count(q, ended)
				if n > 0 && ended && time.Since(moved) > 2*deadLetterRetry {
					n -= s.kept(q)
				}
				if n > 0 {
					open += n
					left += fmt.Sprintf(" %s %d,", q, n)
					if time.Since(moved) > s.stretch(simPatience) {
						s.say("left in %s: %+v", q, s.broker.Queue(q).Messages())
					}
				}
			}
		}
		if open == 0 {
			return
		}
		if time.Since(moved) > s.stretch(simPatience)/2 {
			s.diverted()
		}
		if open != last {
			last, moved = open, time.Now()
		}
		if time.Since(moved) > s.stretch(simPatience) || ctx.Err() != nil {
			s.wrong(ViolationLeft, 0, "nothing has moved for %v; messages are left in%s", time.Since(moved).Round(time.Second), left)
			for _, l := range s.all() {
				if missing := l.ledger.Missing(5); len(missing) > 0 {
					s.wrong(ViolationStuck, l.n, "lane %s still waits for %v", l.name, missing)
				}
			}
			return
		}
		backoff.Sleep(ctx, s.stretch(time.Second))
	}
}

// count is how many messages are in a queue; exactly, without those that nobody can read and that have got
// where they belong. To find those takes long.
func (s *simulation) count(queue string, exactly bool) int {
	n := s.broker.Queue(queue).Counts().Messages
	if slices.ContainsFunc(s.lanes, func(l *simLane) bool { return l.recurring.token(queue) }) {
		return tokens(n)
	}
	if n > 0 && exactly && s.isDeadLetterQueue(queue) {
		n -= s.unreadable(queue)
	}
	return n
}

// kept is how many messages RabbitMQ keeps in a queue although they have arrived where they belong: their other target, of
// another team, was full, and is no longer bound (TestDeadLettersOfAQueueThatWasUnboundAreKept).
func (s *simulation) kept(queue string) (n int) {
	for _, m := range s.broker.Queue(queue).Messages() {
		if m.State == "dead-lettering" {
			n++
		}
	}
	return n
}

// simLane is a work queue with its workers. Lane "versions" has workers with an older and a
// newer version of its policy, lane "crowd" has many consumers on one connection.
type simLane struct {
	*simulation
	script Script // its delays are the lane's
	n      int
	name   string
	queue  string
	prefix string
	total  int
	edit   func(*client.Message, uint32)
	group  *simGroup // of lane "partitioned"
	fair   *simFair  // of lane "fair"
	limit  *simLimit // of lane "limited"
	// paused is from when on no call may begin; nil: the lane isn't paused.
	paused atomic.Pointer[time.Time]
	// recurring are the groups of lane "recurring".
	recurring *simGroups
	tasks     chan uint32 // of the stranger
	parked    chan uint32 // of lane "parking": what may be claimed
	policies  []retry.Policy
	ledger    *Ledger
	workers   []*simWorker
	topology  declare.Topology
	failed    atomic.Int64 // attempts that are to be retried
	drainers  map[string]*drainer
	broken    []span // when something of it was, or messages still waited for that
}

// declare declares what the lane needs. It may be called again.
func (l *simLane) declare(ctx context.Context) error {
	if l.group != nil {
		return l.declareGroup(ctx, l.group.current()...)
	}
	l.topology = declare.Topology{}
	for _, p := range l.policies {
		t, err := l.topologyOf(p)
		if err != nil {
			return err
		}
		if _, err := declare.Apply(ctx, l.admin.Management(), t); err != nil {
			return fmt.Errorf("lane %s: %w", l.name, err)
		}
		l.topology.Queues = append(l.topology.Queues, t.Queues...)
		l.topology.Exchanges = append(l.topology.Exchanges, t.Exchanges...)
		l.topology.Bindings = append(l.topology.Bindings, t.Bindings...)
	}
	return nil
}

// topologyOf is what the lane needs for one of its policies.
func (l *simLane) topologyOf(p retry.Policy) (t declare.Topology, err error) {
	q := declare.QuorumQueue{Name: l.queue, DeliveryLimit: declare.Unlimited}
	if l.name == Centralized {
		return retry.CentralTopology(p, l.central(), q)
	}
	if l.fair != nil {
		return l.fair.queue.Topology(p, declare.QuorumQueue{DeliveryLimit: declare.Unlimited})
	}
	if t, err = retry.Topology(p, q); err == nil && l.recurring != nil {
		err = l.recurring.addGroups(&t)
	}
	if err != nil || l.name != Scheduled {
		return t, err
	}
	ladder, err := schedule.Topology(l.ladder(), l.queue)
	t.Queues, t.Exchanges, t.Bindings = append(t.Queues, ladder.Queues...), append(t.Exchanges, ladder.Exchanges...), append(t.Bindings, ladder.Bindings...)
	return t, err
}

// queues are the names of all queues of the lane.
func (l *simLane) queues() []string {
	if l.group != nil {
		return l.queuesOfGroup()
	}
	var names []string
	for _, q := range l.topology.Queues {
		if name := q.Address().QueueName(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// open starts the lane's workers, and what looks at its dead.
func (l *simLane) open(ctx context.Context, running *sync.WaitGroup) error {
	burying, err := client.Connect(ctx, l.broker.URL(), l.config("bury-"+l.name, 0, ""))
	if err != nil {
		return err
	}
	var drained sync.WaitGroup
	l.drainers = map[string]*drainer{}
	for queue, parked := range l.deadLetterQueues() {
		b := new(drainer)
		l.drainers[queue] = b
		drained.Go(func() {
			for ctx.Err() == nil { // the queue may be gone for a while
				if working, ok := b.work(ctx); ok {
					_ = l.collectDeadLetters(working, burying, queue, parked)
				}
				backoff.Sleep(ctx, time.Second)
			}
		})
	}
	running.Go(func() {
		drained.Wait()
		closeConn(burying)
	})
	size := simWorkers
	if l.fair != nil || l.recurring != nil || l.limit != nil {
		size = sharedWorkers
	}
	for n := range size {
		w := &simWorker{lane: l, n: n}
		if l.group == nil {
			w.policy = l.policies[n%len(l.policies)]
		}
		w.life, w.end = context.WithCancel(ctx)
		l.workers = append(l.workers, w)
		running.Go(func() { w.run(ctx) })
	}
	return nil
}

// deadLetterQueues are the queues of the lane's dead, and whether what is in them is parked. Lanes that share a
// parking queue may both read it.
func (l *simLane) deadLetterQueues() map[string]bool {
	if l.group != nil {
		return map[string]bool{l.group.dead: false}
	}
	all := map[string]bool{l.policies[0].Names.DeadLetterQueue(l.queue): false, l.policies[0].Names.ParkingQueue(): true}
	if l.name == Scheduled || l.name == Recurring {
		all[l.ladder().UndeliverableQueue()] = true
	}
	return all
}

// collectDeadLetters consumes the dead letters, or what is parked. A message may be another lane's, if they share the
// parking queue.
func (l *simLane) collectDeadLetters(ctx context.Context, conn *client.Conn, queue string, parked bool) error {
	return conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		if special(d.Message()) {
			l.unreadGone.Add(1)
			return nil
		}
		if l.recurred(d.Message()) {
			return nil
		}
		of, id, err := l.read(d.Message())
		if err != nil {
			l.ledger.Foreign(fmt.Sprintf("in %s: %v", queue, err))
			return nil
		}
		end, why := endOf(d.Message())
		if parked {
			end = EndParked
		}
		of.ledger.Dead(id, end, why, retry.Count(d.Message()), l.now())
		return nil
	}), client.ConsumerConfig{Concurrency: 4, Prefetch: 500, Grace: 5 * time.Second})
}

// read returns which lane's message m is, and which.
func (s *simulation) read(m *client.Message) (*simLane, uint32, error) {
	if m != nil && len(m.Data) == 1 && len(m.Data[0]) > bodyHead {
		for _, l := range s.all() {
			if l.n == int(m.Data[0][8]) {
				id, err := readMessage(m, s.number, l.n)
				return l, id, err
			}
		}
	}
	return nil, 0, errors.New("a body of another kind")
}

// drainer takes what is in a queue of dead messages, until it is to pause.
type drainer struct {
	mu     sync.Mutex
	paused bool
	end    context.CancelFunc
}

// work returns the context to work in, if it is to work now.
func (b *drainer) work(ctx context.Context) (context.Context, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	ctx, b.end = context.WithCancel(ctx)
	return ctx, !b.paused
}

func (b *drainer) pause() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paused = true
	if b.end != nil {
		b.end()
	}
}

func (b *drainer) resume() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.paused = false
}

var errSimKilled = errors.New("this worker is dead")
