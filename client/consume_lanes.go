package client

import "sync"

// lanes hands over deliveries of one key one at a time, in the order in which the
// broker has delivered them, and others at once. Those that wait are here and not
// with a worker, so that a busy key takes one slot only. There are never more of
// them than Prefetch.
type lanes struct {
	// key names a delivery's lane. Without it there are none.
	key func(*Delivery) (string, bool)
	// run hands a delivery to the workers.
	run func(*Delivery)

	mu      sync.Mutex
	waiting map[string][]*Delivery // a lane that is in use has an entry
}

// admit hands d on now or later.
func (l *lanes) admit(d *Delivery) {
	if l.key == nil {
		l.run(d)
		return
	}
	key, ok := l.keyOf(d)
	if !ok {
		l.run(d)
		return
	}
	l.mu.Lock()
	queue, busy := l.waiting[key]
	if busy {
		l.waiting[key] = append(queue, d)
		l.mu.Unlock()
		return
	}
	if l.waiting == nil {
		l.waiting = map[string][]*Delivery{}
	}
	l.waiting[key] = nil
	d.lane = &key
	l.mu.Unlock()
	l.run(d)
}

// keyOf guards the goroutine that receives from a key that panics.
func (l *lanes) keyOf(d *Delivery) (key string, ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	return l.key(d)
}

// next is told that no handler will be called for d any more; more than once does
// no harm.
func (l *lanes) next(d *Delivery) {
	if l.key == nil {
		return
	}
	l.mu.Lock()
	if d.lane == nil {
		l.mu.Unlock()
		return
	}
	key := *d.lane
	d.lane = nil
	queue := l.waiting[key]
	if len(queue) == 0 {
		delete(l.waiting, key)
		l.mu.Unlock()
		return
	}
	first := queue[0]
	queue[0] = nil
	l.waiting[key] = queue[1:]
	first.lane = &key
	l.mu.Unlock()
	l.run(first)
}

// empty returns those that wait for a handler that runs, for giving them back.
func (l *lanes) empty() []*Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []*Delivery
	for key, queue := range l.waiting {
		all = append(all, queue...)
		l.waiting[key] = nil
	}
	return all
}
