package schedule

import (
	"math/bits"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/internal/ladder"
)

const (
	// unit is how long level 0 delays a message.
	unit = 100 * time.Millisecond
	// levels together delay a message for 2^29 - 1 units, 621 days. The highest delays it for 310
	// days, which RabbitMQ supports though it is over 2³² ms
	// (TestAQueueHoldsMessagesForMostOfAYear).
	levels = 29
	// fine is the number of bits of a delay that isn't rounded to coarse units.
	fine   = 10
	coarse = 8

	// maxDelay is how far ahead a message can be scheduled.
	maxDelay = 366 * 24 * time.Hour
)

// maxKey is AMQP 0-9-1's limit for a routing key.
const maxKey = 255

// steps is d in units, rounded up: to whole ones, or to eight of them if that is little compared
// with the delay, since each bit is a queue to pass.
func steps(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	n := ladder.Units(d, unit)
	if bits.Len64(n) > fine {
		n = ladder.RoundUp(n, coarse)
	}
	return n
}

// entry is where a message for d enters the ladder: at the exchange of its highest bit. Its key
// has a word for each level, highest first. After those comes the queue that it is for, or, if
// that is empty, a word that no queue is bound by.
func (n Names) entry(d time.Duration, queue string) address.Address {
	left := steps(d)
	return address.Exchange(n.ladder().Exchange(left), key(left, queue))
}

func (n Names) ladder() ladder.Ladder {
	return ladder.Ladder{Unit: unit, Levels: levels, Prefix: n.Prefix + "schedule_", Exit: n.due()}
}

func key(steps uint64, queue string) string {
	rest := viaWord
	if queue != "" {
		rest = toWord + queue
	}
	return Names{}.ladder().Key(steps, rest)
}

const (
	toWord  = "to."
	viaWord = "via"
)

// bindable reports whether a queue can be bound to the ladder by its name.
func bindable(queue string) bool {
	if 2*levels+len(toWord)+len(queue) > maxKey {
		return false
	}
	for word := range strings.SplitSeq(queue, ".") {
		if word == "*" || word == "#" {
			return false
		}
	}
	return true
}
