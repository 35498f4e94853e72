package outbox

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
)

// share is a worker of an unordered relay. It publishes one batch after the other, each in a
// transaction that locks its rows, so that no other worker and no other relay reads them.
func (r *Relay) share(ctx context.Context, p *client.Publisher[*client.Message]) error {
	s, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if err := r.awaitLock(ctx, s, "SELECT CASE WHEN pg_try_advisory_xact_lock("+lockKeyed+") THEN pg_try_advisory_lock_shared("+lockOrder+") ELSE false END"); err != nil {
		return err
	}
	for {
		n, err := r.batch(ctx, s, p)
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if err := r.idle(ctx, s, func() (int, error) { return r.batch(ctx, s, p) }); err != nil {
			return err
		}
	}
}

// batch publishes one batch, and returns how many messages it has handled.
func (r *Relay) batch(ctx context.Context, s *session, p *client.Publisher[*client.Message]) (int, error) {
	if err := r.awaitBroker(ctx, p); err != nil {
		return 0, err
	}
	segs, err := r.segments.read(ctx, s)
	if err != nil {
		return 0, err
	}
	t, err := s.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer t.end(ctx)
	recs, err := r.take(ctx, t, segs)
	if err != nil || len(recs) == 0 {
		return 0, err
	}
	o := r.publishAll(ctx, p, recs)
	o.decide(r.cfg.SetAsideAfter)
	// A published batch is settled even if ctx is done.
	settling, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.limits.settle)
	defer cancel()
	if err := r.settle(settling, t, segs, &o); err != nil {
		return 0, err
	}
	if err := t.commit(settling); err != nil {
		return 0, err
	}
	r.settled(&o)
	if err := r.setAsideRest(settling, s, segs, &o); err != nil {
		return 0, err
	}
	return len(o.accepted) + len(o.failed), o.err()
}

// take reads and locks a batch: new messages, and a share of those that the broker didn't accept
// before, or whose address accepts no others.
func (r *Relay) take(ctx context.Context, t *transaction, segs string) ([]*record, error) {
	closed, poisons := r.gates.closed(), r.gates.isolated()
	const columns = "SELECT id, message, address, key, failed_since, false AS parked FROM hopback_outbox WHERE segment IN ("
	from, done := r.sweeps.begin()
	waiting := r.waits.waiting()
	recs, err := all(ctx, t.session, scanRecord, bounded(columns+segs+`) AND id > $1 AND failed_since IS NULL AND id `+notAmong("$2::bigint[]")+`
AND NOT address = ANY($3) AND NOT address = ANY($4) ORDER BY id LIMIT $5 FOR UPDATE SKIP LOCKED`, "$6::bigint"),
		from, waiting, closed, poisons, r.cfg.Batch, r.limits.bytes)
	if err != nil {
		done(0)
		return nil, err
	}
	if len(recs) > 0 {
		done(recs[len(recs)-1].id)
	} else {
		done(0)
	}
	if r.full(recs) {
		wake(r.more)
	}
	if done, mine := r.again.take(); mine {
		old, err := all(ctx, t.session, scanRecord, bounded(columns+segs+`) AND (failed_since IS NOT NULL OR address = ANY($1))
AND id `+notAmong("$2::bigint[]")+` AND NOT address = ANY($3) ORDER BY id LIMIT $4 FOR UPDATE SKIP LOCKED`, "$5::bigint"),
			poisons, waiting, closed, r.cfg.oldShare(), max(r.limits.bytes/shareOfOld, 1))
		done()
		if err != nil {
			return nil, err
		}
		recs = append(recs, old...)
	}
	return recs, nil
}

// shareOfOld is the part of a batch for messages that the broker didn't take before.
const shareOfOld = 10

func (c *RelayConfig) oldShare() int { return max(c.Batch/shareOfOld, 1) }

// full reports whether there may be more than what was read.
func (r *Relay) full(recs []*record) bool {
	size := int64(0)
	for _, rec := range recs {
		size += int64(len(rec.message))
	}
	return len(recs) >= r.cfg.Batch || size >= r.limits.bytes
}

// turns makes a read rarer the longer it takes, for example because it skips many deleted rows
// that can't be removed.
type turns struct {
	mu  sync.Mutex
	due time.Time
}

// take reports whether it is time for the read. If so, done is called after it.
func (t *turns) take() (done func(), mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	began := time.Now()
	if began.Before(t.due) {
		return nil, false
	}
	t.due = began.Add(time.Hour) // no other while this one lasts
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.due = time.Now().Add(10 * time.Since(began))
	}, true
}

// sweeps decides where the next read starts. Most start after the last message that was read, and
// so skip no deleted rows. From time to time one starts at the beginning, and finds messages of
// transactions that committed late.
type sweeps struct {
	turns turns
	mu    sync.Mutex
	floor int64 // the highest id that was read
}

// begin returns the id after which the read starts. done is called with the highest id that was
// read.
func (s *sweeps) begin() (from int64, done func(last int64)) {
	swept, mine := s.turns.take()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !mine {
		from, swept = s.floor, func() {}
	}
	return from, func(last int64) {
		swept()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.floor = max(s.floor, last)
	}
}
