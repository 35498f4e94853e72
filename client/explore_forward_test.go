package client

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// forwardWorld is a small world: a consumer forwards a copy of each message. The broker answers the
// copies in any order, or refuses them, and links are lost before and after each step.
type forwardWorld struct {
	messages, losses, refusals int
	// stops says that the consumer may be stopped while copies are unanswered.
	stops bool
	// wrong, if set, plants a fault between the consumer and its sending link.
	wrong func(link.SenderLink) link.SenderLink
}

func (w forwardWorld) explore(t *testing.T, runs int) (explore.Report, error) {
	// With one processor, goroutines mostly run in the same order again.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	return explore.All(runs, func(r *explore.Run) (err error) {
		synctest.Test(t, func(t *testing.T) { err = w.run(t, r) })
		return err
	})
}

func (w forwardWorld) run(t *testing.T, r *explore.Run) error {
	b := linktest.NewFakeBroker(t)
	b.Verdict, b.Requeues, b.Plant = linktest.Withhold, true, w.wrong
	losses, refusals := w.losses, w.refusals
	var choosing sync.Mutex // the consumer's goroutines choose, too, while the run's goroutine waits
	b.Hook = func(step string) error {
		choosing.Lock()
		defer choosing.Unlock()
		if losses == 0 || !strings.HasPrefix(step, "settle") && !strings.HasPrefix(step, "send") || !r.Happens() {
			return nil
		}
		losses--
		r.Say("the link is lost before: %s", step)
		go b.KillLater(linktest.ErrFakeLink)()
		return linktest.ErrFakeLink
	}
	all := linktest.Numbered("m", w.messages)
	b.Publish(all...)
	k := startConsumer(b, ConsumerConfig{Concurrency: w.messages}, forwards("later"))
	end := sync.OnceValue(func() error {
		choosing.Lock()
		losses = 0
		choosing.Unlock()
		return k.end()
	})
	defer func() { _ = end() }()
	ended := false
	for passed, stuck := false, 0; !ended; {
		synctest.Wait()
		if err := w.check(b, all); err != nil {
			return err
		}
		var can []func()
		for _, id := range b.Unanswered() {
			can = append(can, func() { answer(b, r, id, &amqp.StateAccepted{}) })
			if refusals > 0 {
				can = append(can, func() {
					refusals--
					answer(b, r, id, &amqp.StateReleased{})
				})
			}
		}
		if losses > 0 {
			for _, kill := range kills {
				can = append(can, func() {
					r.Say("%s lost", kill.what)
					losses--
					kill.do(b)
				})
			}
		}
		if w.stops {
			can = append(can, func() {
				r.Say("the consumer is stopped")
				ended = true
			})
		}
		done := len(b.History("accept")) == len(all)
		ways := len(can)
		if !passed && !done {
			ways++
		}
		if ways == 0 {
			if done {
				break
			}
			if stuck++; stuck > 3 {
				return errors.New("nothing can happen any more, and a message isn't acknowledged")
			}
			time.Sleep(time.Minute)
			continue
		}
		choosing.Lock()
		next := r.Pick(ways)
		choosing.Unlock()
		if passed = next == len(can); passed {
			time.Sleep(time.Minute) // a lost link is replaced, a refused copy is sent again
			continue
		}
		stuck = 0
		can[next]()
	}
	if err := end(); err != nil {
		return err
	}
	return w.final(b, all)
}

var kills = []struct {
	what string
	do   func(*linktest.FakeBroker)
}{
	{"the links are", func(b *linktest.FakeBroker) { b.Kill(linktest.ErrFakeLink) }},
	{"the sending links are", func(b *linktest.FakeBroker) { b.KillSenders(linktest.ErrFakeLink) }},
	{"the connection is", func(b *linktest.FakeBroker) { b.Kill(linktest.ErrFakeConn) }},
}

func answer(b *linktest.FakeBroker, r *explore.Run, id string, state amqp.DeliveryState) {
	r.Say("%s: %T", id, state)
	b.AnswerOnly(func(other string) bool { return other == id }, state)
}

// check is what holds in every state: a message is acknowledged once its copy is stored, and not
// before, and a copy is stored twice only if a link was lost.
func (w forwardWorld) check(b *linktest.FakeBroker, all []string) error {
	accepted := b.History("accept")
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for _, id := range all {
		n := 0
		for _, e := range accepted {
			if e == "accept "+id {
				n++
			}
		}
		switch copies := b.Stored[id+"'"]; {
		case n > 1:
			return fmt.Errorf("%s was acknowledged %d times", id, n)
		case n == 1 && copies == 0:
			return fmt.Errorf("%s was acknowledged, and no copy is stored: it is lost", id)
		case copies > 1+w.losses:
			return fmt.Errorf("%s has %d copies, and only %d links were lost", id, copies, w.losses)
		}
	}
	return nil
}

