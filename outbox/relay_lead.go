package outbox

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
)

// depth is how many batches of a relay that keeps the order are under way.
const depth = 2

// lead is a relay that keeps the order of each key. It works while it has the lock.
//
// One read sees all committed messages of a key, in the order of their ids. A key whose
// messages are under way, or which waits because one of them failed, is left out of the
// reads until that is over.
func (r *Relay) lead(ctx context.Context, p *client.Publisher[*client.Message]) error {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if err := r.awaitLock(ctx, conn, "pg_try_advisory_lock("+lockOrder+")"); err != nil {
		return err
	}
	defer r.unlock(conn, "pg_advisory_unlock("+lockOrder+")")
	ctx, cancel := context.WithCancelCause(ctx)
	l := &leader{r: r, p: p, conn: conn, ids: map[int64]bool{}, keys: map[string]bool{}, freed: make(chan struct{}, 1), cancel: cancel}
	defer l.batches.Wait()
	defer cancel(nil)
	for {
		n, err := l.batch(ctx)
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if l.open() > 0 {
			// What is left may be behind what is under way.
			select {
			case <-l.freed:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			continue
		}
		if err := r.idle(ctx, conn, func() (int, error) { return l.batch(ctx) }); err != nil {
			return err
		}
	}
}

// leader is a term of lead.
type leader struct {
	r       *Relay
	p       *client.Publisher[*client.Message]
	conn    *pgxpool.Conn
	cancel  context.CancelCauseFunc
	batches sync.WaitGroup
	freed   chan struct{} // a batch has ended
	floor   floor

	mu    sync.Mutex
	under int             // batches under way
	ids   map[int64]bool  // under way
	keys  map[string]bool // that must not be read
}

func (l *leader) open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.under
}

// excluded returns what the next read leaves out.
func (l *leader) excluded() (ids []int64, keys []string) {
	ids, keys = l.r.retries.waitingKeys()
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

// batch reads a batch and begins to publish it. It returns how many messages it has read.
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
	segs := l.r.segments.now()
	if segs == "" {
		if _, _, err := l.r.segments.look(ctx, l.conn); err != nil {
			return 0, err
		}
		segs = l.r.segments.now()
	}
	if err := l.floor.rise(ctx, l.conn); err != nil {
		return 0, err
	}
	// What is under way is asked before the read: a batch deletes its messages before it
	// gives its keys free.
	ids, keys := l.excluded()
	recs, err := read(ctx, l.conn, `SELECT id, message, address, key, failed_since FROM hopback_outbox
WHERE segment IN (`+segs+`) AND id > $1 AND NOT id = ANY($2) AND (CASE WHEN key IS NULL THEN NOT address = ANY($3) ELSE NOT key = ANY($4) END)
ORDER BY id LIMIT $5`, l.floor.id, ids, l.r.addresses.waiting(), keys, l.r.cfg.Batch)
	if err != nil || len(recs) == 0 {
		return 0, err
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
	l.batches.Go(func() {
		o := l.publish(ctx, recs)
		o.decide(l.r.cfg.SetAsideAfter)
		settling := context.WithoutCancel(ctx)
		err := l.r.settle(settling, l.r.pool, segs, o)
		if err == nil {
			l.r.settled(o)
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
	})
	return len(recs), nil
}

// chains is how many keys with several messages are published at once.
const chains = 128

// publish publishes the first message of each key at once, and each further one when
// that before it is accepted. Behind a failure the rest of the key is left for later.
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
				if !l.r.publishOne(within, l.p, rec, &own) {
					break
				}
			}
			mu.Lock()
			defer mu.Unlock()
			o.join(own)
		})
	}
	all.Wait()
	for _, f := range o.failed {
		for _, rec := range recs {
			if rec.id == f.id && rec.key != nil {
				l.r.retries.hold(f.id, *rec.key)
			}
		}
	}
	return o
}

func (o *outcome) join(other outcome) {
	o.accepted = append(o.accepted, other.accepted...)
	o.failed = append(o.failed, other.failed...)
	o.unsure += other.unsure
	if other.link != nil {
		o.link = other.link
	}
}

// floor is an id up to which no message is left and none will appear. A read that begins
// there passes over fewer deleted rows.
type floor struct {
	id int64
	// next becomes id when every transaction before limit has ended, and nothing up to it
	// is left.
	next  int64
	limit int64 // a transaction's number; 0: there is no next
}

// rise raises the floor, if that can be done now.
//
// A transaction gets its number before it takes an id. So all ids up to last_value belong
// to transactions below a number that is assigned afterwards. When these have ended, all
// messages up to it are visible or will never be. The snapshot's xmax wouldn't do as that
// number: it is behind the transactions that have ended, not behind those that run.
func (f *floor) rise(ctx context.Context, db execer) error {
	if f.limit == 0 {
		if err := db.QueryRow(ctx, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM hopback_outbox_id").Scan(&f.next); err != nil {
			return err
		}
		if f.next <= f.id {
			return nil
		}
		if err := db.QueryRow(ctx, "SELECT pg_current_xact_id()::text::bigint").Scan(&f.limit); err != nil {
			return err
		}
	}
	var oldest int64
	if err := db.QueryRow(ctx, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint").Scan(&oldest); err != nil {
		return err
	}
	if oldest < f.limit {
		return nil
	}
	var left *int64
	if err := db.QueryRow(ctx, "SELECT min(id) FROM hopback_outbox WHERE id > $1 AND id <= $2", f.id, f.next).Scan(&left); err != nil {
		return err
	}
	if f.id = f.next; left != nil {
		f.id = *left - 1
	}
	f.limit = 0
	return nil
}
