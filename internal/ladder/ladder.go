// Package ladder is a row of delay queues that holds a message for any delay. Each level's
// queue holds it for twice as long as the one below. Package retry's ladder and package
// schedule's are such, and differ in how they round a delay.
package ladder

import (
	"math/bits"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/declare"
)

// Ladder is the form of a ladder.
type Ladder struct {
	Unit   time.Duration // level 0 holds a message for as long
	Levels int
	// Prefix is what the names of exchanges and queues begin with, before the level's number.
	Prefix string
	// Exit is the exchange where messages leave the ladder.
	Exit string
}

// Name is the name of a level's exchange and queue, and Exit for level -1.
func (l Ladder) Name(level int) string {
	if level < 0 {
		return l.Exit
	}
	return l.Prefix + strconv.Itoa(level)
}

// Units is d in units, rounded up.
func Units(d, unit time.Duration) uint64 { return uint64((d + unit - 1) / unit) }

// RoundUp is n as a multiple of step, which is a power of two.
func RoundUp(n, step uint64) uint64 { return (n + step - 1) &^ (step - 1) }

// Exchange is where a message for so many units enters the ladder: at its highest bit.
func (l Ladder) Exchange(units uint64) string { return l.Name(bits.Len64(units) - 1) }

// Key is its routing key: a word for each level, highest first, and rest behind them.
func (l Ladder) Key(units uint64, rest string) string {
	b := make([]byte, 0, 2*l.Levels+len(rest))
	for level := l.Levels - 1; level >= 0; level-- {
		b = append(b, '0'+byte(units>>level&1), '.')
	}
	return string(append(b, rest...))
}

// Leaves is the key of a binding to the exchange where messages leave the ladder.
func (l Ladder) Leaves(rest string) string { return strings.Repeat("*.", l.Levels) + rest }

// Add adds the levels to t. A message at level n whose bit there is set goes to the queue,
// which hands it to level n-1 when its time is up. Otherwise it goes to level n-1 at once.
// alternate gets what isn't of a ladder, which would block the level above. queue is what all
// queues have.
func (l Ladder) Add(t *declare.Topology, alternate string, queue declare.QuorumQueue) {
	for level := range l.Levels {
		own, below := l.Name(level), l.Name(level-1)
		before := strings.Repeat("*.", l.Levels-1-level)
		queue.Name, queue.MessageTTL = own, l.Unit<<level
		queue.DeadLetter = declare.DeadLetterTarget{Exchange: below}
		t.Exchanges = append(t.Exchanges, declare.Exchange{Name: own, Type: declare.ExchangeTopic, AlternateExchange: alternate})
		t.Queues = append(t.Queues, queue)
		t.Bindings = append(t.Bindings,
			declare.Binding{Source: own, Queue: own, Key: before + "1.#"},
			declare.Binding{Source: own, Exchange: below, Key: before + "0.#"})
	}
}
