package engine

// ring is a queue in an array that grows and, once it is empty, is let go if it was large.
type ring[T any] struct {
	buf     []T
	head, n int
}

func (r *ring[T]) len() int { return r.n }

func (r *ring[T]) slot(i int) *T { return &r.buf[(r.head+i)&(len(r.buf)-1)] }

func (r *ring[T]) at(i int) T { return *r.slot(i) }

func (r *ring[T]) grow() {
	if r.n < len(r.buf) {
		return
	}
	buf := make([]T, max(8, 2*len(r.buf)))
	for i := range r.n {
		buf[i] = r.at(i)
	}
	r.buf, r.head = buf, 0
}

func (r *ring[T]) push(v T) {
	r.grow()
	r.n++
	*r.slot(r.n - 1) = v
}

func (r *ring[T]) pushFront(v T) {
	r.grow()
	r.head = (r.head - 1) & (len(r.buf) - 1)
	r.n++
	r.buf[r.head] = v
}

func (r *ring[T]) pop() T {
	var zero T
	v := r.buf[r.head]
	r.buf[r.head] = zero
	r.head = (r.head + 1) & (len(r.buf) - 1)
	if r.n--; r.n == 0 && len(r.buf) > 4096 {
		*r = ring[T]{}
	}
	return v
}

// insert puts v behind i others.
func (r *ring[T]) insert(i int, v T) {
	r.pushFront(v)
	for j := range i {
		*r.slot(j), *r.slot(j + 1) = *r.slot(j + 1), *r.slot(j)
	}
}
