package desk

import (
	"context"

	"github.com/hopback/hopback/partition"
)

// Partitions returns the owner of each partition of a group, and how many messages wait in it. It asks
// the workers over a queue that it declares and deletes, so it needs a worker's permissions. The errors
// are those of [partition.Find] and [partition.Inspect].
func (d *Desk) Partitions(ctx context.Context, group string) ([]partition.State, error) {
	now, _, err := partition.Find(ctx, d.conn, group)
	if err != nil {
		return nil, err
	}
	return partition.Inspect(ctx, d.conn, now)
}
