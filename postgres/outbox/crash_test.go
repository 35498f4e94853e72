package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	realbroker "github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/postgres/inbox"
	"github.com/hopback/hopback/postgres/internal/pgtest"
	"github.com/hopback/hopback/postgres/outbox"
	"github.com/hopback/hopback/retry"
)

// relayOf makes this program a relay of that order, to be killed. The URLs of its
// database and its broker are in its arguments.
const relayOf = "HOPBACK_TEST_RELAY"

// runRelay is the program's whole life as a relay.
func runRelay(order, database, broker string) error {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, database)
	if err != nil {
		return err
	}
	conn, err := client.Connect(ctx, broker, client.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{Order: outbox.Order(order), Batch: 200, PublishTimeout: 5 * time.Second})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// workerOf makes this program a worker with an inbox.
const workerOf = "HOPBACK_TEST_WORKER"

// patient retries for as long as a database may take to start.
var patient = retry.Policy{MaxRetries: 1000, Backoff: retry.Delays(100 * time.Millisecond)}

// runWorker is the program's whole life as a worker: it writes the effects of entries, and
// fails now and then, before and after it has written.
func runWorker(database, broker string) error {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	ctx := context.Background()
	cfg, err := pgxpool.ParseConfig(database)
	if err != nil {
		return err
	}
	cfg.MaxConns = 9
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	conn, err := client.Connect(ctx, broker, client.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	h := client.JSON(func(ctx context.Context, e entry) error {
		tx, ok := inbox.Tx(ctx)
		if !ok {
			return errors.New("no transaction")
		}
		if rand.IntN(20) == 0 {
			return errors.New("before it is written")
		}
		if _, err := tx.Exec(ctx, "INSERT INTO effects VALUES ($1)", e.ID); err != nil {
			return err
		}
		if rand.IntN(20) == 0 {
			return errors.New("after it is written")
		}
		return nil
	})
	for {
		// It may begin while the database is down, and ends with an error then.
		err = conn.Consume(ctx, "effects", retry.With(patient)(inbox.With(pool, inbox.Config{})(h)), client.ConsumerConfig{Concurrency: 8})
		fmt.Fprintln(os.Stderr, "the worker begins again:", err)
		time.Sleep(100 * time.Millisecond)
	}
}

// child is a relay or a worker, which can be killed.
type child struct{ cmd *exec.Cmd }

// startChild runs this program as what the variable of the environment says.
func startChild(t *testing.T, variable, value, database, broker string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], database, broker)
	cmd.Env = append(os.Environ(), variable+"="+value)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe() // which ends with this process
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	return &child{cmd}
}

func (p *child) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// crashing is a broker that can be killed and comes back with what it had confirmed.
type crashing interface {
	kill(t *testing.T)
	start(t *testing.T)
}

type crashingReal struct{ *realbroker.Broker }

func (b crashingReal) kill(t *testing.T)  { require.NoError(t, b.Kill(t.Context())) }
func (b crashingReal) start(t *testing.T) { require.NoError(t, b.Start(t.Context())) }

type crashingMemory struct{ *hopbacktest.Broker }

func (b crashingMemory) kill(*testing.T)  { b.Kill() }
func (b crashingMemory) start(*testing.T) { b.Restart() }

// entry is a message of the crash test. Seq counts the committed ones of an account.
type entry struct {
	ID, Account, Seq int
}

// received is what has come.
type received struct {
	mu         sync.Mutex
	times      map[int]int    // by entry.ID
	messageIDs map[int]string // by entry.ID
	last       map[int]int    // the highest Seq, by account
	wrong      []string
}

func (r *received) add(ordered bool, messageID string, e entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.times[e.ID]++; r.times[e.ID] > 1 {
		if r.messageIDs[e.ID] != messageID {
			r.wrong = append(r.wrong, fmt.Sprintf("entry %d came as message %s, and again as %s", e.ID, r.messageIDs[e.ID], messageID))
		}
		return
	}
	r.messageIDs[e.ID] = messageID
	if ordered && e.Seq != r.last[e.Account]+1 {
		r.wrong = append(r.wrong, fmt.Sprintf("entry %d of account %d came after entry %d", e.Seq, e.Account, r.last[e.Account]))
	}
	r.last[e.Account] = max(r.last[e.Account], e.Seq)
}

