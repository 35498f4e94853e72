package desk

import (
	"context"

	"github.com/hopback/hopback/middleware/live"
)

// liveQueues start the names of package live's queues: one for each worker, which a survey leaves out.
const liveQueues = "hopback.workers."

// Workers asks the workers that use package live what they do; see [live.Ask].
func (d *Desk) Workers(ctx context.Context) (live.Fleet, error) { return live.Ask(ctx, d.conn) }

// WatchWorkers calls show with that about every 2 s until ctx ends; see [live.Watch].
func (d *Desk) WatchWorkers(ctx context.Context, show func(live.Fleet)) error {
	return live.Watch(ctx, d.conn, show)
}
