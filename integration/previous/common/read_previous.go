//go:build previous

package common

import (
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// DeadLetterOf reads a dead letter by the names that the previous revision has.
func DeadLetterOf(m *client.Message) DeadLetter {
	d := retry.DeathOf(m)
	return DeadLetter{
		Body: string(m.GetData()), Queue: d.Queue, Exchange: d.Exchange, RoutingKey: d.RoutingKey, Reason: string(d.Reason), Error: d.Error,
		Worker: d.Worker, Retries: d.Retries, Ordered: !d.FirstFailure.IsZero() && !d.FirstFailure.After(d.LastFailure),
	}
}
