package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Order says in which order a relay publishes.
type Order string

const (
	// Unordered publishes many messages at once. Any number of relays share the work.
	Unordered Order = "unordered"
	// ByKey publishes messages with the same key in order, and one after another. One
	// relay works, and the others stand by. A message that can't be published now holds
	// back those behind it with its key. Messages without a key aren't ordered.
	ByKey Order = "by-key"
)

// RelayConfig configures a Relay. The zero value is ready to use.
type RelayConfig struct {
	// Order is the order in which messages are published. Relays of one outbox must agree:
	// one that doesn't waits until the others have ended. Default: Unordered.
	Order Order
	// Batch is how many messages are read and published together, up to 10,000.
	// Default: 1,000.
	Batch int
	// Workers is how many batches an unordered relay publishes at once, up to 64. Each
	// takes a connection of the pool while it does. Default: 2.
	Workers int
	// PollInterval is how long a relay waits at most before it looks for messages, if no
	// notification wakes it. Default: 1 s.
	PollInterval time.Duration
	// PublishTimeout is how long a batch waits for the broker's answers. Messages without
	// one then are published again. It also bounds how long a transaction of an unordered
	// relay lasts. Default: 10 s.
	PublishTimeout time.Duration
	// SetAsideAfter is how long a message is tried that the broker doesn't take: no queue
	// is bound for it, its exchange is missing, a queue refuses it, or the user may not
	// write to its exchange. Then it is moved to hopback_outbox_set_aside. Messages that can
	// never be published are moved at once. A lost or refused connection or link is held
	// against no message. Default: 1 h.
	SetAsideAfter time.Duration
	// Retry is the pause before a message is tried again that the broker didn't take. It
	// doubles with each failure, up to a minute. Default: 1 s.
	Retry time.Duration
	// Logger receives messages set aside, and errors of the database that the relay
	// survives. Default: slog.Default().
	Logger *slog.Logger
}

const (
	maxBatch   = 10_000
	maxWorkers = 64
	maxRetry   = time.Minute
)

func (c RelayConfig) withDefaults() (RelayConfig, error) {
	switch {
	case c.Order != "" && c.Order != Unordered && c.Order != ByKey:
		return c, argument.New("RelayConfig.Order", string(c.Order), "is unknown", "use outbox.Unordered or outbox.ByKey")
	case c.Batch < 0 || c.Batch > maxBatch:
		return c, argument.New("RelayConfig.Batch", c.Batch, "is out of range", "use 1 to 10,000, or 0 for the default of 1,000")
	case c.Workers < 0 || c.Workers > maxWorkers:
		return c, argument.New("RelayConfig.Workers", c.Workers, "is out of range", "use 1 to 64, or 0 for the default of 2")
	case c.Order == ByKey && c.Workers > 1:
		return c, argument.New("RelayConfig.Workers", c.Workers, "has no effect with outbox.ByKey", "leave it out")
	case c.PollInterval < 0 || c.PublishTimeout < 0 || c.SetAsideAfter < 0 || c.Retry < 0:
		return c, argument.New("RelayConfig", nil, "has a negative duration", "use positive ones, or 0 for the default")
	}
	if c.Order == "" {
		c.Order = Unordered
	}
	if c.Batch == 0 {
		c.Batch = 1000
	}
	if c.Workers == 0 {
		c.Workers = 2
	}
	if c.PollInterval == 0 {
		c.PollInterval = time.Second
	}
	if c.PublishTimeout == 0 {
		c.PublishTimeout = 10 * time.Second
	}
	if c.SetAsideAfter == 0 {
		c.SetAsideAfter = time.Hour
	}
	if c.Retry == 0 {
		c.Retry = time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}

// Relay publishes what transactions have committed to the outbox. See NewRelay.
type Relay struct {
	pool *pgxpool.Pool
	conn *client.Conn
	cfg  RelayConfig
	log  *slog.Logger

	segments *segments
	sweeps   sweeps
	retries  retries
	// addresses are those that the broker takes nothing for.
	addresses addresses
	// more wakes an idle worker, because another has found a whole batch.
	more chan struct{}
	// notified wakes the worker that sleeps.
	notified chan struct{}
	sleeper  chan struct{} // the right to be that worker
	// scheduled wakes handOver.
	scheduled chan struct{}

	published, setAside atomic.Int64
}

// NewRelay returns a relay for the outbox in pool's database, whose tables Migrate has
// created. A relay keeps two connections of the pool, and takes one more for each worker.
//
// The error is an *argument.Error. Nothing is asked of the database before Run.
func NewRelay(pool *pgxpool.Pool, conn *client.Conn, cfg RelayConfig) (*Relay, error) {
	if pool == nil {
		return nil, argument.New("pool", nil, "is nil", "give a pool of pgxpool.New")
	}
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "give a connection of client.Connect")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	need := int32(2 + cfg.Workers)
	if cfg.Order == ByKey {
		need = 4
	}
	if most := pool.Config().MaxConns; most < need {
		return nil, argument.New("pool", most, fmt.Sprintf("has fewer connections than the %d that this relay holds at once", need), "set pgxpool.Config.MaxConns, or pool_max_conns in the URL")
	}
	return &Relay{
		pool: pool, conn: conn, cfg: cfg, log: cfg.Logger,
		segments: &segments{}, retries: retries{of: map[int64]retry{}}, addresses: addresses{of: map[string]*refusal{}, first: cfg.Retry, log: cfg.Logger},
		more: make(chan struct{}, 1), notified: make(chan struct{}, 1), sleeper: make(chan struct{}, 1),
		scheduled: make(chan struct{}, 1),
	}, nil
}

