package partition

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
)

// worker is one call of Consume. Its loop alone changes what it knows of partitions and members:
//
//	consumers ──turn, over──▶ loop ◀──beats── members' exchange
//	                           │ └──own beat──────▶
//	                     Serve, StepBack
type worker struct {
	group Group
	cfg   Config
	inner client.Handler
	log   *slog.Logger
	self  string
	beat  beat        // Worker and Born
	waits atomic.Bool // for Reshard; no worker of the generation sends beats
	slots chan struct{}
	trial chan struct{} // has room for one: the message that is tried alone
	// reserved is the partition that trial is reserved for; nil: none.
	reservation   sync.Mutex
	reserved      *part
	reservedUntil *time.Timer
	held          holding // keys whose messages wait for the generation before
	// control keeps handlers from beginning. The worker keeps its partitions and all that it holds, so nothing changes its
	// place: what waits for a retry, and what waits behind it. Shortly before the consumer timeout all of it returns to the
	// queue in its order, and comes back, as ever.
	control  client.Control
	pausable *inside.Group   // for package pause
	limit    atomic.Int64    // the group's delivery limit; -1: none, or unknown during an alarm
	ctx      context.Context // of its consumers
	// consume consumes from a partition's queue until ctx ends, and fail ends the worker.
	consume   func(ctx context.Context, p *part) error
	fail      context.CancelCauseFunc
	consumers sync.WaitGroup
	// timeout is how long the broker lets the worker hold a message, in ns.
	timeout atomic.Int64
	parts   []*part
	seals   seals
	clock   *clock

	events chan func()   // to be called by the loop
	left   chan struct{} // closed when no more consumers are started
	ended  chan struct{}
	beats  chan beat // to the goroutine that sends; has room for one

	// The loop's:
	members  members
	n        uint64
	started  time.Time
	heard    time.Time // when its own beat has come back, so it hears the others; zero: it hasn't
	attached bool      // it has been in line wherever it wanted to at first
	joined   bool      // it takes partitions
	leaving  bool
	// owners is whom each partition belongs to, and wants where the worker is to be in line. Both
	// follow from the members and what each has; nil: these have changed.
	owners   []string
	wants    []bool
	vanished []lost
	drained  []string  // markers to report
	reported time.Time // when it last sent a beat
	asked    bool      // somebody has asked for one since
	wake     *time.Timer
	due      time.Time // when wake fires; zero: it doesn't
}

type turn = inside.Turn[*client.Delivery]

// part is one partition. The loop alone changes it, except leaving.
type part struct {
	of    *worker
	i     int
	queue string

	// detach ends the consumer, which puts the worker in line; nil: there is none. lined says that
	// it is in line, detaching that the consumer is ending, and retry when one may be started.
	detach    context.CancelFunc
	lined     bool
	detaching bool
	retry     time.Time

	turn    turn // nil: another worker is active
	current atomic.Pointer[turn]
	// poisons are the messages of this turn that count as poison. trying is what was known of the last one that was tried when it
	// was, also in an earlier turn; worker.trial guards it.
	poisons poisons
	trying  suspicion
	warned  atomic.Bool // of messages with a priority or a ttl, in this turn
	// fresh says that this turn has received a message that was never delivered before, and disordered
	// that one came later that was. The consumer's goroutine alone uses them.
	fresh, disordered bool
	active            time.Time // since when
	serves            bool
	leaving           chan struct{} // closed when the turn is to end; one for each turn
	// steps counts how often it was passed on since its owner was last seen, and until is before
	// when it isn't given up again: nobody else takes it.
	steps   int
	until   time.Time
	patient time.Duration
}

const (
	// handover is how long a worker waits before it takes a partition over that another one still
	// claims: that one has lost it, and its handlers learn that. Or its beat is on its way.
	handover = 200 * time.Millisecond
	// settling is for how long the members must have been the same before a worker gives up a
	// partition, so that several that come at once move it once.
	settling = 300 * time.Millisecond
	// hearing is how long a new worker waits for its own beat, and replying for the others' after
	// it.
	hearing  = time.Second
	replying = 100 * time.Millisecond
	// lining is how long an active worker waits for the owner to be in line, before it serves the
	// partition in the meantime.
	lining = 500 * time.Millisecond
	// attachAgain is the time between attempts to attach.
	attachAgain = time.Second
	// passes is how often each worker passes a partition on before it takes it although it
	// belongs to another, which isn't in the line.
	passes = 3
	// Such a partition is given up again after patience, which doubles.
	minPatience = 250 * time.Millisecond
	maxPatience = time.Minute
)

