package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Order is the order in which a relay publishes. See [RelayConfig.Order].
type Order string

const (
	// OrderNone publishes many messages at once, in any order. Any number of relays share the
	// work. It is the default.
	OrderNone Order = "unordered"
	// OrderByKey publishes messages with the same key in order, one after the other. One relay
	// works, and the others stand by. They take over at once if its session with the database is
	// lost, and after 15 s if it stops renewing its lease. A message that can't be published now
	// delays later ones with its key. Messages without a key aren't ordered.
	OrderByKey Order = "by-key"
)

// RelayConfig configures a [Relay]. The zero value is ready to use.
type RelayConfig struct {
	// Order is the order in which messages are published. All relays of an outbox must use the
	// same: one with another order waits until the others have stopped. Default: OrderNone.
	Order Order
	// Batch is how many messages are read and published together, up to 10,000. A batch is also
	// limited to 16 MiB; a larger message is read alone. Messages that the broker doesn't accept
	// get at most a tenth of each batch. Default: 1,000.
	Batch int
	// Workers is how many batches a relay with OrderNone publishes at once, up to 64. Each one
	// needs a database connection during that time. Default: 2.
	Workers int
	// PollInterval is how long a relay waits at most before it reads again, if no notification
	// wakes it. Default: 1 s.
	PollInterval time.Duration
	// PublishTimeout is how long a batch waits for the broker's confirmations. Messages without
	// one are then published again. With OrderNone it also limits the duration of a transaction:
	// PostgreSQL terminates one that is idle for 10 s longer. Default: 10 s.
	PublishTimeout time.Duration
	// SetAsideAfter is how long the relay retries a message that the broker doesn't accept: no
	// queue is bound for it, its exchange is missing, a queue rejects it, the user may not write
	// to its exchange, or its user-id isn't the relay's user. Then the relay moves it to the
	// table hopback_outbox_set_aside. Messages that can never be published are moved at once. A
	// lost or refused connection or link doesn't count as a failed attempt. Default: 1 h, by the
	// database's clock.
	SetAsideAfter time.Duration
	// Retry is the pause before the relay tries a message again that the broker didn't accept. It
	// doubles with each failure, up to a minute. Default: 1 s.
	Retry time.Duration
	// Logger logs messages that are set aside, and database errors after which the relay
	// continues. Default: slog.Default().
	Logger *slog.Logger
}

const (
	maxBatch   = 10_000
	maxWorkers = 64
	maxRetry   = time.Minute
)

func (c RelayConfig) withDefaults() (RelayConfig, error) {
	switch {
	case c.Order != "" && c.Order != OrderNone && c.Order != OrderByKey:
		return c, argument.New("RelayConfig.Order", string(c.Order), "is unknown", "use outbox.OrderNone or outbox.OrderByKey")
	case c.Batch < 0 || c.Batch > maxBatch:
		return c, argument.New("RelayConfig.Batch", c.Batch, "is out of range", "use 1 to 10,000, or 0 for the default of 1,000")
	case c.Workers < 0 || c.Workers > maxWorkers:
		return c, argument.New("RelayConfig.Workers", c.Workers, "is out of range", "use 1 to 64, or 0 for the default of 2")
	case c.Order == OrderByKey && c.Workers > 1:
		return c, argument.New("RelayConfig.Workers", c.Workers, "has no effect with outbox.OrderByKey", "leave it out")
	case c.PollInterval < 0 || c.PublishTimeout < 0 || c.SetAsideAfter < 0 || c.Retry < 0:
		return c, argument.New("RelayConfig", nil, "has a negative duration", "use positive ones, or 0 for the default")
	}
	if c.Order == "" {
		c.Order = OrderNone
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

// Relay publishes committed messages of the outbox. Make one with [NewRelay].
type Relay struct {
	pool *pgxpool.Pool
	conn *client.Conn
	cfg  RelayConfig
	log  *slog.Logger

	limits limits

	segments *segments
	sweeps   sweeps
	again    turns // to read messages that the broker didn't accept before
	waits    *waits
	gates    *gates
	signers  *signers
	lonely   chan struct{} // slots for publishing on a separate link
	epoch    int64         // of the last lease; 0: none. Only lead uses it
	// more wakes an idle worker, because another has found a whole batch.
	more chan struct{}
	// notified wakes the worker that sleeps.
	notified chan struct{}
	sleeper  chan struct{} // permission to be that worker
	// scheduled wakes handOver.
	scheduled chan struct{}

	published, setAside atomic.Int64
}

// NewRelay returns a relay for the outbox in pool's database. Create the tables with
// [postgres.Migrate] first. Then call [Relay.Run]. The error is an *argument.Error. NewRelay
// sends nothing to the database.
//
// The relay opens connections with pool's configuration, including BeforeConnect and
// AfterConnect. They don't count toward pool's MaxConns: with OrderNone there are Workers plus
// three, and with OrderByKey six.
func NewRelay(pool *pgxpool.Pool, conn *client.Conn, cfg RelayConfig) (*Relay, error) {
	if pool == nil {
		return nil, argument.New("pool", nil, "is nil", "pass a pool from pgxpool.New")
	}
	if conn == nil {
		return nil, argument.New("conn", nil, "is nil", "pass a connection from client.Connect")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	r := &Relay{
		pool: pool, conn: conn, cfg: cfg, log: cfg.Logger, limits: defaultLimits,
		segments: &segments{}, waits: &waits{of: map[int64]*wait{}}, lonely: make(chan struct{}, lonely),
		signers: &signers{first: cfg.Retry, log: cfg.Logger, of: map[string]*signer{}},
		more:    make(chan struct{}, 1), notified: make(chan struct{}, 1), sleeper: make(chan struct{}, 1),
		scheduled: make(chan struct{}, 1),
	}
	r.gates = &gates{first: cfg.Retry, log: cfg.Logger, waits: r.waits, of: map[string]*gate{}, poisons: map[string]bool{}}
	return r, nil
}

// RelayStats counts the messages of a [Relay].
type RelayStats struct {
	// Published is how many messages the broker has accepted and the relay has deleted.
	Published int64
	// SetAside is how many messages were moved to hopback_outbox_set_aside.
	SetAside int64
}

// Stats returns the counts since NewRelay.
func (r *Relay) Stats() RelayStats {
	return RelayStats{Published: r.published.Load(), SetAside: r.setAside.Load()}
}

// Run publishes messages until ctx is canceled. Then it finishes the batches in flight and
// returns nil. If the database or the broker is lost, it reconnects and continues.
//
// Run returns an error if the outbox has no tables, or if the user lacks permissions on them.
//
// Every wait for the database is limited. If the database doesn't answer a statement for 22 s,
// Run logs that and reconnects. After ctx is canceled, Run returns within 25 s, even if the
// database and the broker don't answer, or later if PublishTimeout is longer than 10 s.
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
			if err := r.repeat(ctx, what, step); err != nil {
				stop(err)
			}
		})
	}
	start("truncate", r.rotate)
	start("listen", r.listen)
	start("schedule", r.handOver)
	if r.cfg.Order == OrderByKey {
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

// repeat repeats step, with a pause after each error. It returns an error if another attempt
// would fail, too.
func (r *Relay) repeat(ctx context.Context, what string, step func(context.Context) error) error {
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
			r.log.Warn("outbox: a part of the relay failed and is tried again", "part", what, "in", pause, "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, most)
	}
}

// awaitBroker waits until the broker accepts messages, so that in the meantime nothing is read
// and no transaction is open.
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
