package client

import (
	"context"
	"slices"
	"sync"

	"github.com/Azure/go-amqp"
)

// budget bounds how many bytes of messages a sender holds. Who comes first is served
// first, so that small messages don't starve a large one; a message over the limit
// is taken when there is nothing else. A nil budget has no bound.
type budget struct {
	limit int64

	mu      sync.Mutex
	used    int64
	waiting []*share
}

// share is what somebody waits for.
type share struct {
	n     int64
	taken chan struct{}
}

func newBudget(limit int64) *budget {
	if limit <= 0 {
		return nil
	}
	return &budget{limit: limit}
}

// size is what a message takes of the budget.
func (b *budget) size(m *amqp.Message) int64 {
	if b == nil {
		return 0
	}
	return min(sizeOf(m), b.limit)
}

// take waits until there are n bytes, within ctx and as long as done isn't closed.
func (b *budget) take(ctx context.Context, done <-chan struct{}, n int64) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	if len(b.waiting) == 0 && b.used+n <= b.limit {
		b.used += n
		b.mu.Unlock()
		return true
	}
	s := &share{n, make(chan struct{})}
	b.waiting = append(b.waiting, s)
	b.mu.Unlock()
	select {
	case <-s.taken:
		return true
	case <-ctx.Done():
	case <-done:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.Index(b.waiting, s); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
	} else {
		b.used -= n // it was taken just now
	}
	b.serve()
	return false
}

// give returns n bytes.
func (b *budget) give(n int64) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	b.serve()
}

// serve is called with mu held.
func (b *budget) serve() {
	for len(b.waiting) > 0 && b.used+b.waiting[0].n <= b.limit {
		b.used += b.waiting[0].n
		close(b.waiting[0].taken)
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
	}
}

// messageOverhead is roughly how many bytes a message takes in addition to its body.
const messageOverhead = 512

// sizeOf is roughly how many bytes m takes, in memory and encoded. It visits
// values as Validate does, which has passed them.
func sizeOf(m *amqp.Message) int64 {
	n := int64(messageOverhead)
	for _, d := range m.Data {
		n += int64(len(d))
	}
	if m.Value != nil {
		n += sizeOfValue(m.Value)
	}
	for _, seq := range m.Sequence {
		n += sizeOfValue(seq)
	}
	for k, v := range m.ApplicationProperties {
		n += int64(len(k)) + sizeOfValue(v)
	}
	for _, a := range []map[any]any{m.Annotations, m.DeliveryAnnotations, m.Footer} {
		for _, v := range a {
			n += 32 + sizeOfValue(v)
		}
	}
	return n
}

func sizeOfValue(v any) int64 {
	const scalar = 16
	n := int64(scalar)
	switch v := v.(type) {
	case string:
		n += int64(len(v))
	case []byte:
		n += int64(len(v))
	case []any:
		for _, e := range v {
			n += sizeOfValue(e)
		}
	case map[string]any:
		for k, e := range v {
			n += int64(len(k)) + sizeOfValue(e)
		}
	case map[any]any:
		for k, e := range v {
			n += sizeOfValue(k) + sizeOfValue(e)
		}
	case [][]byte:
		for _, e := range v {
			n += int64(len(e)) + scalar
		}
	case []string:
		for _, e := range v {
			n += int64(len(e)) + scalar
		}
	case []int64:
		n += 8 * int64(len(v))
	case []uint64:
		n += 8 * int64(len(v))
	case []float64:
		n += 8 * int64(len(v))
	}
	return n
}
