package engine

// ready has the messages of a queue that may be delivered, in the order in which they
// will be.
type ready struct {
	// returned come before all others, in the order of their return.
	returned ring[*entry]
	// buckets are by priority. RabbitMQ 4.0 has two in a quorum queue.
	buckets []ring[*entry]
	n       int
	top     int // no bucket above it has anything
	// two is for RabbitMQ 4.0: of three messages the third is a normal one.
	two     bool
	counter int
	// classic queues return a requeued message to its old position.
	classic bool
}

func newReady(kind string, newer bool, maxPriority int) ready {
	switch {
	case kind == typeQuorum && newer:
		return ready{buckets: make([]ring[*entry], 32)}
	case kind == typeQuorum:
		return ready{buckets: make([]ring[*entry], 2), two: true}
	}
	return ready{buckets: make([]ring[*entry], maxPriority+1), classic: true}
}

// defaultPriority is that of a message which has none.
const defaultPriority = 4

func (r *ready) bucket(m *message) int {
	p := int(m.priority)
	switch {
	case r.two:
		if p > defaultPriority {
			return 1
		}
		return 0
	case r.classic:
		return max(0, min(p, len(r.buckets)-1))
	case p < 0:
		return defaultPriority
	}
	return min(p, len(r.buckets)-1)
}

func (r *ready) push(e *entry) {
	i := r.bucket(e.msg)
	r.buckets[i].push(e)
	r.top = max(r.top, i)
	r.n++
}

// requeue puts back what was delivered.
func (r *ready) requeue(e *entry) {
	if !r.classic {
		r.returned.push(e)
		r.n++
		return
	}
	i := r.bucket(e.msg)
	b := &r.buckets[i]
	at := 0
	for at < b.len() && b.at(at).index < e.index {
		at++
	}
	b.insert(at, e)
	r.top = max(r.top, i)
	r.n++
}

// source is the ring that the next message is taken from; n is not 0.
func (r *ready) source() *ring[*entry] {
	if r.returned.len() > 0 {
		return &r.returned
	}
	for r.buckets[r.top].len() == 0 {
		r.top--
	}
	high := &r.buckets[r.top]
	if r.two && r.top == 1 && r.counter == 2 && r.buckets[0].len() > 0 && high.at(0).index > r.buckets[0].at(0).index {
		return &r.buckets[0]
	}
	return high
}

func (r *ready) peek() *entry { return r.source().at(0) }

func (r *ready) pop() *entry {
	from := r.source()
	if r.two && from != &r.returned {
		if r.counter++; r.counter > 2 {
			r.counter = 0
		}
	}
	r.n--
	return from.pop()
}

// all calls f with each message, in the order of delivery if priorities are left out.
func (r *ready) all(f func(*entry)) {
	for i := range r.returned.len() {
		f(r.returned.at(i))
	}
	for i := len(r.buckets) - 1; i >= 0; i-- {
		for j := range r.buckets[i].len() {
			f(r.buckets[i].at(j))
		}
	}
}

// heads calls f with the first message of each ring.
func (r *ready) heads(f func(*entry)) {
	if r.returned.len() > 0 {
		f(r.returned.at(0))
	}
	for i := range r.buckets {
		if r.buckets[i].len() > 0 {
			f(r.buckets[i].at(0))
		}
	}
}
