package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/service"
	"github.com/hopback/hopback/postgres/outbox"
)

// relayPeer writes messages to a database's outbox and publishes what is committed.
type relayPeer interface {
	// prepare makes the tables.
	prepare(ctx context.Context, pool *pgxpool.Pool) error
	// write writes messages in a transaction.
	write(ctx context.Context, tx pgx.Tx, queue string, bodies [][]byte) error
	// relay publishes until ctx ends, and calls published with how many more the broker
	// has confirmed.
	relay(ctx context.Context, pool *pgxpool.Pool, url string, published func(n int)) error
}

const (
	nWatermillSQL = "watermill-sql forwarder"
	nWatermillBig = "watermill-sql, batch 1000"
	nConsumed     = "hopback, consumed"
	nConfirmed    = "hopback, to the confirmation"
	nNoOutbox     = "no outbox, consumed"
	nOldSnapshot  = "hopback, old snapshot"
)

func relayContests() []contest {
	peers := []contestant{{name: nHop, peer: hopRelay{}}, {name: nWatermillSQL, peer: watermillRelay{}, fewer: 20}, {name: nWatermillBig, peer: watermillRelay{batch: 1000}, fewer: 20}}
	pairs := []pair{{ours: nHop, peer: nWatermillSQL, faster: 10}, {ours: nHop, peer: nWatermillBig, faster: 10}}
	return []contest{
		{
			postgres: true,
			name:     "relay-backlog", title: "from a PostgreSQL outbox to a queue: a backlog, 256 B",
			contestants: peers, pairs: pairs, run: runRelay(false),
		},
		{
			postgres: true,
			name:     "relay-writing", title: fmt.Sprintf("the same while %d writers commit transactions, %d a second together", relayWriters, relayWrites),
			contestants: peers, pairs: pairs, run: runRelay(true),
		},
		{
			postgres: true,
			name:     "relay-latency", title: "from the commit, 50 transactions a second for a minute", maxRounds: 3, run: runRelayLatency,
			contestants: []contestant{{name: nConsumed, peer: false}, {name: nConfirmed, peer: true}, {name: nNoOutbox, peer: nNoOutbox}},
			pairs:       []pair{{ours: nConsumed, peer: nNoOutbox}},
			limits:      []limit{{who: nConsumed, metric: p50, most: 10}, {who: nConsumed, metric: p99, most: 50}, {who: nConfirmed, metric: p50, most: 10}, {who: nConfirmed, metric: p99, most: 50}},
		},
		{
			postgres: true,
			name:     "relay-snapshot", title: "with a transaction that holds a snapshot all the time, and without", long: true, run: runRelaySnapshot,
			contestants: []contestant{{name: nOldSnapshot, peer: true}, {name: nHop, peer: false}},
			pairs:       []pair{{ours: nOldSnapshot, peer: nHop, faster: 0.8}},
			limits:      []limit{{who: nOldSnapshot, metric: table, most: 512}},
		},
	}
}

// store is the PostgreSQL of a lab. It is started by the first contest that needs it.
type store struct {
	once   sync.Once
	server *service.Service
	err    error
	named  atomic.Int64

	snapshots map[bool]*snapshotBed
}

func (s *store) start(ctx context.Context) (*service.Service, error) {
	s.once.Do(func() { s.server, s.err = service.Postgres(ctx, os.Stderr) })
	return s.server, s.err
}

func (s *store) close() {
	for _, b := range s.snapshots {
		b.close()
	}
	if s.server != nil {
		_ = s.server.Close()
	}
}

