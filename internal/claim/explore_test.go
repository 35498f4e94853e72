package claim

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// rounds is a small world: callers claim parked messages, settle them, or leave, in any order, while
// the link is lost before, within, or after any step.
type rounds struct {
	callers []string // their tokens
	faults  int
	slow    int  // how many flows the broker may answer late
	leaves  bool // a caller's ctx may end
	// wrong, if set, plants a fault between a Claims and its link.
	wrong func(link.ReceiverLink) link.ReceiverLink
}

// caller is one caller of Claim. Its fields are for the run's goroutine once the others wait.
type caller struct {
	token    string
	leave    context.CancelFunc
	left     bool
	answered bool
	found    []*Message
	err      error
	settled  []error // of each that was settled
}

func (w rounds) explore(t *testing.T, runs int) (explore.Report, error) {
	// With one processor, goroutines mostly run in the same order again.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	return explore.All(runs, func(r *explore.Run) (err error) {
		synctest.Test(t, func(t *testing.T) { err = w.run(t, r) })
		return err
	})
}

func (w rounds) run(t *testing.T, r *explore.Run) error {
	q := &fakeQueue{wrap: w.wrong}
	q.park("a", 100*time.Hour, "a1", "a2")
	q.park("b", 100*time.Hour, "b1")
	q.publish(message("ready", nil, nil))
	c := q.claims(t)
	faults, slow := w.faults, w.slow
	var resume chan struct{} // the broker carries out a flow when it is closed
	var choosing sync.Mutex  // the rounds choose, too, while the run's goroutine waits
	fault := func(what string) error {
		choosing.Lock()
		defer choosing.Unlock()
		if faults == 0 || !r.Happens() {
			return nil
		}
		faults--
		r.Say("the link is lost %s", what)
		return errLost
	}
	wait := func(what string) {
		choosing.Lock()
		if slow == 0 || !r.Happens() {
			choosing.Unlock()
			return
		}
		slow--
		r.Say("the broker waits %s", what)
		held := make(chan struct{})
		resume = held
		choosing.Unlock()
		<-held
	}
	q.flow = func(tokens []string) error {
		wait(fmt.Sprintf("before it reads a flow of %q", tokens))
		return fault(fmt.Sprintf("before a flow of %q", tokens))
	}
	q.answered = func(tokens []string) error {
		wait(fmt.Sprintf("before it answers a flow of %q", tokens))
		return fault(fmt.Sprintf("after a flow of %q", tokens))
	}
	q.wrote = func() error { return fault("after a settlement") }
	var all []*caller
	for passed, stuck := false, false; ; {
		synctest.Wait()
		var can []func()
		if len(all) < len(w.callers) {
			can = append(can, func() { all = append(all, start(c, r, w.callers[len(all)])) })
		}
		for i, k := range all {
			if k.answered && len(k.settled) < len(k.found) {
				can = append(can, func() { k.settle(r, i) })
			}
			if w.leaves && !k.answered && !k.left {
				can = append(can, func() {
					r.Say("caller %d leaves", i)
					k.left = true
					k.leave()
				})
			}
		}
		if resume != nil {
			can = append(can, func() {
				r.Say("the broker goes ahead")
				close(resume)
				resume = nil
			})
		}
		if faults > 0 && resume == nil {
			can = append(can, func() {
				r.Say("the link is lost")
				faults--
				q.last().lose()
			})
		}
		ways := len(can)
		if !passed {
			ways++
		}
		next := len(can)
		if ways > 0 {
			choosing.Lock()
			next = r.Pick(ways)
			choosing.Unlock()
		}
		passed = next == len(can)
		if passed { // time passes: a lost link is replaced
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if len(all) == len(w.callers) && !slices.ContainsFunc(all, func(k *caller) bool { return !k.answered || len(k.settled) < len(k.found) }) {
				break
			}
			if stuck = len(can) == 0 && stuck; stuck {
				return errors.New("nothing can happen any more, and a claim has no answer")
			}
			stuck = len(can) == 0
			continue
		}
		can[next]()
	}
	choosing.Lock()
	faults, slow = 0, 0
	choosing.Unlock()
	if resume != nil {
		close(resume)
	}
	time.Sleep(time.Minute)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		return err
	}
	synctest.Wait()
	return w.check(q, all, w.faults > 0)
}

