// Package lanes hands things of one key on one at a time, and things of other keys at once.
package lanes

import "slices"

// Lanes has a lane for each key that is in use. Its methods are called with the owner's lock
// held. The zero value is ready to use.
type Lanes[K, V comparable] struct {
	waiting map[K][]V // a lane that is in use has an entry: those that wait, in their order
}

// Claim reports whether key's lane was free, and is in use from now on.
func (l *Lanes[K, V]) Claim(key K) bool {
	if _, busy := l.waiting[key]; busy {
		return false
	}
	if l.waiting == nil {
		l.waiting = map[K][]V{}
	}
	l.waiting[key] = nil
	return true
}

// Wait has v wait in a lane that is in use: behind those that wait already, but for those that
// it goes before. before may be nil.
func (l *Lanes[K, V]) Wait(key K, v V, before func(v, other V) bool) {
	queue := l.waiting[key]
	at := len(queue)
	for before != nil && at > 0 && before(v, queue[at-1]) { // most come in their order
		at--
	}
	l.waiting[key] = slices.Insert(queue, at, v)
}

// Leave ends the turn of the one in the lane. It returns the one whose turn it is now, or
// false if none waits.
func (l *Lanes[K, V]) Leave(key K) (next V, ok bool) {
	queue := l.waiting[key]
	if len(queue) == 0 {
		delete(l.waiting, key)
		return next, false
	}
	next = queue[0]
	clear(queue[:1]) // for the garbage collector: the slice lives on
	l.waiting[key] = queue[1:]
	return next, true
}

// Remove takes v out. It reports false if v doesn't wait.
func (l *Lanes[K, V]) Remove(key K, v V) bool {
	i := slices.Index(l.waiting[key], v)
	if i >= 0 {
		l.waiting[key] = slices.Delete(l.waiting[key], i, i+1)
	}
	return i >= 0
}

// Empty takes out all that wait. Their lanes stay in use.
func (l *Lanes[K, V]) Empty() (all []V) {
	for key, queue := range l.waiting {
		all = append(all, queue...)
		l.waiting[key] = nil
	}
	return all
}

// Behind returns those that wait in key's lane. It is valid until the next call.
func (l *Lanes[K, V]) Behind(key K) []V { return l.waiting[key] }

// Waiting calls f with each lane's.
func (l *Lanes[K, V]) Waiting(f func([]V)) {
	for _, queue := range l.waiting {
		f(queue)
	}
}

// Len is how many lanes are in use.
func (l *Lanes[K, V]) Len() int { return len(l.waiting) }