// RelayStats counts what a Relay has done.
type RelayStats struct {
	// Published is how many messages the broker has accepted and the outbox has deleted.
	Published int64
	// SetAside is how many were moved to hopback_outbox_set_aside.
	SetAside int64
}

// Stats returns what the relay has done since NewRelay.
func (r *Relay) Stats() RelayStats {
	return RelayStats{Published: r.published.Load(), SetAside: r.setAside.Load()}
}

// Run publishes until ctx ends. Then it returns nil, after the batches under way. It
// survives the loss of the database and of the broker, and tries again for as long as it
// runs. It returns an error if the outbox has no tables or the user no right to them.
func (r *Relay) Run(ctx context.Context) error {
	p, err := client.NewPublisher[*client.Message](ctx, r.conn, address.Address{}, client.PublisherConfig{Pending: r.cfg.Batch})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("outbox: %w", err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.PublishTimeout)
		defer cancel()
		_ = p.Close(closing)
	}()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var all sync.WaitGroup
	start := func(what string, step func(context.Context) error) {
		all.Go(func() {
			if err := r.forever(ctx, what, step); err != nil {
				stop(err)
			}
		})
	}
	start("truncate", r.rotate)
	start("listen", r.listen)
	start("schedule", r.handOver)
	if r.cfg.Order == ByKey {
		start("relay", func(ctx context.Context) error { return r.lead(ctx, p) })
	} else {
		for range r.cfg.Workers {
			start("relay", func(ctx context.Context) error { return r.share(ctx, p) })
		}
	}
	all.Wait()
	if err := context.Cause(ctx); errors.As(err, new(*fatalError)) {
		return err
	}
	return nil
}