func (r *received) distinct() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.times)
}

// Sixteen writers write transactions, a third of them rolled back, while relays, the
// database, and the broker with a worker are killed in turn. What was committed is published, what was
// rolled back isn't, duplicates have the same message-id, and with OrderByKey what came first
// of each entry is in order. Workers with an inbox, which fail now and then, write each
// effect once.
func TestNothingIsLostOrInventedWhileEverythingIsKilled(t *testing.T) {
	transactions, kills, brokers := 1500, 6, []string{"memory"}
	if os.Getenv("HOPBACK_LONG") != "" {
		transactions, kills, brokers = 100_000, 30, []string{"memory", "4.3", "4.0"}
	}
	for _, order := range orders {
		for _, version := range brokers {
			t.Run(string(order)+"/"+version, func(t *testing.T) {
				database, err := service.Postgres(t.Context(), os.Stderr)
				require.NoError(t, err)
				t.Cleanup(func() { assert.NoError(t, database.Close()) })
				var b crashing
				var at string
				if version == "memory" {
					m := hopbacktest.Start(t, hopbacktest.Config{MaxEvents: -1})
					at, err = m.Listen("127.0.0.1:0")
					require.NoError(t, err)
					b = crashingMemory{m}
				} else {
					own, err := realbroker.Own(t.Context(), os.Stderr, version)
					require.NoError(t, err)
					t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
					b, at = crashingReal{own}, own.URL
				}
				crash(t, order, database, b, at, transactions, kills)
			})
		}
	}
}

