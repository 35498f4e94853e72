package partition

import (
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/publish"
)

// A marker is a message that Reshard puts into a partition. When its worker has it and nothing
// before it is unsettled, the worker reports its ID in a beat.

// markerKey is the annotation with a marker's ID.
const markerKey = "x-opt-hopback-marker"

// markerLane is the key of markers; no routing key begins with a line break.
const markerLane = "\n"

const maxMarker = 64

func markerOf(m *client.Message) (id string, ok bool) {
	id, ok = m.Annotations[markerKey].(string)
	return id, ok && len(id) <= maxMarker
}

// key is the key of a delivery's lane. It is called as the delivery comes.
func (p *part) key(d *client.Delivery) string {
	if _, ok := markerOf(d.Message()); ok {
		p.markers.Add(1)
		return markerLane
	}
	if h := d.Message().Header; h != nil && (h.TTL > 0 || h.Priority != ordinary) && p.warned.CompareAndSwap(false, true) {
		p.of.log.Warn("hopback: a message has a priority or a ttl; the order of its key isn't kept", "queue", p.queue, "message_id", publish.MessageID(d.Message()), "priority", h.Priority, "ttl", h.TTL)
	}
	return p.of.cfg.Key(d)
}

// ordinary is the priority of a message that was published without one.
const ordinary = 4

// markerPause is between two looks whether all before a marker is settled.
const markerPause = 20 * time.Millisecond

// marked handles a marker.
func (p *part) marked(id string) error {
	turn := p.current.Load()
	if turn == nil || (*turn).Unsettled() > int(p.markers.Load()) {
		return &inside.Again{Delay: markerPause}
	}
	p.markers.Add(-1)
	p.of.do(func() {
		p.of.drained = append(p.of.drained, id)
		p.of.report(false)
	})
	return nil
}