// forever runs step again with a pause for as long as it fails. It returns an error if
// another attempt would fail, too.
func (r *Relay) forever(ctx context.Context, what string, step func(context.Context) error) error {
	const least, most = 50 * time.Millisecond, 5 * time.Second
	pause := least
	for {
		began := time.Now()
		err := step(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if fatal := fatalIn(err); fatal != nil {
			return fatal
		}
		if time.Since(began) > most {
			pause = least
		}
		if err != nil {
			r.log.Warn("outbox: the relay tries again", "part", what, "in", pause, "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, most)
	}
}

// outcome is what became of a batch.
type outcome struct {
	accepted []int64
	failed   []failure // in the order of the batch
	// unsure counts the messages without an answer. They stay, and are published again.
	unsure int
	// link is why the broker refuses the relay's link, or nil.
	link error
}

// err is why the relay should pause, or nil.
func (o *outcome) err() error {
	if o.link == nil {
		return nil
	}
	return fmt.Errorf("outbox: the broker refuses the relay's link: %w", o.link)
}

// failure is a message that the broker didn't take.
type failure struct {
	id    int64
	err   error
	since time.Time // of its first failure; zero: this is the first
	final bool      // there is no other attempt
	// refused is the message's address, if the broker takes nothing for that.
	refused string
}

// record is a row of the outbox.
type record struct {
	id          int64
	message     []byte
	address     string
	key         *string
	failedSince *time.Time

	decoded *client.Message
}

// decode decodes what Publish has encoded.
func (rec *record) decode() error {
	m := &client.Message{}
	if err := m.UnmarshalBinary(rec.message); err != nil {
		return argument.Wrap(err, "message", rec.id, "isn't an AMQP message", "write messages with outbox.Publish")
	}
	rec.decoded = m
	return nil
}

// note files the result of a record. A message's own faults are final: it is set aside.
// What is missing on the broker, or refused there, can come back: the message waits. What
// is about the relay's link is no message's fault.
func (o *outcome) note(rec *record, err error) {
	var bad *argument.Error
	var of *client.Error
	switch {
	case err == nil:
		o.accepted = append(o.accepted, rec.id)
	case errors.As(err, &bad), errors.Is(err, client.ErrTooLarge):
		o.fail(rec, err, true)
	case errors.Is(err, client.ErrUnroutable), errors.Is(err, client.ErrNotFound),
		errors.Is(err, client.ErrRefused) && !client.SafeToRetry(err):
		o.fail(rec, err, false)
	case errors.Is(err, client.ErrOutcomeUnknown) && errors.As(err, &of) && of.Condition != "":
		// The broker has ended the link three times when it got this message.
		o.fail(rec, err, false)
		o.failed[len(o.failed)-1].refused = rec.address
	case errors.Is(err, client.ErrUnauthorized), errors.Is(err, client.ErrRefused), errors.Is(err, client.ErrSessionLimit):
		o.unsure++
		o.link = err
	default:
		o.unsure++
	}
}

func (o *outcome) fail(rec *record, err error, final bool) {
	f := failure{id: rec.id, err: err, final: final}
	if rec.failedSince != nil {
		f.since = *rec.failedSince
	}
	o.failed = append(o.failed, f)
}

// decide gives up what has failed for long.
func (o *outcome) decide(after time.Duration) {
	for i := range o.failed {
		f := &o.failed[i]
		f.final = f.final || !f.since.IsZero() && time.Since(f.since) >= after
	}
}

// publishAll publishes records side by side.
func (r *Relay) publishAll(ctx context.Context, p *client.Publisher[*client.Message], recs []*record) outcome {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.PublishTimeout)
	defer cancel()
	var o outcome
	var trying sync.WaitGroup
	var mu sync.Mutex
	ms := make([]*client.Message, 0, len(recs))
	sent := make([]*record, 0, len(recs))
	for _, rec := range recs {
		err := rec.decode()
		if err != nil {
			mu.Lock()
			o.note(rec, err)
			mu.Unlock()
			continue
		}
		switch refused, try := r.addresses.ask(rec.address); {
		case try:
			trying.Go(func() {
				err := r.try(ctx, rec)
				mu.Lock()
				defer mu.Unlock()
				o.note(rec, err)
			})
		case refused == nil:
			ms, sent = append(ms, rec.decoded), append(sent, rec)
		case rec.key != nil && r.cfg.Order == ByKey:
			mu.Lock()
			o.fail(rec, refused, false) // it holds back what is behind it
			mu.Unlock()
		}
	}
	err := p.PublishAll(ctx, ms)
	trying.Wait()
	var batch *client.BatchError
	whole := err != nil && !errors.As(err, &batch)
	at := 0
	for i, rec := range sent {
		switch {
		case whole:
			o.note(rec, err)
		case batch != nil && at < len(batch.Failed) && batch.Failed[at].Index == i:
			o.note(rec, batch.Failed[at].Err)
			at++
		default:
			o.note(rec, nil)
		}
	}
	r.learn(&o)
	return o
}

// publishOne publishes a record and waits for the answer.
func (r *Relay) publishOne(ctx context.Context, p *client.Publisher[*client.Message], rec *record, o *outcome) (ok bool) {
	err := rec.decode()
	if err == nil {
		switch refused, try := r.addresses.ask(rec.address); {
		case try:
			err = r.try(ctx, rec)
		case refused == nil:
			err = p.Publish(ctx, rec.decoded)
		default:
			o.fail(rec, refused, false)
			return false
		}
	}
	o.note(rec, err)
	r.learn(o)
	return err == nil || len(o.failed) > 0 && o.failed[len(o.failed)-1].final
}

// settle deletes what was accepted, moves what failed for good, and marks the rest of
// what failed. segs are the segments that the batch was read from.
func (r *Relay) settle(ctx context.Context, db execer, segs string, o outcome) error {
	if len(o.accepted) > 0 {
		if _, err := db.Exec(ctx, "DELETE FROM hopback_outbox WHERE segment IN ("+segs+") AND id = ANY($1)", o.accepted); err != nil {
			return err
		}
	}
	for _, f := range o.failed {
		reason := clean(f.err.Error())
		if f.final {
			if _, err := db.Exec(ctx, `WITH gone AS (DELETE FROM hopback_outbox WHERE segment IN (`+segs+`) AND id = $1 RETURNING *)
INSERT INTO hopback_outbox_set_aside (id, message, message_id, address, key, created_at, failed_since, reason)
SELECT id, message, message_id, address, key, created_at, coalesce(failed_since, clock_timestamp()), $2 FROM gone`, f.id, reason); err != nil {
				return err
			}
			if f.refused == "" {
				continue
			}
			// So have those behind it that wait for the same, and weren't tried.
			if _, err := db.Exec(ctx, `WITH gone AS (DELETE FROM hopback_outbox WHERE segment IN (`+segs+`) AND address = $1 AND created_at < clock_timestamp() - make_interval(secs => $2) RETURNING *)
INSERT INTO hopback_outbox_set_aside (id, message, message_id, address, key, created_at, failed_since, reason)
SELECT id, message, message_id, address, key, created_at, coalesce(failed_since, clock_timestamp()), $3 FROM gone`, f.refused, r.cfg.SetAsideAfter.Seconds(), reason); err != nil {
				return err
			}
			continue
		}
		if f.since.IsZero() {
			if _, err := db.Exec(ctx, "UPDATE hopback_outbox SET failed_since = clock_timestamp(), failure = $2 WHERE segment IN ("+segs+") AND id = $1", f.id, reason); err != nil {
				return err
			}
		}
	}
	return nil
}

// settled counts what settle has done, once it is committed, and returns how many
// messages of the batch are through.
func (r *Relay) settled(o outcome) int {
	waits, first := 0, error(nil)
	for _, f := range o.failed {
		if !f.final && f.since.IsZero() && f.refused == "" {
			if waits++; first == nil {
				first = f.err
			}
		}
		if f.final {
			r.setAside.Add(1)
			r.retries.forget(f.id)
			r.log.Error("outbox: a message was set aside in hopback_outbox_set_aside", "id", f.id, "error", f.err)
			continue
		}
		if f.refused == "" || r.cfg.Order == ByKey { // otherwise its address waits
			r.retries.later(f.id, r.cfg.Retry)
		}
	}
	if waits > 0 {
		r.log.Warn("outbox: the broker doesn't take messages; they wait, and are tried again", "messages", waits, "for", r.cfg.SetAsideAfter, "first", first)
	}
	for _, id := range o.accepted {
		r.retries.forget(id)
	}
	r.published.Add(int64(len(o.accepted)))
	return len(o.accepted)
}

// execer is a transaction, a pool or a connection.
type execer interface {
	DB
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// awaitBroker waits until the broker accepts messages, so that nothing is read, and no
// transaction held, while it doesn't.
func (r *Relay) awaitBroker(ctx context.Context, p *client.Publisher[*client.Message]) error {
	for {
		_, blocked := p.Blocked()
		if s := r.conn.State(); s.Closed {
			return &fatalError{fmt.Errorf("outbox: %w", client.ErrClosed)}
		} else if s.Connections > 0 && !blocked {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// retries holds the messages that the broker didn't take, until they are tried again.
type retries struct {
	mu sync.Mutex
	of map[int64]retry
}

type retry struct {
	due   time.Time
	pause time.Duration
	key   string
}

func (w *retries) later(id int64, first time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.of[id]
	e.pause = min(max(2*e.pause, first), max(maxRetry, first))
	e.due = time.Now().Add(e.pause)
	w.of[id] = e
}

func (w *retries) forget(id int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.of, id)
}

// hold notes the key of a message that the broker didn't take.
func (w *retries) hold(id int64, key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.of[id]
	e.key = key
	w.of[id] = e
}

// waitingKeys returns the ids without a key that aren't due, and the keys of the others.
func (w *retries) waitingKeys() (ids []int64, keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids, keys = []int64{}, []string{}
	now := time.Now()
	for id, e := range w.of {
		switch {
		case !now.Before(e.due):
		case e.key == "":
			ids = append(ids, id)
		default:
			keys = append(keys, e.key)
		}
	}
	return ids, keys
}

// waiting returns the ids that aren't due. It forgets those that have been due for long:
// another relay has published them.
func (w *retries) waiting() []int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	ids := []int64{}
	for id, e := range w.of {
		switch {
		case now.Before(e.due):
			ids = append(ids, id)
		case now.Sub(e.due) > 2*maxRetry:
			delete(w.of, id)
		}
	}
	return ids
}
