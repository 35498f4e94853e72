package retry

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

// Names are the names of the exchanges and queues that retries use. An empty field means its
// default. All workers that share delay queues must use the same names.
type Names struct {
	// Prefix comes before all default names below except DeadSuffix. Use it to separate one
	// team's exchanges and queues from others in the same virtual host. Default: "".
	Prefix string
	// RetryExchange is the topic exchange to which StrategyRepublish publishes failed messages.
	// Default: "retry_exchange".
	RetryExchange string
	// RequeueExchange is the topic exchange that returns these messages to their work queues
	// after their delay. Default: "requeue_exchange".
	RequeueExchange string
	// DeadLetterExchange is the headers exchange that work queues dead-letter to. It routes
	// messages that StrategyDeadLetter retries to a delay queue, and all others to
	// GivenUpExchange. Default: "dead_letter_exchange".
	DeadLetterExchange string
	// GivenUpExchange is the direct exchange that routes dead letters to the dead-letter
	// queues. Default: "given_up_exchange".
	GivenUpExchange string
	// ReturnExchange is the direct exchange that returns messages to their work queues after a
	// delay with StrategyDeadLetter. Default: "return_exchange".
	ReturnExchange string
	// ReplayExchange is the headers exchange for a policy with ReplayByMove: its dead-letter
	// queues dead-letter to it. It returns messages to their work queues when package desk
	// replays them. Default: "replay_exchange".
	ReplayExchange string
	// Parking names the exchange and the queue for messages that can't return because their work
	// queue or a binding is gone: a fanout exchange with "_exchange" appended, and a queue with
	// "_queue" appended. Default: "parking".
	Parking string
	// FailedQueue is the queue that work queues dead-letter to for [Central]. Default:
	// "failed_queue".
	FailedQueue string
	// FailedExchange is the headers exchange through which [Central] moves messages out of the
	// failed queue: to a delay queue, from there to their work queues, or to a dead-letter queue.
	// Default: "failed_exchange".
	FailedExchange string
	// DelayPrefix starts the names of StrategyRepublish's delay queues, such as "delay_10s".
	// HoldPrefix starts those of StrategyDeadLetter's, such as "hold_10s". Defaults: "delay_" and
	// "hold_".
	DelayPrefix, HoldPrefix string
	// LadderPrefix starts the names of AnyDelay's queues and exchanges. The ladder's unit and
	// levels follow: "retry_ladder_100ms_20_0". Default: "retry_ladder_".
	LadderPrefix string
	// DeadSuffix ends the names of dead-letter queues, such as "orders.dead". Default: ".dead".
	DeadSuffix string
}

// withDefaults checks n, which at leads to.
func (n Names) withDefaults(at argument.Path) (Names, error) {
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
		{"ReplayExchange", &n.ReplayExchange, "replay_exchange"},
		{"Parking", &n.Parking, "parking"},
		{"FailedQueue", &n.FailedQueue, "failed_queue"},
		{"FailedExchange", &n.FailedExchange, "failed_exchange"},
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
		field := at.Field(f.field)
		if err := brokername.Check(field, *f.value); err != nil {
			return n, err
		}
		if *f.value == "amq.default" {
			return n, argument.At(field, argument.CodeReserved, *f.value, "is the default exchange", "use another name")
		}
	}
	return n, n.distinct(at)
}

// distinct refuses one name for two things: an exchange that both returns and dead-letters
// messages would do both with each one.
func (n Names) distinct(at argument.Path) error {
	fields := map[string]argument.Path{}
	for _, x := range []struct{ field, name string }{
		{"RetryExchange", n.RetryExchange}, {"RequeueExchange", n.RequeueExchange}, {"DeadLetterExchange", n.DeadLetterExchange},
		{"GivenUpExchange", n.GivenUpExchange}, {"ReturnExchange", n.ReturnExchange}, {"ReplayExchange", n.ReplayExchange}, {"Parking", n.parkingExchange()},
		{"FailedExchange", n.FailedExchange},
		// A space keeps the prefixes of queues apart from the exchanges.
		{"DelayPrefix", n.DelayPrefix + " "}, {"HoldPrefix", n.HoldPrefix + " "},
	} {
		if other, taken := fields[x.name]; taken {
			return argument.At(at.Field(x.field), argument.CodeConflict, x.name, "is the same as", "use different names").And(other)
		}
		fields[x.name] = at.Field(x.field)
	}
	return nil
}

// DeadLetterQueue returns the name of a work queue's dead-letter queue.
func (n Names) DeadLetterQueue(work string) string {
	n, _ = n.withDefaults(nil)
	return work + n.DeadSuffix
}

// DelayQueue returns the name of StrategyRepublish's delay queue for d: "delay_10s" for
// whole seconds, "delay_250ms" for other delays.
func (n Names) DelayQueue(d time.Duration) string {
	n, _ = n.withDefaults(nil)
	return n.DelayPrefix + span(d)
}

// HoldQueue returns the name of StrategyDeadLetter's delay queue for d, such as
// "hold_10s".
func (n Names) HoldQueue(d time.Duration) string {
	n, _ = n.withDefaults(nil)
	return n.HoldPrefix + span(d)
}

func span(d time.Duration) string {
	if d%time.Second == 0 {
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return fmt.Sprintf("%dms", d.Milliseconds())
}

// ParkingQueue returns the name of the queue for messages that can't return to their work queue.
func (n Names) ParkingQueue() string {
	n, _ = n.withDefaults(nil)
	return n.Parking + "_queue"
}

// sortExchange is behind the dead-letter exchange. It routes retries to a delay queue, and all else,
// which matches nothing there, to GivenUpExchange. Others bind their queues to the exchange that they
// know, the dead-letter exchange, where such a binding takes nothing away.
func (n Names) sortExchange() string { return n.DeadLetterExchange + ".sort" }

func (n Names) parkingExchange() string { return n.Parking + "_exchange" }

// RoutingKey returns the routing key that delays a message of a work queue for d when you publish
// it to the retry exchange: delay.<milliseconds>.<queue>. Use it to delay messages from programs
// that don't use hopback.
//
// The error is an *argument.Error for two kinds of queue names:
//
//   - A name with a word between dots that is exactly "*" or "#". In the binding *.*.<queue> it
//     would be a wildcard and match messages of other queues.
//   - A name that makes the key longer than 255 bytes, the limit of AMQP 0-9-1.
func RoutingKey(d time.Duration, queue string) (string, error) {
	return routingKey(argument.Root("queue"), d, queue)
}

// routingKey is RoutingKey for the queue whose name at leads to.
func routingKey(at argument.Path, d time.Duration, queue string) (string, error) {
	if err := checkQueue(at, queue); err != nil {
		return "", err
	}
	key := "delay." + strconv.FormatInt(d.Milliseconds(), 10) + "." + queue
	if len(key) > maxKey {
		return "", argument.At(at, argument.CodeTooLong, queue, fmt.Sprintf("makes a routing key of %d bytes", len(key)), fmt.Sprintf("use a name of at most %d bytes", maxKey-len(key)+len(queue)))
	}
	return key, nil
}

// maxKey is AMQP 0-9-1's limit for a short string.
const maxKey = 255

func checkQueue(at argument.Path, queue string) error {
	if err := brokername.Check(at, queue); err != nil {
		return err
	}
	for word := range strings.SplitSeq(queue, ".") {
		if word == "*" || word == "#" {
			return argument.At(at, argument.CodeReserved, queue, fmt.Sprintf("has the word %q, a wildcard in the binding that returns its messages: it would match other queues' messages", word),
				"rename the queue; a star or hash within a longer word is fine")
		}
	}
	return nil
}
