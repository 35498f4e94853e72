package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/schedule"
)

// Recurring is a service whose workers publish recurring messages with schedule.Group, in several groups, and
// handle them. An operator pauses, removes, resumes, and runs them at the same time.
const Recurring = "recurring"

// Recurred is a recurring message that was published for a time that isn't one of its times, or in a pause.
const Recurred ViolationKind = "recurred"

const (
	// blur is how much earlier than it is a worker, or who pauses a message, may believe that it is.
	blur = 10 * time.Second
	// beforeLoss is from how long before its token was destroyed a group may have forgotten what was done.
	beforeLoss = 10 * time.Minute
)

// simGroups are the groups of lane "recurring".
type simGroups struct {
	names  schedule.Names
	groups []*simRecurring
}

// simRecurring is a group and what is known of it.
type simRecurring struct {
	name string
	all  []schedule.Recurring

	mu     sync.Mutex
	from   time.Time // from when on its times count
	seen   map[string]sighting
	ran    map[string]time.Time // requests of RunNow, by message-id
	gone   map[string]bool      // message-ids of what was destroyed
	losses []time.Time          // when its token was destroyed
	pauses []*hold
}

// sighting is when a message-id came first, and how often.
type sighting struct {
	first time.Time
	n     int
}

// hold is a pause of a message, or of the whole group: "". Nothing is published for times between sure and
// until; what happens between called and sure, and between until and ended, isn't known.
type hold struct {
	name                       string
	called, sure, until, ended time.Time
}

// relative are times that follow from the one before.
type relative time.Duration

func (d relative) Next(t time.Time) time.Time { return t.Add(time.Duration(d)) }
func (d relative) String() string             { return "after " + time.Duration(d).String() }

// makeRecurring prepares the lane.
func (s *simulation) makeRecurring(l *simLane) {
	l.total = 0 // its messages come from the groups
	l.recurring = &simGroups{names: schedule.Names{Prefix: l.prefix}}
	for name, all := range map[string][]schedule.Recurring{
		"a": {
			{Name: "a-all", Times: schedule.Every(s.stretch(time.Minute)), Missed: schedule.MissedAll},
			{Name: "a-one", Times: schedule.Every(s.stretch(90 * time.Second))},
			{Name: "a-skip", Times: schedule.Every(s.stretch(2 * time.Minute)), Missed: schedule.MissedSkip},
		},
		"b": {
			{Name: "b-relative", Times: relative(s.stretch(100 * time.Second)), Missed: schedule.MissedAll},
			{Name: "b-all", Times: schedule.Every(s.stretch(5 * time.Minute)), Missed: schedule.MissedAll},
		},
		"c": {{Name: "c-one", Times: schedule.Every(s.stretch(3 * time.Minute))}},
	} {
		if name == "c" && s.Stretch > 1 {
			all = append(all, schedule.Recurring{Name: "c-nightly", Times: nightly{}, Missed: schedule.MissedAll})
		}
		for i := range all {
			all[i].To = address.Queue(l.queue)
		}
		l.recurring.groups = append(l.recurring.groups, newRecurring(name, all))
	}
	slices.SortFunc(l.recurring.groups, func(a, b *simRecurring) int { return strings.Compare(a.name, b.name) })
}

func newRecurring(name string, all []schedule.Recurring) *simRecurring {
	return &simRecurring{name: name, all: all, seen: map[string]sighting{}, ran: map[string]time.Time{}, gone: map[string]bool{}}
}

// addGroups adds what the groups need.
func (r *simGroups) addGroups(t *declare.Topology) error {
	for i, g := range r.groups {
		more, err := schedule.GroupTopology(r.names, g.name)
		if err != nil {
			return err
		}
		if i > 0 { // the queue of what can't be delivered is the same
			more.Exchanges, more.Bindings, more.Queues = nil, nil, more.Queues[1:]
		}
		t.Queues, t.Exchanges, t.Bindings = append(t.Queues, more.Queues...), append(t.Exchanges, more.Exchanges...), append(t.Bindings, more.Bindings...)
	}
	return nil
}