func newWorker(g Group, h client.Handler, cfg Config, log *slog.Logger) *worker {
	w := &worker{
		group: g, cfg: cfg, inner: h, log: log, beat: beat{Worker: cfg.Worker, Born: time.Now().UnixNano()},
		slots: make(chan struct{}, cfg.Concurrency), trial: make(chan struct{}, 1), events: make(chan func(), 64), ended: make(chan struct{}),
		beats: make(chan beat, 1), members: members{partitions: g.Partitions, all: map[string]*member{}}, left: make(chan struct{}),
	}
	w.self = w.beat.name()
	w.timeout.Store(int64(consumerTimeout))
	w.limit.Store(-1)
	for i := range g.Partitions {
		w.parts = append(w.parts, &part{of: w, i: i, queue: g.queue(i), leaving: make(chan struct{})})
	}
	return w
}

// do has the loop call f, unless it has ended.
func (w *worker) do(f func()) {
	select {
	case w.events <- f:
	case <-w.ended:
	}
}

// loop runs until stop is closed. When ctx ends, the worker leaves: it still reports what its
// consumers give up.
func (w *worker) loop(ctx context.Context, stop <-chan struct{}) {
	defer close(w.ended)
	w.started = time.Now()
	w.wake = time.NewTimer(0)
	defer w.wake.Stop()
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	done := ctx.Done()
	w.report(true)
	for {
		select {
		case <-stop:
			return
		case <-done:
			done = nil
			w.leave()
		case f := <-w.events:
			f()
		case <-tick.C:
			now := time.Now()
			if w.members.expire(now) {
				w.owners = nil
			}
			if w.heard.IsZero() || len(w.drained) > 0 || w.mayReport(now) {
				w.report(w.heard.IsZero())
			}
		case <-w.wake.C:
			w.due = time.Time{}
		}
		if w.ready(time.Now()) {
			w.decide()
		}
	}
}

// own is what it serves.
func (w *worker) own() (all []int) {
	for _, p := range w.parts {
		if p.serves {
			all = append(all, p.i)
		}
	}
	return all
}

// line is where it is in line.
func (w *worker) line() (all []int) {
	for _, p := range w.parts {
		if p.lined {
			all = append(all, p.i)
		}
	}
	return all
}

// mayReport reports whether a beat is due. With so many workers that each sends fewer than one a second, those that ask
// are answered together.
func (w *worker) mayReport(now time.Time) bool {
	every := w.members.every()
	pause := time.Duration(every)*beatEvery - beatEvery/2 // the loop's ticks aren't exact
	if w.asked {
		pause /= 2
	}
	if w.asked && len(w.own()) > 0 { // who asks wants to know the owners, such as Inspect
		pause = min(pause, beatEvery)
	}
	return every == 1 || now.Sub(w.reported) >= pause
}

// report sends a beat. If one is waiting to be sent, the new one takes its place.
func (w *worker) report(asks bool) {
	w.n++
	w.reported, w.asked = time.Now(), false
	b := w.beat
	if every := w.members.every(); every > 1 {
		b.Every = every
	}
	b.N, b.Owns, b.Line, b.Asks, b.Leave, b.Lost = w.n, w.own(), w.line(), asks, w.leaving || !w.joined, w.vanished
	if len(w.drained) > 0 {
		b.Drained = w.drained[0]
		w.drained = w.drained[1:]
	}
	select {
	case old := <-w.beats:
		b.Asks = b.Asks || old.Asks
		if old.Drained != "" && b.Drained != "" {
			w.drained = append(w.drained, old.Drained)
		} else if b.Drained == "" {
			b.Drained = old.Drained
		}
	default:
	}
	w.beats <- b
}

