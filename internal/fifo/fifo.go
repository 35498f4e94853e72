// Package fifo has a queue whose memory is bounded by what waits in it.
package fifo

// Queue is a queue in a slice. Its zero value is empty. It isn't safe for concurrent use.
//
// It takes room for at most four times as many values as have waited at once, also if it's never
// empty. A large one that becomes empty gives its room back.
type Queue[T any] struct {
	all  []T
	head int // the index of the first
}

// keep is how many values an empty queue keeps room for.
const keep = 4096

// Len is how many values wait.
func (q *Queue[T]) Len() int { return len(q.all) - q.head }

// Cap is how many values there is room for.
func (q *Queue[T]) Cap() int { return cap(q.all) }

// All returns the values that wait, in order. The slice is valid until the queue changes.
func (q *Queue[T]) All() []T { return q.all[q.head:] }

// Push adds v behind the others.
func (q *Queue[T]) Push(v T) {
	if len(q.all) == cap(q.all) && q.head > len(q.all)/2 {
		n := copy(q.all, q.all[q.head:])
		clear(q.all[n:])
		q.all, q.head = q.all[:n], 0
	}
	q.all = append(q.all, v)
}

// Pop removes the first, and returns it; the zero value if there is none.
func (q *Queue[T]) Pop() (v T) {
	if q.Len() == 0 {
		return v
	}
	var none T
	v, q.all[q.head] = q.all[q.head], none
	q.head++
	q.rewind()
	return v
}

// Remove removes the value at an index of All.
func (q *Queue[T]) Remove(i int) {
	i += q.head
	copy(q.all[i:], q.all[i+1:])
	clear(q.all[len(q.all)-1:])
	q.all = q.all[:len(q.all)-1]
	q.rewind()
}

func (q *Queue[T]) rewind() {
	switch {
	case q.Len() > 0:
	case cap(q.all) > keep:
		*q = Queue[T]{}
	default:
		q.all, q.head = q.all[:0], 0
	}
}
