package desk

import (
	"context"
	"fmt"
	"slices"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/partition"
)

// Partitions returns the owner of each partition of a group, and how many messages wait in it. It asks
// the workers over a queue that it declares and deletes, so it needs a worker's permissions. see, if not
// nil, reports whether the caller may see a partition's queue. If it may see none, nobody is asked, and
// the error is declare.ErrNotFound. Other errors are those of [partition.Find] and [partition.Inspect].
func (d *Desk) Partitions(ctx context.Context, group string, see func(queue string) bool) ([]partition.State, error) {
	now, _, err := partition.Find(ctx, d.conn, group)
	if err != nil {
		return nil, err
	}
	if see != nil && !slices.ContainsFunc(now.Queues(), see) {
		return nil, fmt.Errorf("hopback: the partitions of %q: %w", group, declare.ErrNotFound)
	}
	all, err := partition.Inspect(ctx, d.conn, now)
	if see != nil {
		all = slices.DeleteFunc(all, func(s partition.State) bool { return !see(s.Queue) })
	}
	return all, err
}