// group returns the group of a message-id.
func (r *simGroups) group(m *client.Message) (g *simRecurring, id string) {
	if r == nil || m == nil || m.Properties == nil {
		return nil, ""
	}
	id, _ = m.Properties.MessageID.(string)
	name, _, ok := schedule.ParseMessageID(id)
	i := slices.IndexFunc(r.groups, func(g *simRecurring) bool { return ok && strings.HasPrefix(name, g.name+"-") })
	if i < 0 {
		return nil, ""
	}
	return r.groups[i], id
}

// recurred notes a recurring message that has come, and reports whether m is one.
func (l *simLane) recurred(m *client.Message) bool {
	g, id := l.recurring.group(m)
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.seen[id]
	if s.n++; s.n == 1 {
		s.first = time.Now()
	}
	g.seen[id] = s
	return true
}

// goneRecurring notes a recurring message, a request, or a token that is destroyed with a queue, and reports whether m
// is one.
func (s *simulation) goneRecurring(queue string, m *client.Message) bool {
	for _, l := range s.lanes {
		if l.recurring == nil {
			continue
		}
		if l.recurring.token(queue) {
			return true
		}
		if g, id := l.recurring.group(m); g != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.gone[id] = true
			return true
		}
	}
	return false
}

// token reports whether a queue has the token of a group.
func (r *simGroups) token(queue string) bool {
	return r != nil && slices.ContainsFunc(r.groups, func(g *simRecurring) bool { return queue == r.names.TokenQueue(g.name) })
}

// loses notes that a queue is about to be purged or deleted.
func (s *simulation) loses(queue string) {
	for _, l := range s.lanes {
		if l.recurring == nil {
			continue
		}
		for _, g := range l.recurring.groups {
			if queue == l.recurring.names.TokenQueue(g.name) {
				g.mu.Lock()
				g.losses = append(g.losses, time.Now())
				g.mu.Unlock()
			}
		}
	}
}

// publishRecurring is the part of a worker's life that publishes.
func (w *simWorker) publishRecurring(life context.Context, conn *client.Conn, running *sync.WaitGroup) {
	l := w.lane
	for _, g := range l.recurring.groups {
		running.Go(func() {
			group := schedule.Group{Conn: conn, Name: g.name, Names: l.recurring.names}
			for life.Err() == nil {
				if err := group.Run(life, schedule.RunConfig{Recurring: g.all, Worker: fmt.Sprintf("w%d", w.n)}); err != nil && life.Err() == nil {
					l.heard.Add(1)
					l.say("worker-%s-%d: group %s: %v", l.name, w.n, g.name, err)
					backoff.Sleep(life, 5*time.Second)
				}
			}
		})
	}
}

// openOperator has an operator pause, resume, remove, and run messages of the groups, until the function that it
// returns is called. Then everything is resumed.
func (s *simulation) openOperator(ctx context.Context) (end func()) {
	i := slices.IndexFunc(s.lanes, func(l *simLane) bool { return l.recurring != nil })
	if i < 0 {
		return func() {}
	}
	l := s.lanes[i]
	over := make(chan struct{})
	var operating sync.WaitGroup
	for n, g := range l.recurring.groups {
		operating.Go(func() {
			conn, err := s.connect(ctx, "publisher-operator", n, SidePublishers)
			if err != nil {
				return
			}
			defer closeConn(conn)
			o := &operator{l: l, g: g, group: schedule.Group{Conn: conn, Name: g.name, Names: l.recurring.names}, dice: rand.New(rand.NewPCG(s.Seed, 500+uint64(n)))}
			o.operate(ctx, over)
		})
	}
	return func() {
		close(over)
		operating.Wait()
	}
}

// operator operates one group.
type operator struct {
	l     *simLane
	g     *simRecurring
	group schedule.Group
	dice  *rand.Rand
	open  []*hold // not resumed yet
}

