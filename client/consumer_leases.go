package client

// leases finds the deliveries that the broker revokes by their ids. A nil map keeps none.
// linkSession.mu guards it.
type leases map[uint32]*delivery

func (l leases) begin(d *delivery) {
	if l != nil {
		l[d.id] = d
	}
}

func (l leases) end(d *delivery) {
	if l[d.id] == d {
		delete(l, d.id)
	}
}

// revoked ends the leases of the deliveries from first to last, and returns those that
// there are.
func (l leases) revoked(first, last uint32) (all []*delivery) {
	if first == last { // mostly
		if d := l[first]; d != nil {
			delete(l, first)
			all = append(all, d)
		}
		return all
	}
	for id, d := range l { // ids wrap
		if id-first <= last-first {
			delete(l, id)
			all = append(all, d)
		}
	}
	return all
}