// hear takes a beat. It returns what the loop is to do.
func (w *worker) hear(b beat) {
	now := time.Now()
	if b.name() == w.self {
		if w.heard.IsZero() {
			w.heard = now
			w.report(true) // nobody has answered before the link was there
		}
		return
	}
	missed := false
	for _, l := range b.Lost {
		missed = missed || l.Worker == w.self
	}
	known := w.members.all[b.name()]
	fresh := known == nil || known.left
	if w.members.hear(b, now) {
		w.owners = nil
	}
	for _, i := range b.Owns { // somebody has taken it
		if i >= 0 && i < len(w.parts) {
			w.parts[i].steps, w.parts[i].patient = 0, 0
		}
	}
	w.vanished = slices.DeleteFunc(w.vanished, func(l lost) bool { return l.Worker == b.name() })
	if b.Asks || missed || fresh && !b.Leave {
		if w.asked = true; w.mayReport(now) {
			w.report(false)
		}
	}
}

// leave makes the others take over.
func (w *worker) leave() {
	w.leaving = true
	close(w.left)
	for _, p := range w.parts {
		p.leave()
	}
	w.report(false)
}

// leave says that handlers that haven't begun are to wait no longer.
func (p *part) leave() {
	select {
	case <-p.leaving:
	default:
		close(p.leaving)
	}
}

// Turn is called when RabbitMQ has made the worker active.
func (p *part) Turn(t turn) {
	p.warned.Store(false)
	p.fresh, p.disordered = false, false
	p.poisons.reset()
	p.current.Store(&t)
	p.of.do(func() { p.turn, p.active = t, time.Now() })
}

// Over is called when a turn is over. It returns when the loop knows, and OnAssigned was called:
// only then can another worker become active, unless the connection was lost.
func (p *part) Over(t turn) {
	done := make(chan struct{})
	p.of.do(func() {
		if p.turn == t { // and not a later one, of another consumer
			p.over()
		}
		close(done)
	})
	select {
	case <-done:
	case <-p.of.ended:
	}
}

func (p *part) over() {
	p.turn = nil
	if !p.of.leaving {
		p.leaving = make(chan struct{})
	}
	if p.serves {
		p.serves, p.of.owners = false, nil
		p.of.report(false)
		p.of.assigned(p, false)
	}
}

func (w *worker) assigned(p *part, owned bool) {
	w.log.Debug("hopback: a partition has changed hands", "queue", p.queue, "owned", owned)
	if w.cfg.OnAssigned != nil {
		w.cfg.OnAssigned(p.i, owned)
	}
}

// attach has the worker stand in line for p.
func (p *part) attach() {
	w := p.of
	ctx, detach := context.WithCancel(w.ctx)
	p.detach, p.detaching = detach, false
	w.consumers.Go(func() {
		defer detach()
		err := w.consume(ctx, p)
		w.do(func() { p.detached(err) })
	})
}

// Attached is called when the consumer is in line for the first time.
func (p *part) Attached() {
	p.of.do(func() {
		w := p.of
		p.lined = true
		w.attached = w.attached || !slices.ContainsFunc(w.parts, func(p *part) bool { return p.detach != nil && !p.lined })
		w.report(false)
	})
}

// detached is called when the consumer has ended. What keeps a new worker from getting in line
// ends it, such as a permission that it lacks. Later it tries again, and serves the others.
func (p *part) detached(err error) {
	w := p.of
	p.detach, p.lined, p.detaching = nil, false, false
	switch {
	case err == nil:
	case !w.attached || errors.Is(err, client.ErrClosed):
		w.fail(err)
	default:
		w.log.Warn("hopback: consuming from a partition failed; trying again", "queue", p.queue, "error", err)
		p.retry = time.Now().Add(attachAgain)
	}
}

// ready says whether the worker knows the others, so that it can take partitions.
func (w *worker) ready(now time.Time) bool {
	if w.joined || w.leaving {
		return w.joined
	}
	hears := w.started.Add(hearing)
	if !w.heard.IsZero() {
		hears = w.heard.Add(replying)
	}
	if now.Before(hears) {
		w.again(hears.Sub(now))
		return false
	}
	w.joined, w.members.changed = true, now
	w.report(false)
	return true
}

