package client

import (
	"sync"
)

// leases finds the deliveries that the broker takes back by their tags. A nil
// *leases keeps none.
type leases struct {
	mu    sync.Mutex
	byTag map[tag]*Delivery
}

// tag is a delivery tag as a key that needn't be allocated. AMQP's have 32 bytes at
// the most.
type tag struct {
	n     uint8
	bytes [32]byte
}

func tagOf(b []byte) (t tag) {
	t.n = uint8(copy(t.bytes[:], b))
	return t
}

func (l *leases) begin(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byTag[tagOf(d.message.DeliveryTag)] = d
}

func (l *leases) end(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t := tagOf(d.message.DeliveryTag); l.byTag[t] == d {
		delete(l.byTag, t)
	}
}

// takenBack ends the lease of the delivery with this tag, and returns the delivery; nil if
// there is none.
func (l *leases) takenBack(b []byte) *Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := tagOf(b)
	d := l.byTag[t]
	delete(l.byTag, t)
	return d
}