func start(c *Claims, r *explore.Run, token string) *caller {
	r.Say("claim %q", token)
	k := &caller{token: token}
	ctx, cancel := context.WithCancel(context.Background())
	k.leave = cancel
	go func() {
		k.found, _, k.err = c.Claim(ctx, token)
		k.answered = true
		cancel()
	}()
	return k
}

// settle acknowledges the next message of a caller.
func (k *caller) settle(r *explore.Run, i int) {
	n := len(k.settled)
	r.Say("caller %d acknowledges %s", i, body(k.found[n].Message))
	k.settled = append(k.settled, errUnanswered)
	go func() {
		k.settled[n] = k.found[n].Settle(context.Background(), accept)
	}()
}

var errUnanswered = errors.New("unanswered")

// check accounts for every message, and for what callers were told.
func (w rounds) check(q *fakeQueue, all []*caller, lossy bool) error {
	parked, ready := bodies(q.parked), bodies(q.ready)
	is := func(m string) string {
		var where []string
		for name, list := range map[string][]string{"parked": parked, "ready": ready, "accepted": q.accepted} {
			for _, other := range list {
				if other == m {
					where = append(where, name)
				}
			}
		}
		if len(where) != 1 {
			return fmt.Sprint(where)
		}
		return where[0]
	}
	handed := map[string]bool{}
	for i, k := range all {
		if k.left && k.err != nil && !errors.Is(k.err, failure.ErrNotSent) || !k.left && k.err != nil && !errors.Is(k.err, failure.ErrConnectionLost) {
			return fmt.Errorf("caller %d got %w", i, k.err)
		}
		if k.err != nil && !k.left && !lossy {
			return fmt.Errorf("caller %d got %w, and no link was lost", i, k.err)
		}
		if slices.Contains(k.settled, errUnanswered) {
			return fmt.Errorf("a settlement of caller %d has no result", i)
		}
		for n, m := range k.found {
			name := body(m.Message)
			handed[name] = true
			switch err, at := k.settled[n], is(name); {
			case token2(m) != k.token:
				return fmt.Errorf("caller %d got %s", i, name)
			case err == nil && at != "accepted":
				return fmt.Errorf("%s was acknowledged, and is %s", name, at)
			case errors.Is(err, failure.ErrConnectionLost) && at == "accepted" && !w.again(all, name):
				return fmt.Errorf("%s wasn't acknowledged, it is said, and it was", name)
			case err != nil && !errors.Is(err, failure.ErrConnectionLost) && !errors.Is(err, failure.ErrOutcomeUnknown):
				return err
			}
		}
	}
	for _, m := range []string{"a1", "a2", "b1"} {
		switch at := is(m); {
		case at != "parked" && at != "ready" && at != "accepted":
			return fmt.Errorf("%s is %s", m, at)
		case at == "ready" && !lossy:
			return fmt.Errorf("%s isn't parked any more, and no link was lost", m)
		case at == "accepted" && !handed[m]:
			return fmt.Errorf("%s is acknowledged, and nobody had it", m)
		}
		for i, k := range all {
			if k.token == m[:1] && !k.left && k.err == nil && len(k.found) == 0 && is(m) == "parked" && !w.withdrawn(all, k.token) {
				return fmt.Errorf("caller %d was told that nothing is parked, and %s is", i, m)
			}
		}
	}
	if at := is("ready"); at != "ready" {
		return fmt.Errorf("the message of the backlog is %s", at)
	}
	return nil
}

// again reports whether a message was handed out more than once.
func (w rounds) again(all []*caller, name string) bool {
	n := 0
	for _, k := range all {
		for _, m := range k.found {
			if body(m.Message) == name {
				n++
			}
		}
	}
	return n > 1
}

