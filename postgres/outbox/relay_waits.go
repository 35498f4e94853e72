package outbox

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// waits contains the waiting messages: those that the broker didn't accept, until they are tried
// again, and with OrderByKey those to an address that accepts none. With OrderByKey a waiting
// message delays all with its key.
type waits struct {
	mu sync.Mutex
	of map[int64]*wait
}

type wait struct {
	due     time.Time
	pause   time.Duration
	address string
	key     *string
	// tried reports that the broker didn't accept it.
	tried bool
	// alone reports that the broker has closed the session because of it, so it is tried on a
	// separate link.
	alone bool
}

func (w *waits) clear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.of = map[int64]*wait{}
}

// later makes a message wait that the broker didn't accept.
func (w *waits) later(f *failure, first time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.entry(f.rec)
	e.tried, e.alone = true, f.alone
	e.pause = min(max(2*e.pause, first), max(maxRetry, first))
	e.due = time.Now().Add(e.pause)
}

// park makes an untried message wait, unless it waits already.
func (w *waits) park(rec *record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.entry(rec)
	e.tried = e.tried || rec.failedFor != nil
}

// entry is called with mu held.
func (w *waits) entry(rec *record) *wait {
	e := w.of[rec.id]
	if e == nil {
		e = &wait{address: rec.address, key: rec.key, due: time.Now()}
		w.of[rec.id] = e
	}
	return e
}

func (w *waits) forget(ids ...int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		delete(w.of, id)
	}
}

// alone reports whether a message is to be tried on a separate link.
func (w *waits) alone(id int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.of[id]
	return e != nil && e.alone
}

// release stops the wait of the messages to an address that accepts messages again.
func (w *waits) release(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, e := range w.of {
		switch {
		case e.address != address || e.alone:
		case e.tried:
			e.due, e.pause = time.Now(), 0
		default:
			delete(w.of, id)
		}
	}
}

// held returns the ids of messages without a key that wait, and the keys of the others.
func (w *waits) held() (ids []int64, keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids, keys = []int64{}, []string{}
	for id, e := range w.of {
		if e.key == nil {
			ids = append(ids, id)
		} else {
			keys = append(keys, *e.key)
		}
	}
	return ids, keys
}

// gated makes the messages to an address wait for that address, and no longer for a separate
// link.
func (w *waits) gated(address string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.of {
		if e.address == address {
			e.alone = false
		}
	}
}

// due returns up to n messages that have waited long enough, the longest first. Of those to an
// address in gates it includes at most one, and none if the address is closed: one that wasn't
// tried yet, if there is one.
func (w *waits) due(n int, gates map[string]gateState) []int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	type candidate struct {
		due time.Time
		id  int64
	}
	var list []candidate
	ones := map[string]int64{}
	for id, e := range w.of {
		switch is, gated := gates[e.address]; {
		case e.alone || !gated:
			if !now.Before(e.due) {
				list = append(list, candidate{e.due, id})
			}
		case is == gateAjar:
			if other, has := ones[e.address]; !has || w.before(id, other) {
				ones[e.address] = id
			}
		}
	}
	slices.SortFunc(list, func(a, b candidate) int { return cmp.Or(a.due.Compare(b.due), cmp.Compare(a.id, b.id)) })
	ids := []int64{}
	for _, c := range list[:min(n, len(list))] {
		ids = append(ids, c.id)
	}
	for _, id := range ones {
		ids = append(ids, id)
	}
	return ids
}

// before reports which of two messages to the same address is tried first.
func (w *waits) before(a, b int64) bool {
	x, y := w.of[a], w.of[b]
	if x.tried != y.tried {
		return !x.tried
	}
	return cmp.Or(x.due.Compare(y.due), cmp.Compare(a, b)) < 0
}

// waiting returns the ids that aren't due. It forgets those that have been due for long:
// another relay has published them.
func (w *waits) waiting() []int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	ids := []int64{}
	for id, e := range w.of {
		switch {
		case now.Before(e.due):
			ids = append(ids, id)
		case now.Sub(e.due) > 2*maxRetry && !e.alone:
			delete(w.of, id)
		}
	}
	return ids
}
