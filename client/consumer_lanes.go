package client

import perkey "github.com/hopback/hopback/internal/lanes"

// lanes hands over deliveries of one key one at a time, in the order in which the
// broker has delivered them, and others at once. Those that wait are here and not
// with a worker, so that a busy key takes one slot only. There are never more of
// them than Prefetch. linkSession.mu guards it.
type lanes struct {
	byName perkey.Lanes[string, *delivery]
}

// admit says whether to hand d on now. Otherwise next returns it later.
func (l *lanes) admit(d *delivery) (now bool) {
	if d.key == nil {
		return true
	}
	if !l.byName.Claim(*d.key) {
		l.byName.Wait(*d.key, d, nil)
		return false
	}
	d.lane = d.key
	return true
}

// keyed notes d's key.
func (d *delivery) keyed() {
	if key, ok := d.laneKey(); ok {
		d.key = &key
	}
}

// next is called when no handler will be called for d any more. It returns the delivery to hand on instead, or none. Calling it more than once does no harm.
func (l *lanes) next(d *delivery) (now *delivery) {
	if d.lane == nil {
		return nil
	}
	lane := d.lane
	d.lane = nil
	first, ok := l.byName.Leave(*lane)
	if ok {
		first.lane = lane
	}
	return first
}

// empty returns those that wait for a handler that runs, for giving them back.
func (l *lanes) empty() []*delivery { return l.byName.Empty() }

// count is how many wait.
func (l *lanes) count() (n int) {
	l.byName.Waiting(func(queue []*delivery) { n += countUnsettled(queue) })
	return n
}
