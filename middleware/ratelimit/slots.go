package ratelimit

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
)

// A slot is a number below Config.AtOnce, and an exclusive queue with that number in its name. Who has the queue may run a
// call. So the broker keeps the limit: it gives a queue to one connection, and deletes it when that ends. Nothing is
// counted that could drift, and workers with another limit share the slots below both.
//
// Without a key, a worker has as many slots as calls that run at once. It receives one message for each: others can handle
// what it has no slot for. It keeps slots that it doesn't use until a worker has none for a message that is in
// the queue. Such a worker has the queue "wanted". With keys, slots are taken when messages of the key come, and let go soon after.

const (
	maxAtOnce = 1000
	// probes is how many slots of others a worker asks for in a round, and spree how many when it has just got one,
	// or is new: there may be more.
	probes, spree = 2, 32
	// keyEvery is how often slots for keys are let go, keyProbes how many of others are asked for at a time, and keyBudget
	// for how many in a second, over all keys.
	keyEvery, keyProbes, keyBudget = 250 * time.Millisecond, 2, 40
	// maxHeld bounds the slots of all keys, and releases how many are let go at the same time.
	maxHeld, releases = 1000, 16
	// inHandFor is how long a message without a slot waits here before it returns to its queue, where it waits for returnAfter
	// to maxReturn. Messages return at intervals of returnEvery, so that a large backlog of a key is little work.
	inHandFor, returnAfter, maxReturn, returnEvery = time.Second, time.Second, 30 * time.Second, 10 * time.Millisecond
)

// member is a consumer that shares the slots.
type member struct {
	start     client.Start
	open      func(context.Context) (inside.Locks, error)
	prefix    string // of the names of the queues
	uncounted bool   // returning a message isn't counted
	delays    bool   // the queue can hold a message until a time
	limit     int
	release   func() // ends the limit; nil: there is none
}

// join adds a consumer that starts.
func (a *atOnce) join(ctx context.Context, start client.Start) error {
	if !a.cfg.Shared || start.Control == nil && start.Management == nil { // the latter is a test without a broker
		return nil
	}
	consumer := refusal.Of(ctx)
	m := &member{
		start: start, open: inside.LocksOf(ctx), prefix: prefix(cmp.Or(a.cfg.Name, start.Queue)),
		uncounted: !oldbroker.Of(start.Broker.AtLeast).CountsReturns,
	}
	if consumer == nil || start.Control == nil || start.Management == nil || m.open == nil {
		return argument.New("ratelimit.Config.Shared", true, "isn't possible here", "use it with Conn.Consume, or with a package that uses it")
	}
	delays, alarm, err := startcheck.Check[bool]{
		Run: func(ctx context.Context) (bool, error) { return a.check(ctx, m) }, Alarms: inside.AlarmsOf(ctx),
	}.Start(ctx, func(bool) {})
	if err != nil {
		return err
	}
	if alarm != nil {
		alarm.Cancel()
		if start.Log != nil {
			start.Log.Warn("hopback: no message is handled before the alarm is over: until then, the broker has no answer about the limit that workers share", "queue", start.Queue)
		}
	}
	m.delays = delays
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.members[consumer] != nil: // its connection was lost while it started
		return nil
	case len(a.members) > 0 && m.prefix != a.prefix:
		return argument.New("ratelimit.Config.Name", "", fmt.Sprintf("is missing, and consumers of %q and other queues share the limit", start.Queue), "set it, or call With for each queue")
	}
	a.prefix, a.members[consumer] = m.prefix, m
	a.follow()
	consumer.OnEnd(func() { a.remove(consumer) })
	if a.stop == nil {
		running, stop := context.WithCancel(context.WithoutCancel(ctx))
		before, done := a.done, make(chan struct{})
		a.stop, a.done = stop, done
		go func() {
			defer close(done)
			if before != nil {
				<-before
			}
			a.run(running)
		}()
	}
	return nil
}

