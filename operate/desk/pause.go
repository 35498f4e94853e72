package desk

import (
	"context"
	"fmt"
	"slices"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
)

// Pause pauses a work queue for all of its workers that use package pause; see [pause.Pause].
func (d *Desk) Pause(ctx context.Context, queue string, cfg pause.PauseConfig) error {
	return pause.Pause(ctx, d.conn, queue, cfg)
}

// Resume ends the pause of a queue; see [pause.Resume].
func (d *Desk) Resume(ctx context.Context, queue string) error {
	return pause.Resume(ctx, d.conn, queue)
}

// Paused returns the pause of a queue; ok is false if it isn't paused. See [pause.Of].
func (d *Desk) Paused(ctx context.Context, queue string) (s pause.State, ok bool, err error) {
	return pause.Of(ctx, d.conn, queue)
}

// PauseGroup pauses all partitions of a group of package partition; see [pause.PauseGroup]. may, if not nil, reports
// whether the caller may pause a partition by its queue. Unless that holds for all of them, nothing is changed, and the
// error is declare.ErrNotFound.
func (d *Desk) PauseGroup(ctx context.Context, group string, cfg pause.PauseConfig, may func(queue string) bool) error {
	if err := d.mayPause(ctx, group, may); err != nil {
		return err
	}
	return pause.PauseGroup(ctx, d.conn, group, cfg)
}

// ResumeGroup ends the pause of a group. may is that of PauseGroup.
func (d *Desk) ResumeGroup(ctx context.Context, group string, may func(queue string) bool) error {
	if err := d.mayPause(ctx, group, may); err != nil {
		return err
	}
	return pause.ResumeGroup(ctx, d.conn, group)
}

// PausedGroup returns the pause of a group; ok is false if it isn't paused. See [pause.OfGroup].
func (d *Desk) PausedGroup(ctx context.Context, group string) (s pause.State, ok bool, err error) {
	return pause.OfGroup(ctx, d.conn, group)
}

func (d *Desk) mayPause(ctx context.Context, group string, may func(queue string) bool) error {
	if may == nil {
		return nil
	}
	now, _, err := partition.Find(ctx, d.conn, group)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(now.Queues(), func(queue string) bool { return !may(queue) }) {
		return fmt.Errorf("hopback: the partitions of %q: %w", group, declare.ErrNotFound)
	}
	return nil
}
