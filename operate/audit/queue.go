package audit

import (
	"context"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/rules"
)

// ReadQueue reads one queue from the HTTP API, for when the broker doesn't answer declare.Inspect, as
// during an alarm. The errors are those of r. One for a missing queue matches [declare.ErrNotFound].
func ReadQueue(ctx context.Context, r check.Reader, name string) (declare.QueueInfo, error) {
	var q rules.HTTPQueue
	if err := rules.Get(ctx, r, "/queues/"+address.Escape(r.VHost())+"/"+address.Escape(name), &q); err != nil {
		return declare.QueueInfo{}, err
	}
	return q.Info(), nil
}