// database makes a database, which drop removes.
func (s *store) database(ctx context.Context) (pool *pgxpool.Pool, drop func(), err error) {
	server, err := s.start(ctx)
	if err != nil {
		return nil, nil, err
	}
	admin, err := pgx.Connect(ctx, server.URL)
	if err != nil {
		return nil, nil, err
	}
	defer admin.Close(ctx)
	name := fmt.Sprintf("hopback_bench_%d_%d", os.Getpid(), s.named.Add(1))
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, nil, err
	}
	cfg, err := pgxpool.ParseConfig(server.URL)
	if err != nil {
		return nil, nil, err
	}
	cfg.ConnConfig.Database = name
	cfg.MaxConns = 24
	if pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, nil, err
	}
	return pool, func() {
		pool.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if admin, err := pgx.Connect(ctx, server.URL); err == nil {
			_, _ = admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
			_ = admin.Close(ctx)
		}
	}, nil
}

// relayWriters write relayWrites transactions a second, so that each contestant has the
// same work beside it.
const (
	relayWriters = 4
	relayWrites  = 400
)

// runRelay measures how fast a backlog is published. With writing, more is written
// meanwhile, each message in a transaction of its own with a row of data.
func runRelay(writing bool) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (_ metrics, err error) {
		peer := c.peer.(relayPeer)
		pool, drop, err := l.store.database(ctx)
		if err != nil {
			return nil, err
		}
		defer drop()
		if err := peer.prepare(ctx, pool); err != nil {
			return nil, err
		}
		if _, err := pool.Exec(ctx, "CREATE TABLE orders (id bigserial PRIMARY KEY, body bytea)"); err != nil {
			return nil, err
		}
		queue, err := l.queue(ctx)
		if err != nil {
			return nil, err
		}
		m := newMeter(warmUp(n), n)
		if err := backlog(ctx, pool, peer, queue, m.total()); err != nil {
			return nil, err
		}
		// What autovacuum would have done after a while.
		if _, err := pool.Exec(ctx, "VACUUM ANALYZE"); err != nil {
			return nil, err
		}
		settleDown()
		var published atomic.Int64
		all := m.total()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		relayed, wrote := make(chan error, 1), make(chan error, 1)
		go func() {
			relayed <- peer.relay(ctx, pool, l.url, func(n int) {
				before := int(published.Add(int64(n))) - n
				for i := before; i < min(before+n, all); i++ {
					m.tick()
				}
			})
		}()
		written := int64(all)
		stop := make(chan struct{})
		go func() {
			if writing {
				n, err := keepWriting(pool, peer, queue, stop)
				written += n
				wrote <- err
				return
			}
			wrote <- nil
		}()
		select {
		case <-m.done:
		case err = <-relayed:
			err = fmt.Errorf("the relay ended early: %w", err)
			relayed <- nil
		case <-ctx.Done():
			err = ctx.Err()
		}
		close(stop)
		err = errors.Join(err, <-wrote)
		for err == nil && published.Load() < written {
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		cancel()
		if err = errors.Join(err, <-relayed); err != nil {
			return nil, err
		}
		return m.metrics(), l.holds(context.WithoutCancel(ctx), queue, uint64(written))
	}
}

// backlog commits n messages.
func backlog(ctx context.Context, pool *pgxpool.Pool, peer relayPeer, queue string, n int) error {
	body := orderBody(256)
	for n > 0 {
		some := make([][]byte, min(n, 500))
		for i := range some {
			some[i] = body
		}
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return peer.write(ctx, tx, queue, some) }); err != nil {
			return err
		}
		n -= len(some)
	}
	return nil
}

