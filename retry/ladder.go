package retry

import (
	"fmt"
	"math/bits"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/ladder"
)

// Ladder is a fixed set of queues that can delay a message for any time. Use it as
// [Policy.AnyDelay] if handlers ask for many different delays with [After]. The zero value has 20
// levels and a unit of 100 ms, which is enough for 29 hours.
//
// The queue of level n delays a message for 2ⁿ units. A message passes the levels that correspond
// to the bits of its delay. The delay is rounded up to a whole number of units with at most four
// significant bits. So a message is late by less than an eighth of its delay, and passes at most
// four queues.
//
// The names of the queues and exchanges contain the unit and the number of levels, for example
// "retry_ladder_100ms_20_0". So different ladders of teams or versions of a service don't
// conflict. Before you change the ladder of a policy, apply the new topology.
type Ladder struct {
	// Unit is how long level 0 delays a message, in whole milliseconds. Default: 100 ms.
	Unit time.Duration
	// Levels is the number of queues, at most 32. Default: 20.
	Levels int
}

const (
	ladderBits   = 4
	maxLadder    = 32
	ladderSuffix = "back"
)

// withDefaults checks l, which at leads to.
func (l Ladder) withDefaults(at argument.Path) (Ladder, error) {
	if l.Unit == 0 {
		l.Unit = 100 * time.Millisecond
	}
	if l.Levels == 0 {
		l.Levels = 20
	}
	if l.Unit < time.Millisecond || l.Unit%time.Millisecond != 0 {
		return l, argument.At(at.Field("Unit"), argument.CodeNotWhole, l.Unit, "is not a whole number of milliseconds above zero", "use 100 ms or another whole number of milliseconds")
	}
	if l.Levels < 1 || l.Levels > maxLadder {
		return l, argument.At(at.Field("Levels"), argument.CodeOutOfRange, l.Levels, "is out of range", fmt.Sprintf("use 1 to %d", maxLadder))
	}
	if l.Unit > maxDelay>>l.Levels {
		return l, argument.At(at, argument.CodeOutOfRange, l.Unit, "delays messages for more than ten years", "use a smaller unit or fewer levels")
	}
	return l, nil
}

// steps is d in units, rounded up to at most ladderBits significant bits, and to
// what the ladder can hold.
func (l Ladder) steps(d time.Duration) uint64 {
	n := ladder.Units(max(min(d, maxDelay), l.Unit), l.Unit)
	if extra := bits.Len64(n) - ladderBits; extra > 0 {
		n = ladder.RoundUp(n, 1<<extra)
	}
	if top := uint64(1)<<l.Levels - 1; n > top {
		n = top
		if extra := l.Levels - ladderBits; extra > 0 {
			n &^= uint64(1)<<extra - 1
		}
	}
	return n
}

// longest is the longest delay that the ladder holds a message for at once.
func (l Ladder) longest() time.Duration { return time.Duration(l.steps(maxDelay)) * l.Unit }

// Delay returns how long the ladder delays a message with the delay d: at least d, unless d is
// longer than all levels together. If l is invalid, the error is an *argument.Error.
func (l Ladder) Delay(d time.Duration) (time.Duration, error) {
	l, err := l.withDefaults(argument.Root("Ladder"))
	if err != nil {
		return 0, err
	}
	return time.Duration(l.steps(d)) * l.Unit, nil
}

// address is where a message from queue enters the ladder: the exchange of its highest bit, with
// a key that has a word for each level, highest first, followed by the queue's name. at leads to
// the queue's name.
func (l Ladder) address(at argument.Path, n Names, d time.Duration, queue string) (address.Address, error) {
	if err := checkQueue(at, queue); err != nil {
		return address.Address{}, err
	}
	form, steps := l.form(n), l.steps(d)
	key := form.Key(steps, queue)
	if len(key) > maxKey {
		return address.Address{}, argument.At(at, argument.CodeTooLong, queue, fmt.Sprintf("makes a routing key of %d bytes", len(key)), "use a shorter name, or a ladder of fewer levels")
	}
	return address.Exchange(form.Exchange(steps), key), nil
}

func (l Ladder) form(n Names) ladder.Ladder {
	// Ladders of different levels or units must not share an exchange: a message would match the
	// bindings of each, and multiply (TestLaddersOfDifferentLevelsKeepTheirMessagesApart).
	own := fmt.Sprintf("%s%s_%d_", n.LadderPrefix, span(l.Unit), l.Levels)
	return ladder.Ladder{Unit: l.Unit, Levels: l.Levels, Prefix: own, Exit: own + ladderSuffix}
}

// topology declares the ladder. The exchange below level 0 returns messages.
func (l Ladder) topology(n Names) declare.Topology {
	t := declare.Topology{Exchanges: []declare.Exchange{
		{Name: l.form(n).Exit, Type: declare.ExchangeTopic, AlternateExchange: n.parkingExchange()},
	}}
	l.form(n).Add(&t, n.parkingExchange(), declare.QuorumQueue{})
	return t
}

// home is the binding that brings messages back to queue.
func (l Ladder) home(n Names, queue string) declare.Binding {
	form := l.form(n)
	return declare.Binding{Source: form.Exit, Queue: queue, Key: form.Leaves(queue)}
}

// others are the bindings that ladders of other numbers of levels would have on level 0 of this
// one, if they used its names. AMQP can't list the bindings of an exchange, so the checks query
// these.
func (l Ladder) others(n Names) []declare.Binding {
	var bindings []declare.Binding
	own := l.form(n).Name(0)
	for level := range maxLadder {
		if level != l.Levels-1 {
			bindings = append(bindings, declare.Binding{Source: own, Queue: own, Key: strings.Repeat("*.", level) + "1.#"})
		}
	}
	return bindings
}