func (o *operator) operate(ctx context.Context, over <-chan struct{}) {
	for ctx.Err() == nil {
		if _, err := o.group.List(ctx, schedule.ListConfig{}); err == nil {
			break
		}
		backoff.Sleep(ctx, time.Second)
	}
	o.g.mu.Lock()
	o.g.from = time.Now()
	o.g.mu.Unlock()
	for {
		select {
		case <-over:
			for len(o.open) > 0 && ctx.Err() == nil {
				if !o.resume(ctx, 0) {
					backoff.Sleep(ctx, time.Second)
				}
			}
			return
		case <-ctx.Done():
			return
		case <-time.After(o.l.stretch(20*time.Second + time.Duration(o.dice.Int64N(int64(2*time.Minute))))):
		}
		name := o.g.all[o.dice.IntN(len(o.g.all))].Name
		switch x := o.dice.IntN(6); {
		case x == 0:
			o.runNow(ctx, name)
		case len(o.open) > 0:
			o.resume(ctx, o.dice.IntN(len(o.open)))
		case x == 1:
			o.pause(ctx, "", x)
		default:
			o.pause(ctx, name, x)
		}
	}
}

func (o *operator) once(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, 90*time.Second)
}

func (o *operator) runNow(ctx context.Context, name string) {
	once, cancel := o.once(ctx)
	defer cancel()
	id, err := o.group.RunNow(once, name)
	o.l.say("operator: run %s: %s %v", name, id, err)
	if id == "" {
		return
	}
	o.g.mu.Lock()
	defer o.g.mu.Unlock()
	if o.g.ran[id] = time.Now(); err != nil {
		o.g.gone[id] = true // it may be stored, or not
	}
}

// pause pauses a message, or removes it.
func (o *operator) pause(ctx context.Context, name string, x int) {
	once, cancel := o.once(ctx)
	defer cancel()
	p := &hold{name: name, called: time.Now().Add(-blur)}
	o.g.mu.Lock()
	o.g.pauses = append(o.g.pauses, p)
	o.g.mu.Unlock()
	o.open = append(o.open, p)
	var err error
	limited := time.Duration(0)
	switch {
	case name != "" && x == 2:
		err = o.group.Remove(once, name)
	default:
		cfg := schedule.PauseConfig{Why: "to see what happens"}
		if name != "" {
			cfg.Names = []string{name}
		}
		if x == 3 {
			limited = o.l.stretch(time.Minute + time.Duration(o.dice.Int64N(int64(5*time.Minute))))
			cfg.For = limited
		}
		err = o.group.Pause(once, cfg)
	}
	o.l.say("operator: pause %q of group %s, limited %v: %v", name, o.g.name, limited, err)
	o.g.mu.Lock()
	defer o.g.mu.Unlock()
	if err == nil {
		p.sure = time.Now()
	}
	if limited > 0 {
		p.until = p.called.Add(limited)
	}
}

// resume ends a pause, and reports whether that has worked.
func (o *operator) resume(ctx context.Context, i int) bool {
	once, cancel := o.once(ctx)
	defer cancel()
	p := o.open[i]
	o.g.mu.Lock()
	if now := time.Now().Add(-blur); p.until.IsZero() || now.Before(p.until) {
		p.until = now
	}
	o.g.mu.Unlock()
	var names []string
	if p.name != "" {
		names = []string{p.name}
	}
	err := o.group.Resume(once, names...)
	o.l.say("operator: resume %q of group %s: %v", p.name, o.g.name, err)
	if err != nil {
		return false
	}
	o.g.mu.Lock()
	p.ended = time.Now()
	o.g.mu.Unlock()
	o.open = slices.Delete(o.open, i, i+1)
	return true
}

// paused reports whether a message was surely paused at a time, or perhaps.
func (g *simRecurring) paused(name string, at time.Time) (surely, perhaps bool) {
	for _, p := range g.pauses {
		if p.name != "" && p.name != name || at.Before(p.called) || !p.ended.IsZero() && at.After(p.ended) {
			continue
		}
		perhaps = true
		if !p.sure.IsZero() && at.After(p.sure) && (p.until.IsZero() || at.Before(p.until)) && !g.lost(p.called, at) {
			surely = true
		}
	}
	return surely, perhaps
}