// decide looks at each partition: the worker goes in line for those where it is the owner or a
// standby. Where it is the active consumer, it serves what belongs to it, and passes on the rest.
func (w *worker) decide() {
	if w.leaving {
		return
	}
	now := time.Now()
	for _, p := range w.parts {
		w.know()
		w.queue(p, now)
		if p.turn != nil && p.detach != nil && !p.detaching && !p.passing() {
			w.consider(p, w.owners[p.i], now)
		}
	}
}

// know brings owners and wants up to date.
func (w *worker) know() {
	if w.owners == nil {
		has := w.members.has(w.self, w.own(), false)
		w.owners = assign(w.group.Partitions, has)
		w.wants = lines(w.owners, has, w.self)
	}
}

// queue has the worker join or leave the line for a partition. It doesn't leave as the active one,
// so somebody else is in line.
func (w *worker) queue(p *part, now time.Time) {
	switch {
	case w.wants[p.i] && p.detach == nil && p.turn == nil:
		if wait := p.retry.Sub(now); wait > 0 {
			w.again(wait)
			return
		}
		p.attach()
	case !w.wants[p.i] && p.detach != nil && p.turn == nil && p.lined && !p.detaching:
		if wait := w.members.changed.Add(settling).Sub(now); wait > 0 {
			w.again(wait)
			return
		}
		p.detaching = true
		p.detach()
	}
}

// consider decides about a partition where the worker is active.
func (w *worker) consider(p *part, owner string, now time.Time) {
	if p.serves {
		switch {
		case owner == w.self:
			p.steps, p.patient = 0, 0
		case !w.members.inLine(p.i, owner): // it says so when it is
		case now.Before(p.until):
			w.again(p.until.Sub(now))
		case now.Sub(w.members.changed) < settling:
			w.again(w.members.changed.Add(settling).Sub(now))
		default:
			w.pass(p)
		}
		return
	}
	if other := w.members.claims(p.i, w.self); other != nil {
		if wait := p.active.Add(handover).Sub(now); wait > 0 {
			w.again(wait)
			return
		}
		// It has the partition no more, and hasn't said so.
		l := lost{other.name(), other.N}
		w.vanished = append(slices.DeleteFunc(w.vanished, func(s lost) bool { return s.Worker == l.Worker }), l)
		w.members.lose(l, now)
		w.owners = nil
		w.report(false)
		w.again(0)
		return
	}
	if owner != w.self {
		if !w.members.inLine(p.i, owner) {
			if wait := p.active.Add(lining).Sub(now); wait > 0 {
				w.again(wait)
				return
			}
		} else if p.steps < passes {
			p.steps++
			w.pass(p)
			return
		}
		// Nobody takes it: keep it for a while.
		p.patient = min(max(2*p.patient, minPatience), maxPatience)
		p.until = now.Add(p.patient)
		p.steps = 0
	}
	p.serves, w.owners = true, nil
	p.turn.Serve()
	w.report(false)
	w.assigned(p, true)
}

// pass gives the partition to the next in line. The worker claims it until its handlers have
// returned. It goes to the end of the line if it wants to be in line.
func (w *worker) pass(p *part) {
	p.leave()
	if w.wants[p.i] {
		p.turn.StepBack()
		return
	}
	p.detaching = true
	p.detach()
}

// again has the loop look again.
func (w *worker) again(after time.Duration) {
	after = max(after, time.Millisecond)
	if at := time.Now().Add(after); w.due.IsZero() || at.Before(w.due) {
		w.due = at
		w.wake.Reset(after)
	}
}

// slot takes the right to run a handler; false: the delivery stays in hand unchanged.
func (w *worker) slot(ctx context.Context, p *part) bool {
	select {
	case w.slots <- struct{}{}:
		return true
	default:
	}
	select {
	case w.slots <- struct{}{}:
		return true
	case <-p.leaving:
	case <-ctx.Done():
	}
	return false
}

// passing says whether the partition is being given up.
func (p *part) passing() bool {
	select {
	case <-p.leaving:
		return true
	default:
		return false
	}
}
