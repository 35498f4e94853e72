package consume

import "sync"

// leases finds the deliveries that the broker takes back by their ids. A nil *leases keeps
// none.
type leases struct {
	mu   sync.Mutex
	byID map[uint32]*Delivery
}

func (l *leases) begin(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byID[d.id] = d
}

func (l *leases) end(d *Delivery) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID[d.id] == d {
		delete(l.byID, d.id)
	}
}

// takenBack ends the leases of the deliveries from first to last, and returns those that
// there are.
func (l *leases) takenBack(first, last uint32) (all []*Delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if first == last { // mostly
		if d := l.byID[first]; d != nil {
			delete(l.byID, first)
			all = append(all, d)
		}
		return all
	}
	for id, d := range l.byID { // ids wrap
		if id-first <= last-first {
			delete(l.byID, id)
			all = append(all, d)
		}
	}
	return all
}