// keepWriting commits transactions with data and a message, until stop is closed.
func keepWriting(pool *pgxpool.Pool, peer relayPeer, queue string, stop <-chan struct{}) (written int64, err error) {
	ctx := context.Background()
	body := orderBody(256)
	var n atomic.Int64
	var wg sync.WaitGroup
	failed := make(chan error, relayWriters)
	for range relayWriters {
		wg.Go(func() {
			each := time.NewTicker(time.Second * relayWriters / relayWrites)
			defer each.Stop()
			for {
				select {
				case <-stop:
					return
				case <-each.C:
				}
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "INSERT INTO orders (body) VALUES ($1)", body); err != nil {
						return err
					}
					return peer.write(ctx, tx, queue, [][]byte{body})
				})
				if err != nil {
					failed <- err
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	close(failed)
	return n.Load(), <-failed
}

// confirmations tells when the broker has confirmed a message.
type confirmations struct {
	client.NoInstrument
	at func(body []byte)
}

func (c confirmations) PublishAll(context.Context, address.Address, int) client.Batch {
	return confirmedBatch{c}
}

type confirmedBatch struct{ c confirmations }

func (b confirmedBatch) Publish(s client.Sending) client.Publication {
	return confirmation{b.c, s.Message().GetData()}
}

func (confirmedBatch) Published(error) {}

type confirmation struct {
	c    confirmations
	body []byte
}

func (c confirmation) Published(err error) {
	if err == nil {
		c.c.at(c.body)
	}
}

// arrivals notes when each of n messages has first come. done is closed when all have.
func arrivals(n int) (came []time.Time, got func(body []byte), done chan struct{}) {
	came, done = make([]time.Time, n), make(chan struct{})
	var mu sync.Mutex
	return came, func(body []byte) {
		i := binary.BigEndian.Uint64(body)
		mu.Lock()
		defer mu.Unlock()
		if came[i].IsZero() {
			came[i] = time.Now()
			if n--; n == 0 {
				close(done)
			}
		}
	}, done
}

// runRelayLatency measures from when a commit has returned until a consumer has the
// message, or until the broker has confirmed it. Without an outbox the message is published
// after the commit: what the broker, and the machine, take by themselves.
func runRelayLatency(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	const every, warm = 20 * time.Millisecond, 50
	n = min(n, 3000)
	pool, drop, err := l.store.database(ctx)
	if err != nil {
		return nil, err
	}
	defer drop()
	if err := (hopRelay{}).prepare(ctx, pool); err != nil {
		return nil, err
	}
	queue, err := l.queue(ctx)
	if err != nil {
		return nil, err
	}
	committed := make([]time.Time, warm+n)
	came, got, done := arrivals(warm + n)
	cfg := client.Config{Name: "hopback-bench", Logger: quiet}
	consumed := func([]byte) {}
	direct := c.peer == nNoOutbox
	if c.peer == true {
		cfg.Instrument = confirmations{at: got}
	} else {
		consumed = got
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 2)
	go func() {
		ended <- hopConsume(ctx, l.url, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			consumed(d.Message().GetData())
			return nil
		}), 1, 0, nil)
	}()
	relay := func() error { return hopRelay{cfg: cfg}.relay(ctx, pool, l.url, func(int) {}) }
	if direct {
		relay = func() error { <-ctx.Done(); return nil }
	}
	go func() { ended <- relay() }()
	to := outbox.Publisher[[]byte]{To: address.Queue(queue), Codec: client.RawCodec{}}
	conn, hangUp, err := hopConnect(ctx, l.url)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	after, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(queue), client.PublisherConfig{Codec: client.RawCodec{}})
	if err != nil {
		return nil, err
	}
	publishing := make(chan error, warm+n)
	for i, next := 0, time.Now().Add(time.Second); i < warm+n; i, next = i+1, next.Add(every) {
		time.Sleep(time.Until(next))
		body := make([]byte, 256)
		binary.BigEndian.PutUint64(body, uint64(i))
		if err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { _, err := to.Publish(ctx, tx, body); return err }); err != nil {
			return nil, err
		}
		committed[i] = time.Now()
		if direct {
			go func() { publishing <- after.Publish(ctx, body) }()
		}
	}
	select {
	case <-done:
	case err := <-ended:
		return nil, fmt.Errorf("ended early: %w", err)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for range (warm + n) * bit(direct) {
		if err := <-publishing; err != nil {
			return nil, err
		}
	}
	cancel()
	err = errors.Join(<-ended, <-ended)
	var took []time.Duration
	for i := warm; i < warm+n; i++ {
		took = append(took, max(0, came[i].Sub(committed[i])))
	}
	return timings(took), err
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}