// lost reports whether the token was destroyed in a time, or soon after it.
func (g *simRecurring) lost(from, to time.Time) bool {
	return slices.ContainsFunc(g.losses, func(at time.Time) bool { return !at.Before(from.Add(-beforeLoss)) && !at.After(to.Add(beforeLoss)) })
}

// checkRecurring judges the groups of a lane, for times until end.
func (s *simulation) checkRecurring(l *simLane, end time.Time) {
	if l.recurring == nil {
		return
	}
	for _, g := range l.recurring.groups {
		g.mu.Lock()
		for _, r := range g.all {
			s.checkTimes(l, g, r, end)
		}
		for id, at := range g.ran {
			if g.seen[id].n == 0 && !g.gone[id] {
				s.wrong(ViolationLost, l.n, "%s was to be run at %v, and never came", id, at.Sub(s.began))
			}
		}
		g.mu.Unlock()
	}
}

// checkTimes judges one recurring message.
func (s *simulation) checkTimes(l *simLane, g *simRecurring, r schedule.Recurring, end time.Time) {
	calm := func(at time.Time) bool {
		since := at.Sub(s.began)
		return s.isQuiet(since, since) && !l.isBroken(since)
	}
	var times []time.Time
	for id, seen := range g.seen {
		name, at, _ := schedule.ParseMessageID(id)
		if _, ran := g.ran[id]; name != r.Name || ran {
			continue
		}
		times = append(times, at)
		if seen.first.Before(at) {
			s.wrong(ViolationEarly, l.n, "%s came at %v", id, seen.first)
		}
		if surely, _ := g.paused(name, at); surely {
			s.wrong(Recurred, l.n, "%s came at %v, and was paused", id, seen.first)
		}
		if !calm(at) {
			continue
		}
		if seen.n > 1 {
			s.wrong(Multiplied, l.n, "%s came %d times, though nothing was broken", id, seen.n)
		}
		if late := seen.first.Sub(at); late > healthyWithin && !g.lost(at, at) {
			s.wrong(Starved, l.n, "%s came %v late, though nothing was broken", id, late)
		}
		s.mu.Lock()
		s.recurrences++
		s.mu.Unlock()
	}
	slices.SortFunc(times, time.Time.Compare)
	missing := func(at time.Time) {
		if _, perhaps := g.paused(r.Name, at); perhaps || g.gone[schedule.MessageID(r.Name, at)] || g.lost(at, at) {
			return
		}
		if r.Missed == schedule.MissedAll || calm(at) {
			s.wrong(ViolationLost, l.n, "%s never came", schedule.MessageID(r.Name, at))
		}
	}
	if d, ok := r.Times.(relative); ok {
		for i, at := range times[1:] {
			before := times[i]
			if at.Sub(before)%time.Duration(d) != 0 {
				if !g.lost(before, at) {
					s.wrong(Recurred, l.n, "%s was published for %v, %v after the time before", r.Name, at, at.Sub(before))
				}
				continue
			}
			for between := d.Next(before); between.Before(at); between = d.Next(between) {
				missing(between)
			}
		}
		if last := times[len(times)-1]; end.Sub(last) > time.Duration(d) {
			missing(d.Next(last))
		}
		return
	}
	for _, at := range times {
		if !r.Times.Next(at.Add(-1)).Equal(at) {
			s.wrong(Recurred, l.n, "%s was published for %v, which isn't one of its times", r.Name, at)
		}
	}
	for at := r.Times.Next(g.from); at.Before(end); at = r.Times.Next(at) {
		if g.seen[schedule.MessageID(r.Name, at)].n == 0 {
			missing(at)
		}
	}
}

// tokens counts what is wrong about a token's queue at the end: it has one message.
func tokens(n int) int { return max(n-1, 1-n) }
