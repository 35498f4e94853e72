package stream

import (
	"context"
	"sync"
)

// OffsetStore keeps the positions of consumers. A position is the offset of the message
// that comes next: all before it are handled.
//
// Consume calls Save one at a time, with positions that only grow. A store must be safe
// for concurrent use by several consumers. Two processes with the same consumer name each
// handle every message.
type OffsetStore interface {
	// Load returns the position, or false if none was saved.
	Load(ctx context.Context, consumer, stream string) (next uint64, found bool, err error)
	// Save returns nil when the position is as safe as the store makes it.
	Save(ctx context.Context, consumer, stream string, next uint64) error
}

// MemoryStore keeps positions in memory: they end with the process. The zero MemoryStore
// is empty. It is safe for concurrent use.
type MemoryStore struct {
	mu        sync.Mutex
	positions map[position]uint64
}

type position struct{ consumer, stream string }

var _ OffsetStore = (*MemoryStore)(nil)

// Load returns the position that was saved last.
func (s *MemoryStore) Load(_ context.Context, consumer, stream string) (uint64, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, ok := s.positions[position{consumer, stream}]
	return next, ok, nil
}

// Save keeps the position.
func (s *MemoryStore) Save(_ context.Context, consumer, stream string, next uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.positions == nil {
		s.positions = map[position]uint64{}
	}
	s.positions[position{consumer, stream}] = next
	return nil
}

// Delete forgets the position.
func (s *MemoryStore) Delete(_ context.Context, consumer, stream string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.positions, position{consumer, stream})
	return nil
}