// withdrawn reports whether somebody who claimed the token has left.
func (w rounds) withdrawn(all []*caller, token string) bool {
	return slices.ContainsFunc(all, func(k *caller) bool { return k.token == token && k.left })
}

func token2(m *Message) string {
	t, _, _ := token(m.Message)
	return t
}

func TestExploreRounds(t *testing.T) {
	worlds := map[string]rounds{
		"a caller, two losses":           {callers: []string{"a"}, faults: 2},
		"two callers of a token, a loss": {callers: []string{"a", "a"}, faults: 1},
		"callers of two tokens, a loss":  {callers: []string{"a", "b"}, faults: 1},
		"two callers that may leave":     {callers: []string{"a", "a"}, leaves: true, slow: 1},
	}
	if explore.UnderRace {
		worlds = map[string]rounds{"a caller, two losses": worlds["a caller, two losses"]}
	}
	if explore.Full() {
		worlds = map[string]rounds{
			"a caller, three losses":                 {callers: []string{"a"}, faults: 3},
			"two callers of a token, two losses":     {callers: []string{"a", "a"}, faults: 2},
			"callers of two tokens, two losses":      {callers: []string{"a", "b"}, faults: 2},
			"two callers that may leave, and a loss": {callers: []string{"a", "a"}, leaves: true, slow: 1, faults: 1},
			"three callers that may leave":           {callers: []string{"a", "a", "b"}, leaves: true, slow: 1},
		}
	}
	for name, w := range worlds {
		t.Run(name, func(t *testing.T) {
			report, err := w.explore(t, 1_000_000)
			require.NoError(t, err)
			assert.True(t, report.Complete)
			t.Logf("REPORT explore rounds, %s: %s", name, report)
		})
	}
}

// early has the queue apply settlements one flow later than the round believes.
type early struct {
	link.ReceiverLink
	waiting, next []func()
}

func (e *early) Settle(id uint32, d link.Disposition) error {
	e.next = append(e.next, func() { _ = e.ReceiverLink.Settle(id, d) })
	return nil
}

func (e *early) Claim(ctx context.Context, credit uint32, tokens []string, came func()) error {
	for _, settle := range e.waiting {
		settle()
	}
	e.waiting, e.next = e.next, nil
	return e.ReceiverLink.Claim(ctx, credit, tokens, came)
}

// forgetful never parks a message again.
type forgetful struct{ link.ReceiverLink }

func (f forgetful) Settle(id uint32, d link.Disposition) error {
	if d.Annotations[annotation.DeferralToken] != nil {
		return nil
	}
	return f.ReceiverLink.Settle(id, d)
}

// hasty reads only the first message that a flow brings.
type hasty struct {
	link.ReceiverLink
	read bool
}

func (h *hasty) Claim(ctx context.Context, credit uint32, tokens []string, came func()) error {
	h.read = false
	return h.ReceiverLink.Claim(ctx, credit, tokens, came)
}

func (h *hasty) Prefetched() (a link.Arrival, ok bool) {
	if h.read {
		return a, false
	}
	h.read = true
	return h.ReceiverLink.Prefetched()
}

func TestExploreRoundsFindsPlantedFaults(t *testing.T) {
	for name, wrong := range map[string]func(link.ReceiverLink) link.ReceiverLink{
		"settlements are confirmed too early":     func(l link.ReceiverLink) link.ReceiverLink { return &early{ReceiverLink: l} },
		"what nobody wanted isn't parked again":   func(l link.ReceiverLink) link.ReceiverLink { return forgetful{l} },
		"messages that have come are left unread": func(l link.ReceiverLink) link.ReceiverLink { return &hasty{ReceiverLink: l} },
	} {
		t.Run(name, func(t *testing.T) {
			_, err := rounds{callers: []string{"a", "a"}, leaves: true, slow: 1, wrong: wrong}.explore(t, 50_000)
			require.Error(t, err)
			t.Log(err)
		})
	}
}
