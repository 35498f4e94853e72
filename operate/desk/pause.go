package desk

import (
	"context"

	"github.com/hopback/hopback/middleware/pause"
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