// check reports whether the consumer's queue can hold a message until a time. It returns an error if the user may not
// declare queues for slots.
func (a *atOnce) check(ctx context.Context, m *member) (delays bool, err error) {
	locks, err := m.open(ctx)
	if err != nil {
		return false, err
	}
	defer locks.Close()
	name := m.prefix + "check." + crand.Text()
	if _, err = locks.Lock(ctx, name); err == nil {
		err = locks.Unlock(ctx, name)
	}
	if err != nil {
		return false, err
	}
	q, err := declare.Inspect(ctx, m.start.Management, m.start.Queue)
	_, ttl := q.Arguments["x-message-ttl"]
	_, length := q.Arguments["x-max-length"]
	_, bytes := q.Arguments["x-max-length-bytes"]
	return q.Type == "quorum" && !oldbroker.Of(m.start.Broker.AtLeast).IgnoresDeliveryTime && !ttl && !length && !bytes, err
}

func (a *atOnce) remove(consumer *refusal.Consumer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.members[consumer]
	delete(a.members, consumer)
	if m.release != nil {
		m.release()
	}
	if len(a.members) == 0 {
		a.stop()
		a.stop = nil
	}
}

// prefix returns how the names of the queues start. It is short enough for what follows.
func prefix(name string) string {
	if len(name) > 150 {
		name = hash(name)
	}
	return "hopback.slots." + name + "."
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:16])
}

// run has slots until ctx ends.
func (a *atOnce) run(ctx context.Context) {
	for ctx.Err() == nil {
		var m *member
		a.mu.Lock()
		for _, m = range a.members {
			break
		}
		a.mu.Unlock()
		if m == nil {
			return
		}
		if locks, err := m.open(ctx); err == nil {
			a.serve(ctx, locks, m)
		} else {
			backoff.Sleep(ctx, every)
		}
	}
}

// slots are the slots that a process has on a connection.
type slots struct {
	*atOnce
	locks  inside.Locks
	prefix string // of the names of the queues
	log    *slog.Logger
	asks   sync.WaitGroup // calls of ask; Add is called with mu held

	// With mu held.
	held      int                 // by all lines
	releasing map[string]struct{} // queues that nobody needs here, until the broker has answered that they are free

	// Only serve uses these.
	tries    int  // how many slots of others may be asked for; with keys, mu guards it
	marked   bool // "wanted" is this process's
	verified time.Time
	failing  bool // the last request failed, and the log has it
}

// serve takes slots and lets them go until the connection is lost or ctx ends.
func (a *atOnce) serve(ctx context.Context, locks inside.Locks, m *member) {
	s := &slots{atOnce: a, locks: locks, prefix: m.prefix, log: m.start.Log, tries: spree, releasing: map[string]struct{}{}}
	a.mu.Lock()
	a.slots = s
	a.mu.Unlock()
	for ctx.Err() == nil && !failure.IsClosed(locks.Lost()) {
		var more <-chan struct{}
		if s.round(ctx) {
			more = a.more
		}
		pause := keyEvery
		if a.cfg.Key == nil {
			pause = every*3/4 + rand.N(every/2)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-more:
		case <-locks.Lost():
		case <-ctx.Done():
		}
		timer.Stop()
	}
	a.mu.Lock()
	a.slots = nil
	for _, l := range a.lines {
		s.drop(l, len(l.held))
		a.forget(l)
	}
	if s.marked {
		s.releasing[s.wanted()] = struct{}{}
	}
	a.follow()
	a.mu.Unlock()
	background := context.WithoutCancel(ctx)
	go func() { // in an alarm, this takes until the alarm is over, or the connection is closed
		defer locks.Close()
		s.asks.Wait()
		for s.release(background); len(s.releasing) > 0; s.release(background) {
			select {
			case <-locks.Lost():
				return
			case <-time.After(every):
			}
		}
	}()
}

// queue returns the name of the queue of a slot.
func (s *slots) queue(l *line, i int) string {
	key := "all"
	if s.cfg.Key != nil {
		key = hash(l.key)
	}
	return s.prefix + key + "." + strconv.Itoa(i)
}

