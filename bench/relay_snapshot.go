package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/postgres/outbox"
)

// snapshotFor is how long the rounds with a snapshot take together. A contestant's
// database stays from round to round, as does the snapshot.
var snapshotFor = 10 * time.Minute

// table is the size of the outbox's tables in MiB, the most that was seen.
const table = "table"

// snapshotBed is a database under load.
type snapshotBed struct {
	pool *pgxpool.Pool
	old  pgx.Tx // nil: no snapshot is held
	drop func()
	// left is how many messages the outbox holds.
	left atomic.Int64
}

func (b *snapshotBed) close() {
	if b.old != nil {
		_ = b.old.Rollback(context.Background())
	}
	b.drop()
}

func (s *store) snapshotBed(ctx context.Context, old bool) (*snapshotBed, error) {
	if b := s.snapshots[old]; b != nil {
		return b, nil
	}
	pool, drop, err := s.database(ctx)
	if err != nil {
		return nil, err
	}
	b := &snapshotBed{pool: pool, drop: drop}
	if err := (hopRelay{}).prepare(ctx, pool); err != nil {
		drop()
		return nil, err
	}
	if old {
		// It reads a table of its own, as a report does, and takes a number, too.
		if _, err = pool.Exec(ctx, "CREATE TABLE report (n int)"); err == nil {
			b.old, err = pool.BeginTx(context.WithoutCancel(ctx), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		}
		if err == nil {
			_, err = b.old.Exec(ctx, "INSERT INTO report SELECT 1")
		}
		if err != nil {
			b.close()
			return nil, err
		}
	}
	if s.snapshots == nil {
		s.snapshots = map[bool]*snapshotBed{}
	}
	s.snapshots[old] = b
	return b, nil
}

// watch notes the largest size of the tables in MiB, until then.
func (b *snapshotBed) watch(ctx context.Context, until time.Time, errs <-chan error, most *float64) error {
	for time.Now().Before(until) {
		var n int64
		if err := b.pool.QueryRow(ctx, "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('hopback_outbox') WHERE isleaf").Scan(&n); err != nil {
			return err
		}
		*most = math.Max(*most, float64(n)/(1<<20))
		select {
		case err := <-errs:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(time.Second, time.Until(until))):
		}
	}
	return nil
}

// runRelaySnapshot is a slice of the time for which a snapshot is held: writers keep a
// backlog, and the relay publishes.
func runRelaySnapshot(ctx context.Context, l *lab, c contestant, _ int) (metrics, error) {
	slice := snapshotFor / time.Duration(l.rounds)
	b, err := l.store.snapshotBed(ctx, c.peer.(bool))
	if err != nil {
		return nil, err
	}
	// The queue keeps nothing, as this is about the database.
	q := declare.QuorumQueue{Name: l.name(), DeadLetter: declare.Drop(), MaxLength: 1000}
	if err := l.apply(ctx, declare.Topology{Queues: []declare.Queue{q}}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all sync.WaitGroup
	errs := make(chan error, 8)
	stop := make(chan struct{})
	to := outbox.Publisher[[]byte]{To: address.Queue(q.Name), Codec: client.RawCodec{}}
	bodies := make([][]byte, 50)
	for i := range bodies {
		bodies[i] = orderBody(256)
	}
	for range 2 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if b.left.Load() > 20_000 {
					time.Sleep(time.Millisecond)
					continue
				}
				if _, err := to.PublishAll(ctx, b.pool, bodies); err != nil {
					errs <- err
					return
				}
				b.left.Add(int64(len(bodies)))
			}
		})
	}
	var published atomic.Int64
	all.Go(func() {
		if err := (hopRelay{}).relay(ctx, b.pool, l.url, func(n int) { published.Add(int64(n)); b.left.Add(-int64(n)) }); err != nil {
			errs <- err
		}
	})
	size := 0.0
	measure := func(until time.Time) error { return b.watch(ctx, until, errs, &size) }
	err = measure(time.Now().Add(slice / 10))
	from, at := published.Load(), time.Now()
	if err == nil {
		err = measure(at.Add(slice - slice/10))
	}
	n, took := published.Load()-from, time.Since(at)
	close(stop)
	for limit := time.Now().Add(time.Minute); err == nil && b.left.Load() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			err = fmt.Errorf("%d messages are left", b.left.Load())
		}
	}
	cancel()
	all.Wait()
	close(errs)
	m := metrics{rate: float64(n) / took.Seconds(), table: size}
	fmt.Fprintf(os.Stderr, "\r%s: %.0f msg/s, the tables have %.0f MiB at most\n", c.name, m[rate], size)
	return m, errors.Join(err, <-errs)
}
