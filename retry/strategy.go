package retry

import (
	"fmt"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/oldbroker"
)

// Strategy is where a message waits for its retry. Handlers are the same for all strategies,
// attempts are counted across all, and workers with different strategies may share a queue. The
// zero value, "", means StrategyRepublish.
type Strategy string

const (
	// StrategyRepublish publishes a copy to the shared delay queues and acknowledges the original
	// once the broker has confirmed the copy. It works on every RabbitMQ 4 and with workers in
	// other languages.
	//
	//   - A lost connection can leave a duplicate.
	//   - See [client.Copy] for what a copy lacks. Use another strategy for messages of AMQP
	//     0-9-1 clients whose headers contain tables or arrays.
	//   - A message that can't be copied, such as one near the broker's max-message-size, is
	//     copied without its history. If that fails too, it waits as with StrategyNative. Below
	//     RabbitMQ 4.3 it is dead-lettered with [client.ReasonUnforwardable].
	StrategyRepublish Strategy = "republish"
	// StrategyDeadLetter rejects the message with a single disposition, and the broker dead-letters
	// it through a headers exchange into a delay queue. The client makes no copy, so a lost
	// connection can't leave a second message, and the message stays exactly what its sender
	// published. RabbitMQ's at-least-once dead-lettering can duplicate it, for instance when a
	// leader changes. It works on every RabbitMQ 4, with quorum queues whose dead-letter exchange
	// is the one of [Topology].
	//
	// All workers of the queue should use this package: if another worker rejects a message after
	// a retry with this strategy, the message is retried once more instead of being
	// dead-lettered. The same happens if a sender forges the mark of a retry.
	StrategyDeadLetter Strategy = "dead-letter"
	// StrategyNative requeues the message with the time of its next delivery, and the work queue
	// holds it until then. It supports any delay and needs no delay queues. It needs RabbitMQ 4.3
	// or later and a quorum queue. On others the consumer doesn't start, because they would
	// deliver the message again at once.
	//
	//   - The queue's message TTL keeps running while a message waits. So the queue must have
	//     none, or one that is longer than all delays of the policy together. A message with a
	//     ttl shorter than the delay expires while it waits.
	//   - The worker asks the broker for its time, since their clocks may differ (see
	//     [client.Start]). Without the permissions for that, its first retry can be late by the
	//     difference.
	StrategyNative Strategy = "native"
	// StrategyAuto chooses when the consumer starts: StrategyNative if the broker and the queue
	// support it, else StrategyDeadLetter if the queue's dead-letter exchange is the one of
	// [Topology], else StrategyRepublish.
	//
	//   - If it chose StrategyNative, it republishes messages that have a ttl.
	//   - It doesn't choose StrategyNative for a queue whose message TTL is shorter than all
	//     delays of the policy together: such a queue works on RabbitMQ 4.0, and an upgrade to
	//     4.3 must not break it.
	StrategyAuto Strategy = "auto"
)

var strategies = []Strategy{StrategyRepublish, StrategyDeadLetter, StrategyNative, StrategyAuto}

// choose resolves StrategyAuto, and refuses what the broker or the queue doesn't support.
func (pl *plan) choose(b client.Broker, q declare.QueueInfo) (Strategy, error) {
	native := !oldbroker.Of(b.AtLeast).IgnoresDeliveryTime
	switch {
	case q.Type == "stream":
		return "", &GuardError{Guard: GuardStrategy, Queue: q.Name,
			Problem: "it is a stream, which can't requeue or dead-letter messages",
			Remedy:  "use stream.Consume without retry.With: it calls the handler again in place; a consumer of stream.Config.FailedQueue can use retry.With"}
	case pl.strategy == StrategyNative && pl.claimable && oldbroker.Of(b.AtLeast).LacksTokens:
		return "", noTokens(b.Version, q.Name)
	case pl.strategy == StrategyNative && !native:
		return "", noNative(b.Version, q.Name)
	case pl.strategy == StrategyNative && q.Type != "quorum":
		return "", &GuardError{Guard: GuardStrategy, Queue: q.Name,
			Problem: fmt.Sprintf("StrategyNative needs a quorum queue; this one is %q", q.Type), Remedy: "use StrategyRepublish"}
	case pl.strategy == StrategyDeadLetter && q.Type != "quorum":
		return "", &GuardError{Guard: GuardStrategy, Queue: q.Name,
			Problem: fmt.Sprintf("StrategyDeadLetter needs a quorum queue; this one is %q, which drops the mark of a retry, so the first failure would be final", q.Type),
			Remedy:  "use StrategyRepublish"}
	case pl.strategy != StrategyAuto:
		return pl.strategy, nil
	case q.Type == "quorum" && native && !pl.outlasts(q):
		return StrategyNative, nil
	case q.Type == "quorum" && q.Arguments["x-dead-letter-exchange"] == pl.names.DeadLetterExchange && q.Arguments["x-dead-letter-routing-key"] == q.Name:
		return StrategyDeadLetter, nil
	}
	return StrategyRepublish, nil
}

// holds reports whether q holds a message until its delivery time, regardless of the strategy, and neither
// lets it expire in that time nor hangs.
func holds(b client.Broker, q declare.QueueInfo) bool {
	_, ttl := q.Arguments["x-message-ttl"]
	_, length := q.Arguments["x-max-length"]
	_, bytes := q.Arguments["x-max-length-bytes"]
	return q.Type == "quorum" && !oldbroker.Of(b.AtLeast).IgnoresDeliveryTime && !ttl && (!length && !bytes || q.Arguments["x-overflow"] == "reject-publish")
}

// outlasts reports whether a message that waits in q for its retries may expire there: the
// queue's message TTL runs on from its arrival (TestAMessageExpiresWhileItWaitsNatively).
func (pl *plan) outlasts(q declare.QueueInfo) bool {
	ttl, ok := q.Arguments["x-message-ttl"].(int64)
	return ok && time.Duration(ttl)*time.Millisecond <= pl.together()
}

// together is how long a message waits at most if it is retried as often as the policy, or
// one of its rules, says.
func (pl *plan) together() time.Duration {
	sum := func(delays []time.Duration) (all time.Duration) {
		for _, d := range delays {
			if all += d; all > maxDelay {
				return maxDelay
			}
		}
		return all
	}
	longest := sum(pl.delays)
	for _, r := range pl.rules {
		if r.do == ActionRetry || r.do == ActionRetryUncounted {
			longest = max(longest, sum(r.delays))
		}
	}
	if pl.giveUp > 0 {
		longest = min(longest, pl.giveUp)
	}
	return longest
}