// wanted is the queue of a worker that has no slot for a message.
func (s *slots) wanted() string { return s.prefix + "wanted" }

// round does what is due. It reports whether there may be more slots for the messages that come.
func (s *slots) round(ctx context.Context) (more bool) {
	s.release(ctx)
	if time.Since(s.verified) >= every {
		s.verified = time.Now()
		s.verify(ctx)
	}
	if s.cfg.Key == nil {
		more = s.adjust(ctx)
	} else {
		s.mu.Lock()
		s.tries = min(s.tries+keyBudget/4, keyBudget)
		for _, l := range s.lines {
			s.drop(l, len(l.held)-l.peak)
			l.peak = l.running
			s.forget(l)
		}
		s.mu.Unlock()
	}
	s.release(ctx)
	return more
}

// adjust takes more slots if all are in use, or lets those go that aren't if other workers want them.
func (s *slots) adjust(ctx context.Context) (more bool) {
	s.mu.Lock()
	s.follow()
	l := s.line("")
	held, unused, want := len(l.held), len(l.held)-l.peak, 0
	l.peak = l.running
	if l.running >= held {
		handlers := 0
		for consumer := range s.members {
			handlers += int(consumer.Concurrency.Load())
		}
		want = min(max(handlers, 1), s.cfg.AtOnce, max(1, 2*held)) - held
	}
	s.mu.Unlock()
	needy := false
	if want > 0 {
		got, err := s.take(ctx, l, want, s.tries)
		s.report(ctx, err)
		more = got > 0
		needy = err == nil && !more && s.backlog(ctx)
	}
	s.tries = probes
	s.mark(ctx, needy)
	if unused > 0 && !needy {
		if wanted, err := s.locks.Locked(ctx, s.wanted()); err == nil && wanted {
			s.mu.Lock()
			s.drop(l, unused)
			s.mu.Unlock()
		}
	}
	return more
}

// mark has "wanted" if this process needs a slot and no other process has marked that already.
func (s *slots) mark(ctx context.Context, needy bool) {
	switch {
	case needy && !s.marked:
		ok, err := s.locks.Lock(ctx, s.wanted())
		s.marked = ok || errors.Is(err, client.ErrOutcomeUnknown)
	case !needy && s.marked:
		s.marked = s.locks.Unlock(ctx, s.wanted()) != nil
	}
}

// backlog reports whether a queue has messages that no consumer has received.
func (s *slots) backlog(ctx context.Context) bool {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.members))
	s.mu.Unlock()
	return slices.ContainsFunc(all, func(m *member) bool {
		ctx, done := context.WithTimeout(ctx, patience)
		defer done()
		q, err := declare.Inspect(ctx, m.start.Management, m.start.Queue)
		return err == nil && q.Messages > 0
	})
}

// take takes up to want slots for a line, and asks for up to tries that others have.
func (s *slots) take(ctx context.Context, l *line, want, tries int) (got int, err error) {
	for _, i := range rand.Perm(s.cfg.AtOnce) {
		if got == want || tries <= 0 {
			break
		}
		s.mu.Lock()
		name := s.queue(l, i)
		_, leaving := s.releasing[name]
		known := leaving || slices.Contains(l.held, i) || s.slots != s
		s.mu.Unlock()
		if known {
			continue
		}
		ok, err := s.locks.Lock(ctx, name)
		s.mu.Lock()
		switch {
		case errors.Is(err, client.ErrOutcomeUnknown), ok && s.slots != s:
			s.releasing[name] = struct{}{}
		case err != nil:
		case ok:
			got++
			tries = max(tries, min(spree, s.cfg.AtOnce))
			l.held = append(l.held, i)
			s.held++
			s.grant(l)
			s.follow()
		default:
			tries--
		}
		s.mu.Unlock()
		if err != nil {
			return got, err
		}
	}
	return got, nil
}

