// Package lru is a map of bounded size that forgets what was least recently used.
package lru

// Map holds at most a fixed number of keys. It isn't safe for concurrent use:
// its users have a lock anyway, over more than the map.
type Map[K comparable, V any] struct {
	size    int
	entries map[K]*entry[K, V]
	// root closes the ring of entries: root.next was used last, root.prev is
	// forgotten next.
	root entry[K, V]
}

type entry[K comparable, V any] struct {
	key        K
	value      V
	prev, next *entry[K, V]
}

// New returns an empty Map for size keys, at least one.
func New[K comparable, V any](size int) *Map[K, V] {
	m := &Map[K, V]{size: max(size, 1), entries: map[K]*entry[K, V]{}}
	m.root.prev, m.root.next = &m.root, &m.root
	return m
}

// Get returns key's value, and counts as a use of it.
func (m *Map[K, V]) Get(key K) (value V, ok bool) {
	e, ok := m.entries[key]
	if !ok {
		return value, false
	}
	e.unlink()
	m.pushFront(e)
	return e.value, true
}

// Put sets key's value, which is a use, and forgets another key if there are too
// many.
func (m *Map[K, V]) Put(key K, value V) {
	if e, ok := m.entries[key]; ok {
		e.value = value
		e.unlink()
		m.pushFront(e)
		return
	}
	if len(m.entries) >= m.size {
		oldest := m.root.prev
		oldest.unlink()
		delete(m.entries, oldest.key)
	}
	e := &entry[K, V]{key: key, value: value}
	m.entries[key] = e
	m.pushFront(e)
}

// Delete removes key.
func (m *Map[K, V]) Delete(key K) {
	if e, ok := m.entries[key]; ok {
		e.unlink()
		delete(m.entries, key)
	}
}

// Len is how many keys there are.
func (m *Map[K, V]) Len() int { return len(m.entries) }

func (m *Map[K, V]) pushFront(e *entry[K, V]) {
	e.prev, e.next = &m.root, m.root.next
	e.prev.next, e.next.prev = e, e
}

func (e *entry[K, V]) unlink() { e.prev.next, e.next.prev = e.next, e.prev }
