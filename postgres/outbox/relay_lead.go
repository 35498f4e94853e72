package outbox

import (
	"context"
	"slices"
	"sync"

	"github.com/hopback/hopback/client"
)

// depth is how many batches of a relay that keeps the order are in flight.
const depth = 2

// lead is a relay that keeps the order of each key. It works while it has the lock.
//
// One read sees all committed messages of a key, in the order of their ids. Reads leave out a key
// while its messages are in flight, or while it waits because one of them failed.
func (r *Relay) lead(ctx context.Context, p *client.Publisher[*client.Message]) error {
	keeping, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer keeping.close()
	// Relays that don't keep the order exclude those that do.
	if err := r.awaitLock(ctx, keeping, "SELECT CASE WHEN pg_try_advisory_xact_lock("+lockOrder+") THEN pg_try_advisory_lock_shared("+lockKeyed+") ELSE false END"); err != nil {
		return err
	}
	held, err := r.awaitLease(ctx, keeping)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var kept sync.WaitGroup
	defer kept.Wait()
	defer cancel(nil)
	kept.Go(func() { cancel(held.keep(ctx)) })
	reading, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer reading.close()
	settling, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer settling.close()
	r.waits.clear()
	l := &leader{r: r, p: p, lease: held, s: reading, settling: settling, ids: map[int64]bool{}, keys: map[string]bool{}, freed: make(chan struct{}, 1), cancel: cancel}
	defer l.batches.Wait()
	defer cancel(nil)
	for {
		n, err := l.batch(ctx)
		if err == nil && n == 0 {
			if l.open() > 0 {
				// The rest may be waiting for what is in flight.
				select {
				case <-l.freed:
				case <-ctx.Done():
				}
			} else {
				err = r.idle(ctx, reading, func() (int, error) { return l.batch(ctx) })
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// leader is one term of lead.
type leader struct {
	r        *Relay
	p        *client.Publisher[*client.Message]
	lease    *lease
	s        *session // for reads
	settling *session
	settle   sync.Mutex // held with settling
	cancel   context.CancelCauseFunc
	batches  sync.WaitGroup
	freed    chan struct{} // a batch is finished
	floor    floor

	mu    sync.Mutex
	under int             // batches in flight
	ids   map[int64]bool  // in flight
	keys  map[string]bool // that must not be read
}

func (l *leader) open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.under
}

// excluded returns what the next read leaves out: what is in flight, and what waits.
func (l *leader) excluded() (ids []int64, keys []string) {
	ids, keys = l.r.waits.held()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.ids {
		ids = append(ids, id)
	}
	for key := range l.keys {
		keys = append(keys, key)
	}
	return ids, keys
}

// batch reads a batch and starts to publish it. It returns how many messages it has read.
func (l *leader) batch(ctx context.Context) (int, error) {
	for l.open() >= depth {
		select {
		case <-l.freed:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	if err := l.r.awaitBroker(ctx, l.p); err != nil {
		return 0, err
	}
	segs, err := l.r.segments.read(ctx, l.s)
	if err != nil {
		return 0, err
	}
	if err := l.floor.rise(ctx, l.s); err != nil {
		return 0, err
	}
	recs, parked, err := l.take(ctx, segs)
	if err != nil || len(recs) == 0 {
		return parked, err
	}
	l.mu.Lock()
	l.under++
	for _, rec := range recs {
		l.ids[rec.id] = true
		if rec.key != nil {
			l.keys[*rec.key] = true
		}
	}
	l.mu.Unlock()
	l.batches.Go(func() { l.run(ctx, segs, recs) })
	return len(recs) + parked, nil
}

// take reads new messages, and a share of the waiting ones. Messages that failed before, and
// messages to an address that the broker accepts nothing for, are parked: they are read without
// their content, wait, and delay later messages with the same key.
func (l *leader) take(ctx context.Context, segs string) (recs []*record, parked int, err error) {
	closed, poisons := l.r.gates.closed(), l.r.gates.isolated()
	// The messages in flight are listed before the read: a batch deletes its messages before it
	// releases its keys.
	ids, keys := l.excluded()
	const columns = "SELECT id, message, address, key, failed_since, "
	fresh, err := all(ctx, l.s, scanRecord, bounded(columns+`(failed_since IS NOT NULL OR address = ANY($1) OR address = ANY($2)) AS parked FROM hopback_outbox
WHERE segment IN (`+segs+`) AND id > $3 AND id `+notAmong("$4::bigint[]")+` AND (key IS NULL OR key `+notAmong("$5::text[]")+`) ORDER BY id LIMIT $6`, "$7::bigint"),
		closed, poisons, l.floor.id, ids, keys, l.r.cfg.Batch, l.r.limits.bytes)
	if err != nil {
		return nil, 0, err
	}
	held := map[string]bool{}
	for _, rec := range fresh {
		switch {
		case rec.key != nil && held[*rec.key]: // behind one that is parked
		case !rec.parked:
			recs = append(recs, rec)
		default:
			parked++
			l.r.waits.park(rec)
			if rec.key != nil {
				held[*rec.key] = true
			}
		}
	}
	due := l.r.waits.due(l.r.cfg.oldShare(), l.r.gates.states())
	l.mu.Lock()
	due = slices.DeleteFunc(due, func(id int64) bool { return l.ids[id] })
	l.mu.Unlock()
	if len(due) == 0 {
		return recs, parked, nil
	}
	old, err := all(ctx, l.s, scanRecord, bounded(columns+"false AS parked FROM hopback_outbox WHERE segment IN ("+segs+") AND id = ANY($1)", "$2::bigint"),
		due, max(l.r.limits.bytes/shareOfOld, 1))
	if err != nil {
		return nil, 0, err
	}
	if len(old) == 0 {
		l.r.waits.forget(due...) // somebody has deleted them
	}
	return append(recs, old...), parked, nil
}

// run publishes a batch and settles it.
func (l *leader) run(ctx context.Context, segs string, recs []*record) {
	o := l.publish(ctx, recs)
	o.decide(l.r.cfg.SetAsideAfter)
	err := l.finish(ctx, segs, &o)
	if err == nil {
		err = o.err()
	}
	l.mu.Lock()
	l.under--
	for _, rec := range recs {
		delete(l.ids, rec.id)
		if rec.key != nil {
			delete(l.keys, *rec.key)
		}
	}
	l.mu.Unlock()
	if err != nil {
		l.cancel(err) // what it has published is read again
	}
	wake(l.freed)
}

// finish settles a published batch, even if ctx is done.
func (l *leader) finish(ctx context.Context, segs string, o *outcome) error {
	l.settle.Lock()
	defer l.settle.Unlock()
	settling, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.r.limits.settle)
	defer cancel()
	t, err := l.settling.begin(settling)
	if err != nil {
		return err
	}
	defer t.end(settling)
	if err := l.lease.hold(settling, t); err != nil {
		return err
	}
	if err := l.r.settle(settling, t, segs, o); err != nil {
		return err
	}
	if err := t.commit(settling); err != nil {
		return err
	}
	l.r.settled(o)
	return l.r.setAsideRest(settling, l.settling, segs, o)
}

// chains is how many keys with several messages are published at once.
const chains = 128

// publish publishes the first message of each key at once, and each further one when the one
// before is accepted. After a failure the rest of the key is left for later.
func (l *leader) publish(ctx context.Context, recs []*record) outcome {
	byKey := map[string][]*record{}
	for _, rec := range recs {
		if rec.key != nil {
			byKey[*rec.key] = append(byKey[*rec.key], rec)
		}
	}
	var alone []*record
	for _, rec := range recs {
		if rec.key == nil || len(byKey[*rec.key]) == 1 {
			alone = append(alone, rec)
		}
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	var o outcome
	slots := make(chan struct{}, chains)
	within, cancel := context.WithTimeout(ctx, l.r.cfg.PublishTimeout)
	defer cancel()
	all.Go(func() {
		some := l.r.publishAll(ctx, l.p, alone)
		mu.Lock()
		defer mu.Unlock()
		o.join(some)
	})
	for _, chain := range byKey {
		if len(chain) == 1 {
			continue
		}
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			var own outcome
			for _, rec := range chain {
				if !l.lease.valid() || !l.r.publishOne(within, l.p, rec, &own) {
					break
				}
			}
			mu.Lock()
			defer mu.Unlock()
			o.join(own)
		})
	}
	all.Wait()
	return o
}

// floor is an id below which no message is left and none will appear. A read that starts there
// skips fewer deleted rows.
type floor struct {
	id int64
	// next becomes id when every transaction before limit has finished, and no message up to it
	// is left.
	next  int64
	limit int64 // a transaction's number; 0: there is no next
}

// rise raises the floor, if that is possible now.
//
// A transaction gets its number before it gets an id. So all ids up to last_value belong to
// transactions below a number that is assigned afterwards. When these have finished, all messages
// up to it are visible or never will be. The snapshot's xmax wouldn't do as that number: it is
// above the finished transactions, not above the running ones.
func (f *floor) rise(ctx context.Context, s *session) error {
	if f.limit == 0 {
		if err := s.one(ctx, []any{&f.next}, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM hopback_outbox_id"); err != nil {
			return err
		}
		if f.next <= f.id {
			return nil
		}
		if err := s.one(ctx, []any{&f.limit}, "SELECT pg_current_xact_id()::text::bigint"); err != nil {
			return err
		}
	}
	var oldest int64
	if err := s.one(ctx, []any{&oldest}, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"); err != nil {
		return err
	}
	if oldest < f.limit {
		return nil
	}
	var left *int64
	if err := s.one(ctx, []any{&left}, "SELECT min(id) FROM hopback_outbox WHERE id > $1 AND id <= $2", f.id, f.next); err != nil {
		return err
	}
	if f.id = f.next; left != nil {
		f.id = *left - 1
	}
	f.limit = 0
	return nil
}