// verify asks whether one of the slots is still held: somebody may have deleted its queue.
func (s *slots) verify(ctx context.Context) {
	s.mu.Lock()
	var of *line
	for _, l := range s.lines { // in random order
		if of == nil && len(l.held) > 0 {
			of = l
		}
	}
	if of == nil {
		s.mu.Unlock()
		return
	}
	i := of.held[rand.IntN(len(of.held))]
	name := s.queue(of, i)
	s.mu.Unlock()
	if ok, err := s.locks.Lock(ctx, name); err == nil && !ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		of.held = slices.DeleteFunc(of.held, func(other int) bool { return other == i })
		s.held--
		s.follow()
	}
}

// drop lets up to n slots go that no call has. It is called with mu held.
func (s *slots) drop(l *line, n int) {
	if s.slots == s { // otherwise the connection is over
		n = min(n, len(l.held)-l.running)
	}
	for range n {
		last := len(l.held) - 1
		s.releasing[s.queue(l, l.held[last])] = struct{}{}
		l.held = l.held[:last]
		s.held--
	}
	s.follow()
}

// release tells the broker which slots others can have.
func (s *slots) release(ctx context.Context) {
	s.mu.Lock()
	names := slices.Collect(maps.Keys(s.releasing))
	s.mu.Unlock()
	var all sync.WaitGroup
	free := make(chan struct{}, releases)
	for _, name := range names {
		free <- struct{}{}
		all.Go(func() {
			defer func() { <-free }()
			if s.locks.Unlock(ctx, name) == nil {
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.releasing, name)
			}
		})
	}
	all.Wait()
}

// report logs why slots can't be taken, once.
func (s *slots) report(ctx context.Context, err error) {
	if err != nil && !s.failing && s.log != nil && ctx.Err() == nil && !errors.Is(err, client.ErrConnectionLost) {
		s.log.Warn("hopback: this worker can't take part in the limit that workers share, and handles no more messages than it has slots for", "error", err)
	}
	s.failing = err != nil
}

// follow has the consumers receive as many messages as there are slots. It is called with mu held.
func (a *atOnce) follow() {
	if a.cfg.Key != nil {
		return
	}
	held := 0
	if l := a.lines[""]; l != nil && a.slots != nil {
		held = len(l.held)
	}
	for consumer, m := range a.members {
		n := min(held, max(int(consumer.Concurrency.Load()), 1))
		if m.release != nil && n == m.limit {
			continue
		}
		before := m.release
		if m.release, m.limit = m.start.Control.Limit(n), n; before != nil {
			before()
		}
	}
}

// later has a message return to its queue, and wait there if it can.
func (a *atOnce) later(ctx context.Context, m *member) error {
	if m.delays && m.start.BrokerTime != nil {
		if now, err := m.start.BrokerTime(ctx); err == nil {
			a.mu.Lock()
			defer a.mu.Unlock()
			at := now.Add(returnAfter + rand.N(returnAfter/4))
			if next := a.returnAt.Add(returnEvery); next.After(at) && next.Before(now.Add(maxReturn)) {
				at = next
			}
			a.returnAt = at
			return client.Modify{Annotations: map[string]any{annotation.DeliveryTime: at.UnixMilli()}, Err: errFull}
		}
	}
	return client.Requeue{Err: errFull}
}

// over is closed.
var over = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// ask takes slots for the messages of a key that wait, unless it was refused within the last second. The channel
// is closed when that is over.
func (a *atOnce) ask(l *line) <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.slots
	if l.asked != nil {
		return l.asked
	}
	if s == nil || time.Since(l.refused) < every || s.tries < keyProbes {
		return over
	}
	want := min(len(l.waiting), a.cfg.AtOnce-len(l.held), maxHeld-s.held-len(s.releasing))
	if want <= 0 {
		return over
	}
	l.asked = make(chan struct{})
	s.tries -= keyProbes
	s.asks.Go(func() {
		got, _ := s.take(context.Background(), l, want, keyProbes) // it ends with the connection, at the latest
		a.mu.Lock()
		defer a.mu.Unlock()
		if got < want {
			l.refused = time.Now()
		} else {
			s.tries += keyProbes
		}
		close(l.asked)
		l.asked = nil
		a.forget(l)
	})
	return l.asked
}
