package dedupe

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/middleware/internal/lru"
)

// State is what a Store knows of a message. The zero value, "", is none of the
// states: it is an error, so a Store that forgets to set one loses no message.
type State string

const (
	// Claimed: the caller is to handle the message.
	StateClaimed State = "claimed"
	// Busy: another owner has claimed the message, and neither handled nor released it.
	StateBusy State = "busy"
	// Done: the message was handled.
	StateDone State = "done"
)

// Store remembers which messages are being handled and which are done. Each method must
// be atomic: many goroutines call them at once, and many processes those of a shared
// Store. The ctx of a call ends after 5 seconds at most.
//
// Package redisstore has one on Redis. It holds one value for each key, the owner or a word
// for done:
//
//	Claim    SET key owner NX PX lease; if that set nothing, GET key: Done, or else Busy
//	Renew    a script: if GET key is owner, PEXPIRE key lease
//	Done     SET key done PX ttl
//	Release  a script: if GET key is owner, DEL key
type Store interface {
	// Claim reserves key for owner for the time lease and returns Claimed. It returns
	// Done if the message was handled, and Busy while another owner's lease lasts.
	Claim(ctx context.Context, key, owner string, lease time.Duration) (State, error)
	// Renew extends owner's claim to lease from now. It returns false if the claim isn't
	// owner's any more.
	Renew(ctx context.Context, key, owner string, lease time.Duration) (bool, error)
	// Done marks key as done for ttl, whoever has claimed it: the message was handled,
	// even if owner's claim expired before.
	Done(ctx context.Context, key, owner string, ttl time.Duration) error
	// Release ends owner's claim. It does nothing if the claim isn't owner's any more.
	Release(ctx context.Context, key, owner string) error
}

// Memory is a Store for one process.
type Memory struct {
	mu sync.Mutex
	// claims are as many as handlers run, and never dropped for want of room.
	claims map[string]lease
	// done is until when a key is done.
	done *lru.Map[string, time.Time]
}

type lease struct {
	owner string
	until time.Time
}

// NewMemory returns a Memory that remembers up to size done messages, and forgets the
// least recently used first. A size of 0 or less means 100,000.
func NewMemory(size int) *Memory {
	if size <= 0 {
		size = defaultSize
	}
	return &Memory{claims: map[string]lease{}, done: lru.New[string, time.Time](size)}
}

// Claim implements Store.
func (m *Memory) Claim(_ context.Context, key, owner string, d time.Duration) (State, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if until, ok := m.done.Get(key); ok {
		if now.Before(until) {
			return StateDone, nil
		}
		m.done.Delete(key)
	}
	if l, ok := m.claims[key]; ok && now.Before(l.until) && l.owner != owner {
		return StateBusy, nil
	}
	m.claims[key] = lease{owner, now.Add(d)}
	return StateClaimed, nil
}

// Renew implements Store.
func (m *Memory) Renew(_ context.Context, key, owner string, d time.Duration) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	l, ok := m.claims[key]
	if !ok || l.owner != owner || !now.Before(l.until) {
		return false, nil
	}
	m.claims[key] = lease{owner, now.Add(d)}
	return true, nil
}

// Done implements Store.
func (m *Memory) Done(_ context.Context, key, _ string, ttl time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.claims, key)
	m.done.Put(key, time.Now().Add(ttl))
	return nil
}

// Release implements Store.
func (m *Memory) Release(_ context.Context, key, owner string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.claims[key].owner == owner {
		delete(m.claims, key)
	}
	return nil
}
