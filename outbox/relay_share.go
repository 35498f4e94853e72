package outbox

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
)

// share is a worker of an unordered relay: a batch after the other, each in a transaction
// that locks its rows, so that no other worker and no other relay reads them.
func (r *Relay) share(ctx context.Context, p *client.Publisher[*client.Message]) error {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if err := r.awaitLock(ctx, conn, "pg_try_advisory_lock_shared("+lockOrder+")"); err != nil {
		return err
	}
	defer r.unlock(conn, "pg_advisory_unlock_shared("+lockOrder+")")
	for {
		n, err := r.batch(ctx, conn, p)
		if err != nil {
			return err
		}
		if n >= r.cfg.Batch {
			wake(r.more)
		}
		if n > 0 {
			continue
		}
		if err := r.idle(ctx, conn, func() (int, error) { return r.batch(ctx, conn, p) }); err != nil {
			return err
		}
	}
}

// batch publishes one batch, and returns how many messages it has read.
func (r *Relay) batch(ctx context.Context, conn *pgxpool.Conn, p *client.Publisher[*client.Message]) (int, error) {
	if err := r.awaitBroker(ctx, p); err != nil {
		return 0, err
	}
	segs := r.segments.now()
	if segs == "" {
		if _, _, err := r.segments.look(ctx, conn); err != nil {
			return 0, err
		}
		segs = r.segments.now()
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	// A batch that was published is settled even if ctx ends meanwhile.
	settling := context.WithoutCancel(ctx)
	defer func() { _ = tx.Rollback(settling) }()
	from, done := r.sweeps.begin()
	recs, err := read(ctx, tx, `SELECT id, message, address, key, failed_since FROM hopback_outbox
WHERE segment IN (`+segs+`) AND id > $1 AND NOT id = ANY($2) AND NOT address = ANY($3) ORDER BY id LIMIT $4 FOR UPDATE SKIP LOCKED`, from, r.retries.waiting(), r.addresses.waiting(), r.cfg.Batch)
	if err != nil || len(recs) == 0 {
		done(0)
		return 0, err
	}
	done(recs[len(recs)-1].id)
	o := r.publishAll(ctx, p, recs)
	o.decide(r.cfg.SetAsideAfter)
	if err := r.settle(settling, tx, segs, o); err != nil {
		return 0, err
	}
	if err := tx.Commit(settling); err != nil {
		return 0, err
	}
	r.settled(o)
	return len(recs), o.err()
}

// read returns the records of a query.
func read(ctx context.Context, db execer, query string, args ...any) ([]*record, error) {
	rows, err := db.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*record, error) {
		rec := &record{}
		return rec, row.Scan(&rec.id, &rec.message, &rec.address, &rec.key, &rec.failedSince)
	})
}

// sweeps says where the next read begins. Most begin behind the last message that was
// read, and so pass over no deleted row. Now and then one begins at the start, and finds
// messages of transactions that have committed late. Such a read takes long where many
// deleted rows can't be removed, so it comes the more rarely the longer it takes.
type sweeps struct {
	mu    sync.Mutex
	floor int64 // the highest id that was read
	due   time.Time
}

// begin returns the id that the read begins behind. done is called with the highest id
// that was read.
func (s *sweeps) begin() (from int64, done func(last int64)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	began := time.Now()
	if began.Before(s.due) {
		return s.floor, func(last int64) { s.read(last) }
	}
	s.due = began.Add(time.Hour) // no other sweep while this one lasts
	return 0, func(last int64) {
		s.mu.Lock()
		s.due = time.Now().Add(10 * time.Since(began))
		s.mu.Unlock()
		s.read(last)
	}
}

func (s *sweeps) read(last int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.floor = max(s.floor, last)
}
