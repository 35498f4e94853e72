package stream

import (
	"context"
	"sync"
)

// OffsetStore stores the positions of consumers. A position is the offset of the next message:
// all before it are handled. See [MemoryStore], [FileStore], and package postgres/offset.
//
//   - It must be safe for concurrent use by several consumers.
//   - Consume makes one call of Save at a time, with increasing positions.
//   - Two processes with the same consumer name each handle every message.
type OffsetStore interface {
	// Load returns the position. found is false if none is saved.
	Load(ctx context.Context, consumer, stream string) (next uint64, found bool, err error)
	// Save stores the position, and returns nil when that is as durable as the store makes it.
	Save(ctx context.Context, consumer, stream string, next uint64) error
}

// MarkStore is an [OffsetStore] that also stores marks. A mark identifies a message that the consumer
// has handled. By it, Consume notices that a stream was deleted and declared again, and has grown past
// the position: see [PositionError]. All stores of this module are MarkStores.
//
// The mark is compared with the message at its offset. If retention has removed that, or if both
// streams have equal messages there, with the same message-id, nothing is noticed.
type MarkStore interface {
	OffsetStore
	// LoadMark returns the mark that was saved last, or "". Deleting a position deletes its mark.
	LoadMark(ctx context.Context, consumer, stream string) (mark string, err error)
	// SaveMark stores a mark, which has at most 64 bytes. Consume calls it after Save, about once a
	// minute.
	SaveMark(ctx context.Context, consumer, stream, mark string) error
}

// MemoryStore stores positions in memory, for tests: they are lost with the process. The zero
// value is empty. It is safe for concurrent use.
type MemoryStore struct {
	mu        sync.Mutex
	positions map[position]uint64
	marks     map[position]string
}

type position struct{ consumer, stream string }

var _ MarkStore = (*MemoryStore)(nil)

// Load returns the position that was saved last.
func (s *MemoryStore) Load(_ context.Context, consumer, stream string) (uint64, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, ok := s.positions[position{consumer, stream}]
	return next, ok, nil
}

// Save stores the position.
func (s *MemoryStore) Save(_ context.Context, consumer, stream string, next uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.positions == nil {
		s.positions = map[position]uint64{}
	}
	s.positions[position{consumer, stream}] = next
	return nil
}

// LoadMark returns the mark that was saved last.
func (s *MemoryStore) LoadMark(_ context.Context, consumer, stream string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.marks[position{consumer, stream}], nil
}

// SaveMark stores the mark.
func (s *MemoryStore) SaveMark(_ context.Context, consumer, stream, mark string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.marks == nil {
		s.marks = map[position]string{}
	}
	s.marks[position{consumer, stream}] = mark
	return nil
}

// Delete deletes the position and the mark, so that the consumer starts at Config.From again.
func (s *MemoryStore) Delete(_ context.Context, consumer, stream string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.positions, position{consumer, stream})
	delete(s.marks, position{consumer, stream})
	return nil
}