func crash(t *testing.T, order outbox.Order, database *service.Service, b crashing, brokerURL string, transactions, kills int) {
	const writers, accounts = 16, 40
	began := time.Now()
	pool := pgtest.DatabaseOf(t, database)
	_, err := pool.Exec(t.Context(), `CREATE TABLE accounts (account int PRIMARY KEY, seq int NOT NULL);
CREATE TABLE ledger (id int PRIMARY KEY);
CREATE TABLE effects (id int NOT NULL)`)
	require.NoError(t, err)
	for i := range accounts {
		_, err := pool.Exec(t.Context(), "INSERT INTO accounts VALUES ($1, 0)", i)
		require.NoError(t, err)
	}
	conn, err := client.Connect(t.Context(), brokerURL, client.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.Background())) })
	topology, err := retry.Topology(patient, declare.QuorumQueue{Name: "effects"}, declare.QuorumQueue{Name: "entries"})
	require.NoError(t, err)
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "written", Type: declare.ExchangeFanout})
	topology.Bindings = append(topology.Bindings, declare.Binding{Source: "written", Queue: "effects"}, declare.Binding{Source: "written", Queue: "entries"})
	_, err = declare.Apply(t.Context(), conn.Management(), topology)
	require.NoError(t, err)
	at, err := url.Parse(database.URL)
	require.NoError(t, err)
	at.Path = "/" + pool.Config().ConnConfig.Database
	relay := func() *child { return startChild(t, relayOf, string(order), at.String(), brokerURL) }
	worker := func() *child { return startChild(t, workerOf, "1", at.String(), brokerURL) }

	r := &received{times: map[int]int{}, messageIDs: map[int]string{}, last: map[int]int{}}
	consuming, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- conn.Consume(consuming, "entries", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			m := d.Message()
			var e entry
			body, err := client.Body(m)
			if err == nil {
				err = json.Unmarshal(body, &e)
			}
			if err != nil {
				return err
			}
			r.add(order == outbox.OrderByKey, fmt.Sprint(m.Properties.MessageID), e)
			return nil
		}), client.ConsumerConfig{})
	}()

	// Two relays share the work, or one stands by.
	relays, workers := []*child{relay(), relay()}, []*child{worker(), worker()}
	defer func() {
		for _, p := range slices.Concat(relays, workers) {
			p.kill()
		}
	}()

	var begun atomic.Int64
	var unknown atomic.Int64
	p := outbox.Publisher[entry]{To: address.Exchange("written", "entry"), Key: func(e entry) string { return fmt.Sprint(e.Account) }}
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for t.Context().Err() == nil {
				id := int(begun.Add(1))
				if id > transactions {
					return
				}
				if err := transact(t.Context(), pool, p, id); err != nil {
					unknown.Add(1)
					for pool.Ping(t.Context()) != nil && t.Context().Err() == nil {
						time.Sleep(10 * time.Millisecond)
					}
				}
			}
		})
	}
	for i := range kills {
		for begun.Load() < int64(transactions*(i+1)/(kills+1)) {
			time.Sleep(time.Millisecond)
		}
		switch i % 3 {
		case 0:
			k := i / 3 % len(relays)
			relays[k].kill()
			relays[k] = relay()
		case 1:
			require.NoError(t, database.Kill())
			require.NoError(t, database.Start(t.Context()))
		case 2:
			b.kill(t)
			b.start(t)
			k := i / 3 % len(workers)
			workers[k].kill()
			workers[k] = worker()
		}
	}
	all.Wait()

	committed := map[int]bool{}
	rows, err := pool.Query(t.Context(), "SELECT id FROM ledger")
	require.NoError(t, err)
	for rows.Next() {
		var id int
		require.NoError(t, rows.Scan(&id))
		committed[id] = true
	}
	require.NoError(t, rows.Err())
	var effects, distinct int
	for stuck := newStuck(); left(t, pool) > 0 || r.distinct() < len(committed); time.Sleep(10 * time.Millisecond) {
		stuck.check(t, r.distinct(), "%d of %d have come, %d are in the outbox", r.distinct(), len(committed), left(t, pool))
	}
	// What is still in the queue comes before the consumer ends.
	pgtest.QueueIsEmpty(t, conn, "entries")
	for stuck := newStuck(); effects < len(committed); time.Sleep(20 * time.Millisecond) {
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*), count(DISTINCT id) FROM effects").Scan(&effects, &distinct))
		stuck.check(t, effects, "%d of %d have had their effect", effects, len(committed))
	}
	pgtest.QueueIsEmpty(t, conn, "effects") // of duplicates
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*), count(DISTINCT id) FROM effects").Scan(&effects, &distinct))
	assert.Equal(t, []int{len(committed), len(committed)}, []int{effects, distinct}, "each effect is there once")
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		require.NoError(t, err)
	}

	var setAside int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM hopback_outbox_set_aside").Scan(&setAside))
	assert.Zero(t, setAside)
	assert.Empty(t, r.wrong)
	twice, invented, lost := 0, 0, 0
	for id, times := range r.times {
		if !committed[id] {
			invented++
		}
		if times > 1 {
			twice++
		}
	}
	for id := range committed {
		if r.times[id] == 0 {
			lost++
		}
	}
	assert.Zero(t, invented, "messages of transactions that were rolled back")
	assert.Zero(t, lost, "messages of transactions that were committed")
	t.Logf("REPORT outbox, %s: %d transactions, %d kills: %d committed, %d of them lost; %d published of those rolled back; %d published more than once; %d out of order or with another message-id; %d effects of %d messages; %d transactions were cut by a kill; %s",
		order, transactions, kills, len(committed), lost, invented, twice, len(r.wrong), effects, distinct, unknown.Load(), time.Since(began).Round(time.Second))
}

// stuck ends a test in which nothing has gone on for two minutes.
type stuck struct {
	last  int
	since time.Time
}

func newStuck() *stuck { return &stuck{last: -1} }

func (s *stuck) check(t *testing.T, now int, format string, args ...any) {
	t.Helper()
	if now != s.last {
		s.last, s.since = now, time.Now()
	}
	if time.Since(s.since) > 2*time.Minute {
		require.Failf(t, "no progress", format, args...)
	}
}

// transact takes the next number of an account in one transaction with its message, and
// rolls a third back.
func transact(ctx context.Context, pool *pgxpool.Pool, p outbox.Publisher[entry], id int) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	e := entry{ID: id, Account: rand.IntN(40)}
	if err := tx.QueryRow(ctx, "UPDATE accounts SET seq = seq + 1 WHERE account = $1 RETURNING seq", e.Account).Scan(&e.Seq); err != nil {
		return err
	}
	if _, err := p.Publish(ctx, tx, e); err != nil {
		return err
	}
	if rand.IntN(3) == 0 {
		return tx.Rollback(ctx)
	}
	if _, err := tx.Exec(ctx, "INSERT INTO ledger VALUES ($1)", id); err != nil {
		return err
	}
	return tx.Commit(ctx)
}
