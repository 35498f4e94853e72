package retry

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

// Names of the exchanges and queues that retries go through. The zero value has
// the defaults; all workers that share delay queues must agree on them.
type Names struct {
	// Prefix begins all default names below, but the suffix: for a set of its own
	// beside others' on the same virtual host.
	Prefix string
	// RetryExchange takes failed messages: topic. Default: "retry_exchange".
	RetryExchange string
	// RequeueExchange takes them after their delay: topic. Default: "requeue_exchange".
	RequeueExchange string
	// DeadLetterExchange takes what work queues dead-letter: headers. It sends what
	// is to be retried by the DeadLetter strategy to a delay queue, and the rest
	// on to GivenUpExchange. Default: "dead_letter_exchange".
	DeadLetterExchange string
	// GivenUpExchange takes what isn't retried any more: direct. Default: "given_up_exchange".
	GivenUpExchange string
	// ReturnExchange brings back what the DeadLetter strategy has delayed: direct.
	// Default: "return_exchange".
	ReturnExchange string
	// Parking takes what can't be brought back because its queue or binding is
	// gone. It is the name of a fanout exchange with "_exchange" appended, and of
	// a queue with "_queue" appended. Default: "parking".
	Parking string
	// DelayPrefix begins the names of Republish's delay queues: "delay_" gives
	// "delay_10s"; HoldPrefix those of DeadLetter's, "hold_" gives "hold_10s".
	DelayPrefix, HoldPrefix string
	// LadderPrefix begins the names of AnyDelay's queues and exchanges. Default:
	// "retry_ladder_".
	LadderPrefix string
	// DeadSuffix ends the names of dead-letter queues: ".dead" gives "orders.dead".
	DeadSuffix string
}

func (n Names) withDefaults() (Names, error) {
	for _, f := range []struct {
		field    string
		value    *string
		fallback string
	}{
		{"RetryExchange", &n.RetryExchange, "retry_exchange"},
		{"RequeueExchange", &n.RequeueExchange, "requeue_exchange"},
		{"DeadLetterExchange", &n.DeadLetterExchange, "dead_letter_exchange"},
		{"GivenUpExchange", &n.GivenUpExchange, "given_up_exchange"},
		{"ReturnExchange", &n.ReturnExchange, "return_exchange"},
		{"Parking", &n.Parking, "parking"},
		{"DelayPrefix", &n.DelayPrefix, "delay_"},
		{"HoldPrefix", &n.HoldPrefix, "hold_"},
		{"LadderPrefix", &n.LadderPrefix, "retry_ladder_"},
		{"DeadSuffix", &n.DeadSuffix, ".dead"},
	} {
		if *f.value == "" {
			*f.value = f.fallback
			if f.field != "DeadSuffix" {
				*f.value = n.Prefix + f.fallback
			}
		}
		if err := address.Exchange(*f.value, "").Validate(); err != nil {
			return n, argument.Wrap(err, "Policy.Names."+f.field, *f.value, "can't be a name", "use another")
		}
	}
	return n, n.distinct()
}

// distinct refuses one name for two things: an exchange that both brings back and
// gives up would do both with each message.
func (n Names) distinct() error {
	fields := map[string]string{}
	for _, x := range []struct{ field, name string }{
		{"RetryExchange", n.RetryExchange}, {"RequeueExchange", n.RequeueExchange}, {"DeadLetterExchange", n.DeadLetterExchange},
		{"GivenUpExchange", n.GivenUpExchange}, {"ReturnExchange", n.ReturnExchange}, {"Parking", n.parkingExchange()},
		// A space keeps the prefixes of queues apart from the exchanges.
		{"DelayPrefix", n.DelayPrefix + " "}, {"HoldPrefix", n.HoldPrefix + " "},
	} {
		if other, taken := fields[x.name]; taken {
			return argument.New("Policy.Names."+x.field, x.name, "is the name of "+other+", too", "use another")
		}
		fields[x.name] = x.field
	}
	return nil
}

// DeadLetterQueue is the name of the queue that holds the dead of a work queue.
func (n Names) DeadLetterQueue(work string) string {
	n, _ = n.withDefaults()
	return work + n.DeadSuffix
}

// DelayQueue is the name of the queue that holds messages for d: "delay_10s" for
// whole seconds, "delay_250ms" for the rest.
func (n Names) DelayQueue(d time.Duration) string {
	n, _ = n.withDefaults()
	return n.DelayPrefix + span(d)
}

// HoldQueue is the same for the DeadLetter strategy: "hold_10s".
func (n Names) HoldQueue(d time.Duration) string {
	n, _ = n.withDefaults()
	return n.HoldPrefix + span(d)
}

func span(d time.Duration) string {
	if d%time.Second == 0 {
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return fmt.Sprintf("%dms", d.Milliseconds())
}

// ParkingQueue is the name of the queue for what can't be brought back.
func (n Names) ParkingQueue() string {
	n, _ = n.withDefaults()
	return n.Parking + "_queue"
}

func (n Names) parkingExchange() string { return n.Parking + "_exchange" }

// RoutingKey is the key with which a message from queue asks to be held for d:
// delay.<milliseconds>.<queue>.
//
// It is refused for a queue that the way back can't name: one with a word (between
// dots) that is exactly "*" or "#", which would be a wildcard in the binding
// *.*.<queue> and take other queues' messages; or one so long that the key has
// more than 255 bytes, which AMQP 0-9-1 can't carry.
func RoutingKey(d time.Duration, queue string) (string, error) {
	if err := checkQueue(queue); err != nil {
		return "", err
	}
	key := "delay." + strconv.FormatInt(d.Milliseconds(), 10) + "." + queue
	if len(key) > maxKey {
		return "", argument.New("queue", queue, fmt.Sprintf("makes a routing key of %d bytes", len(key)), fmt.Sprintf("use a name of at most %d bytes", maxKey-len(key)+len(queue)))
	}
	return key, nil
}

// maxKey is AMQP 0-9-1's limit for a short string.
const maxKey = 255

func checkQueue(queue string) error {
	if err := address.Queue(queue).Validate(); err != nil {
		return err
	}
	for word := range strings.SplitSeq(queue, ".") {
		if word == "*" || word == "#" {
			return argument.New("queue", queue, fmt.Sprintf("has the word %q, a wildcard in the binding that brings its messages back: it would take other queues' messages", word),
				"rename the queue; a star or hash within a longer word is fine")
		}
	}
	return nil
}
