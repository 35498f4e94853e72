package desk

import (
	"context"

	"github.com/hopback/hopback/middleware/live"
)

// liveQueues start the names of package live's queues: one for each worker, which a survey leaves out.
const liveQueues = "hopback.workers."

// Workers asks the workers that use package live what they do; see [live.Ask].
func (d *Desk) Workers(ctx context.Context) (live.Fleet, error) { return live.Ask(ctx, d.conn) }
