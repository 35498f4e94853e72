package partition

import (
	"context"
	"log/slog"
	"slices"
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
	beat  beat // Worker and Born
	slots chan struct{}
	// timeout is how long the broker lets the worker hold a message.
	timeout time.Duration
	parts   []*part

	events chan func() // to be called by the loop
	ended  chan struct{}
	beats  chan beat // to the goroutine that sends; has room for one

	// The loop's:
	members  members
	n        uint64
	started  time.Time
	heard    time.Time // when its own beat has come back, so it hears the others; zero: it hasn't
	waits    int       // for how many partitions it isn't in line yet
	attached time.Time // when it was for the first one
	joined   bool      // it takes partitions
	leaving  bool
	vanished []lost
	drained  []string // markers to report
	wake     *time.Timer
	due      time.Time // when wake fires; zero: it doesn't
}

// part is one partition. The loop alone changes it, except leaving.
type part struct {
	of    *worker
	i     int
	queue string

	turn    inside.Turn // nil: another worker is active
	current atomic.Pointer[inside.Turn]
	markers atomic.Int32 // that this turn has received and not handled
	warned  atomic.Bool  // of messages with a priority or a ttl, in this turn
	active  time.Time    // since when
	serves  bool
	leaving chan struct{} // closed when the turn is to end; one for each turn
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
	// it. attaching is how long it waits for the last of its consumers after the first.
	hearing   = time.Second
	replying  = 100 * time.Millisecond
	attaching = 3 * time.Second
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
		slots: make(chan struct{}, cfg.Concurrency), events: make(chan func(), 64), ended: make(chan struct{}),
		beats: make(chan beat, 1), members: members{partitions: g.Partitions, all: map[string]*member{}},
	}
	w.self, w.waits = w.beat.name(), g.Partitions
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
			w.members.expire(time.Now())
			w.report(w.heard.IsZero())
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

// report sends a beat. If one is waiting to be sent, the new one takes its place.
func (w *worker) report(asks bool) {
	w.n++
	b := w.beat
	b.N, b.Owns, b.Asks, b.Leave, b.Lost = w.n, w.own(), asks, w.leaving || !w.joined, w.vanished
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
	w.members.hear(b, now)
	for _, i := range b.Owns { // somebody has taken it
		if i >= 0 && i < len(w.parts) {
			w.parts[i].steps, w.parts[i].patient = 0, 0
		}
	}
	w.vanished = slices.DeleteFunc(w.vanished, func(l lost) bool { return l.Worker == b.name() })
	if b.Asks || missed || fresh && !b.Leave {
		w.report(false)
	}
}

// leave makes the others take over.
func (w *worker) leave() {
	w.leaving = true
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

// began is called when RabbitMQ has made the worker active.
func (p *part) began(t inside.Turn) {
	w := p.of
	p.markers.Store(0)
	p.warned.Store(false)
	p.current.Store(&t)
	w.do(func() { p.turn, p.active = t, time.Now() })
}

// ended is called when a turn is over. It returns when the loop knows, and OnAssigned was called:
// only then can another worker become active, unless the connection was lost.
func (p *part) ended(inside.Turn) {
	done := make(chan struct{})
	p.of.do(func() {
		p.over()
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
		p.serves = false
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

// attached is called when p's consumer is in line for the first time.
func (p *part) attached() {
	p.of.do(func() {
		if p.of.attached.IsZero() {
			p.of.attached = time.Now()
		}
		p.of.waits--
	})
}

// ready says whether the worker knows enough to take partitions: it hears the others, and is in
// line wherever they may give it one.
func (w *worker) ready(now time.Time) bool {
	if w.joined || w.leaving {
		return w.joined
	}
	hears := w.started.Add(hearing)
	if !w.heard.IsZero() {
		hears = w.heard.Add(replying)
	}
	switch {
	case w.attached.IsZero():
		return false
	case w.waits > 0 && now.Before(w.attached.Add(attaching)):
		w.again(w.attached.Add(attaching).Sub(now))
		return false
	case now.Before(hears):
		w.again(hears.Sub(now))
		return false
	}
	w.joined, w.members.changed = true, now
	w.report(false)
	return true
}

// decide looks at each partition where it is the active consumer: it serves what belongs to it,
// and passes on the rest.
func (w *worker) decide() {
	if w.leaving {
		return
	}
	now := time.Now()
	var owners []string
	for _, p := range w.parts {
		if p.turn == nil || p.passing() {
			continue
		}
		if owners == nil {
			owners = assign(w.group.Partitions, w.members.has(w.self, w.own(), false))
		}
		if owner := owners[p.i]; w.consider(p, owner, now) {
			owners = nil // what it has is different now
		}
	}
}

// consider says whether anything has changed.
func (w *worker) consider(p *part, owner string, now time.Time) (changed bool) {
	if p.serves {
		switch {
		case owner == w.self:
			p.steps, p.patient = 0, 0
		case now.Before(p.until):
			w.again(p.until.Sub(now))
		case now.Sub(w.members.changed) < settling:
			w.again(w.members.changed.Add(settling).Sub(now))
		default:
			p.pass()
			return true
		}
		return false
	}
	if other := w.members.claims(p.i, w.self); other != nil {
		if wait := p.active.Add(handover).Sub(now); wait > 0 {
			w.again(wait)
			return false
		}
		// It has the partition no more, and hasn't said so.
		l := lost{other.name(), other.N}
		w.vanished = append(slices.DeleteFunc(w.vanished, func(s lost) bool { return s.Worker == l.Worker }), l)
		w.members.lose(l, now)
		w.report(false)
		w.again(0)
		return true
	}
	if owner != w.self && p.steps < passes {
		p.steps++
		p.pass()
		return false
	}
	if owner != w.self { // nobody takes it: keep it for a while
		p.patient = min(max(2*p.patient, minPatience), maxPatience)
		p.until = now.Add(p.patient)
		p.steps = 0
	}
	p.serves = true
	p.turn.Serve()
	w.report(false)
	w.assigned(p, true)
	return true
}

// pass gives the partition to the next in line. The worker claims it until its handlers have
// returned.
func (p *part) pass() {
	p.leave()
	p.turn.StepBack()
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
