package desk

import (
	"context"

	"github.com/hopback/hopback/middleware/live"
)

// Workers asks the workers that use package live what they do; see [live.Ask].
func (d *Desk) Workers(ctx context.Context) (live.Fleet, error) { return live.Ask(ctx, d.conn) }
