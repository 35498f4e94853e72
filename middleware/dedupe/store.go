package dedupe

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/middleware/internal/lru"
)

// State is what a [Store] knows about a message. The zero value, "", isn't a valid state but an
// error, so a Store that forgets to set a state loses no message.
type State string

const (
	// StateClaimed: the caller now holds the claim and handles the message.
	StateClaimed State = "claimed"
	// StateBusy: another owner holds the claim.
	StateBusy State = "busy"
	// StateDone: the message was handled.
	StateDone State = "done"
)

// Store remembers which messages are being handled and which are done. Implement it to share
// them between processes, or use [Memory] for one process and package redisstore for Redis. Each
// method must be atomic and safe for concurrent use, also across processes if they share the
// Store. The ctx of a call ends after 5 seconds at most.
//
// Package redisstore holds one value per key, the owner or the word for done:
//
//	Claim    SET key owner NX PX lease; if that set nothing, GET key: Done, or else Busy
//	Renew    a script: if GET key is owner, PEXPIRE key lease
//	Done     SET key done PX ttl
//	Release  a script: if GET key is owner, DEL key
type Store interface {
	// Claim reserves key for owner for the time lease, and returns [StateClaimed]. It returns
	// [StateDone] if the message was handled, and [StateBusy] while another owner's lease lasts.
	Claim(ctx context.Context, key, owner string, lease time.Duration) (State, error)
	// Renew extends owner's claim to lease from now. It returns false if owner no longer holds
	// the claim.
	Renew(ctx context.Context, key, owner string, lease time.Duration) (bool, error)
	// Done marks key as done for ttl, even if another owner holds the claim now: the message was
	// handled, and owner's claim may have expired before.
	Done(ctx context.Context, key, owner string, ttl time.Duration) error
	// Release ends owner's claim. It does nothing if owner no longer holds the claim.
	Release(ctx context.Context, key, owner string) error
}

// Memory is a [Store] in the memory of one process. Create it with [NewMemory].
type Memory struct {
	mu sync.Mutex
	// claims has one entry per running handler. Entries are never dropped for lack of space.
	claims map[string]lease
	// done has the time until which a key counts as done.
	done *lru.Map[string, time.Time]
}

type lease struct {
	owner string
	until time.Time
}

// NewMemory returns a [Memory] that remembers up to size done messages, and forgets the least
// recently used first. A size of 0 or less means 100,000.
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
