package partition

import (
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
)

// Unpausable reports whether d is a marker of Reshard. Those don't wait while the worker is paused, so that it finishes
// partitions that are empty.
func (p *part) Unpausable(d *client.Delivery) bool {
	_, _, marker := markerOf(d)
	return marker
}

// admitted returns nil if the handler may be called, now that it has what it waited for: the worker may have been
// paused since.
func (h handler) admitted(again *inside.Again, was attempts) error {
	if !h.of.control.Paused() {
		return nil
	}
	kept := inside.Again{Delay: heldPause, Retries: was.retries, State: was}
	if again != nil {
		kept.Annotations = again.Annotations
	}
	return &kept
}
