package retry

import (
	"context"
	"fmt"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// Strategy is how a message waits for its retry. The handler is the same for all,
// attempts are counted across all, and workers with different strategies may
// share a queue.
type Strategy uint8

const (
	// Republish publishes a copy to the shared delay queues and accepts the
	// original once the copy is confirmed. It works on every RabbitMQ 4 and with
	// workers in other languages. A lost connection can leave a duplicate.
	Republish Strategy = iota
	// DeadLetter hands the message to the broker with one disposition, which
	// dead-letters it through a headers exchange into a delay queue: no copy by
	// the client, so no duplicate by it, and nothing of the message changes. It
	// works on every RabbitMQ 4, and needs the work queue's dead-letter exchange
	// to be the one of Topology. All workers of the queue should be this package's:
	// a message that was retried so, or whose sender forged the mark of that, comes
	// back after its delay when a worker of another kind rejects it.
	DeadLetter
	// Native gives the message back with the time of its next delivery, and the
	// queue itself holds it: any delay, no further queues. It needs RabbitMQ 4.3
	// or later and a quorum queue, and is refused on others: they would deliver
	// at once. The delay is measured by this host's clock against the broker's. A
	// message whose sender gave it a ttl below the delay expires while it waits.
	Native
	// Auto takes Native where the broker and the queue can, else DeadLetter where
	// the queue's dead-letter exchange is the one of Topology, else Republish. It
	// decides when the consumer starts. In place of Native it republishes a message
	// with a ttl.
	Auto
)

func (s Strategy) String() string {
	switch s {
	case Republish:
		return "republish"
	case DeadLetter:
		return "dead-letter"
	case Native:
		return "native"
	case Auto:
		return "auto"
	}
	return fmt.Sprintf("strategy %d", uint8(s))
}

// nativeSince is the first RabbitMQ that holds a message until its
// x-opt-delivery-time.
var nativeSince = [2]int{4, 3}

// choose settles Auto, and refuses what the broker or the queue can't do.
func (pl *plan) choose(ctx context.Context, s client.Start, queue func(context.Context) (declare.QueueInfo, error)) (Strategy, error) {
	switch pl.strategy {
	case Native:
		if !s.Broker.AtLeast(nativeSince[0], nativeSince[1]) {
			return 0, &GuardError{Guard: GuardNative, Queue: s.Queue,
				Problem: fmt.Sprintf("the strategy Native needs RabbitMQ 4.3 or later, this is %q, which would deliver the message again at once", s.Broker.Version),
				Remedy:  "use Auto, DeadLetter or Republish"}
		}
		info, err := queue(ctx)
		if err != nil {
			return 0, err
		}
		if info.Type != "quorum" {
			return 0, &GuardError{Guard: GuardNative, Queue: s.Queue,
				Problem: fmt.Sprintf("the strategy Native needs a quorum queue, this one is %q", info.Type), Remedy: "use Republish"}
		}
	case Auto:
		info, err := queue(ctx)
		if err != nil {
			return 0, err
		}
		switch {
		case info.Type == "quorum" && s.Broker.AtLeast(nativeSince[0], nativeSince[1]):
			return Native, nil
		case info.Type == "quorum" && info.Arguments["x-dead-letter-exchange"] == pl.names.DeadLetterExchange && info.Arguments["x-dead-letter-routing-key"] == s.Queue:
			return DeadLetter, nil
		}
		return Republish, nil
	}
	return pl.strategy, nil
}