// final is what holds when the consumer has ended: each message is acknowledged, or in its queue.
func (w forwardWorld) final(b *linktest.FakeBroker, all []string) error {
	if err := w.check(b, all); err != nil {
		return err
	}
	accepted := b.History("accept")
	b.Mu.Lock()
	defer b.Mu.Unlock()
	for _, id := range all {
		n := 0
		for _, m := range b.Ready {
			if linktest.IDOf(m) == id {
				n++
			}
		}
		if slices.Contains(accepted, "accept "+id) {
			n++
		}
		if n != 1 {
			return fmt.Errorf("%s is in %d places at the end", id, n)
		}
	}
	return nil
}

func TestExploreForwards(t *testing.T) {
	worlds := map[string]forwardWorld{
		"one message, two losses":               {messages: 1, losses: 2, refusals: 1},
		"two messages, a loss, and a refusal":   {messages: 2, losses: 1, refusals: 1},
		"three messages, answered in any order": {messages: 3, refusals: 1},
		"two messages, a loss, and a stop":      {messages: 2, losses: 1, stops: true},
		"three messages, a refusal, and a stop": {messages: 3, refusals: 1, stops: true},
	}
	if explore.UnderRace { // which takes ten times as long
		delete(worlds, "three messages, a refusal, and a stop")
		delete(worlds, "two messages, a loss, and a stop")
	}
	if explore.Full() {
		worlds = map[string]forwardWorld{
			"two messages, two losses, two refusals, and a stop": {messages: 2, losses: 2, refusals: 2, stops: true},
			"four messages, a loss, and a stop":                  {messages: 4, losses: 1, stops: true},
		}
	}
	for name, w := range worlds {
		t.Run(name, func(t *testing.T) {
			report, err := w.explore(t, 1_000_000)
			require.NoError(t, err)
			assert.True(t, report.Complete)
			t.Logf("REPORT explore forwards, %s: %s", name, report)
		})
	}
}

// planted is a sender with a fault.
type planted struct {
	link.SenderLink
	answer func(to link.Receipt, m *amqp.Message) link.Receipt
}

func (p planted) Send(m *amqp.Message, to link.Receipt) (link.Sending, bool, error) {
	return p.SenderLink.Send(m, p.answer(to, m))
}

// receipt changes an answer.
type receipt struct {
	link.Receipt
	change func(amqp.DeliveryState, error) (amqp.DeliveryState, error)
}

func (r receipt) Answer(state amqp.DeliveryState, err error) { r.Receipt.Answer(r.change(state, err)) }

type nobody struct{ link.Receipt }

func (nobody) Answer(amqp.DeliveryState, error) {}

func TestExploreForwardsFindsPlantedFaults(t *testing.T) {
	changed := func(change func(amqp.DeliveryState, error) (amqp.DeliveryState, error)) func(link.Receipt, *amqp.Message) link.Receipt {
		return func(to link.Receipt, _ *amqp.Message) link.Receipt { return receipt{to, change} }
	}
	for name, answer := range map[string]func(link.Receipt, *amqp.Message) link.Receipt{
		"a message that was sent counts as stored": func(to link.Receipt, _ *amqp.Message) link.Receipt {
			go to.Answer(&amqp.StateAccepted{}, nil)
			return nobody{to}
		},
		"a released copy counts as stored": changed(func(state amqp.DeliveryState, err error) (amqp.DeliveryState, error) {
			if _, released := state.(*amqp.StateReleased); released {
				return &amqp.StateAccepted{}, nil
			}
			return state, err
		}),
		"a copy whose link was lost counts as stored": changed(func(state amqp.DeliveryState, err error) (amqp.DeliveryState, error) {
			if err != nil {
				return &amqp.StateAccepted{}, nil
			}
			return state, nil
		}),
		"a stored copy is sent again": changed(func(state amqp.DeliveryState, err error) (amqp.DeliveryState, error) {
			if _, accepted := state.(*amqp.StateAccepted); accepted {
				return &amqp.StateReleased{}, nil
			}
			return state, err
		}),
	} {
		t.Run(name, func(t *testing.T) {
			wrong := func(l link.SenderLink) link.SenderLink { return planted{l, answer} }
			_, err := forwardWorld{messages: 2, losses: 1, refusals: 1, wrong: wrong}.explore(t, 100_000)
			require.Error(t, err)
			t.Log(err)
		})
	}
}
