package partitionrig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// Rig is a group with workers.
type Rig struct {
	URL   string
	Dial  func(ctx context.Context, network, address string) (net.Conn, error) // nil: the network
	Group partition.Group
	Check *Check
	// Endpoints and IdleTimeout are those of the workers' client.Config.
	Endpoints   []string
	IdleTimeout time.Duration
	// Order, if not nil, checks the messages in place of Check.
	Order *Check
	// Handle is how long a handler takes, and Failing the share of attempts that fail, of the keys
	// for which Fails returns true; nil: of all.
	Handle  time.Duration
	Failing float64
	Fails   func(key int) bool
	Config  partition.Config
	// ByQueue publishes to the queues themselves, by another hash of the key.
	ByQueue bool
	Logger  *slog.Logger
	// Wrap, if not nil, returns the middleware of a worker.
	Wrap func(worker string) client.Middleware
	// Done is called with each message that was completed.
	Done func(key int, n uint32)

	// Failures counts the attempts that failed.
	Failures atomic.Int64
}

// Worker is a process with one connection.
type Worker struct {
	Name string
	rig  *Rig

	conn  *client.Conn
	leave context.CancelFunc
	done  chan struct{}
	err   error
	dead  chan struct{} // closed when it has crashed

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// connect opens a connection whose network can be cut.
func (r *Rig) connect(ctx context.Context, w *Worker) (*client.Conn, error) {
	dial := r.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	return client.Connect(ctx, r.URL, client.Config{
		Name: w.Name, Logger: r.Logger, Endpoints: r.Endpoints, IdleTimeout: r.IdleTimeout, Reconnect: client.ReconnectBackoff{Min: 20 * time.Millisecond, Max: time.Second},
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			select {
			case <-w.dead:
				return nil, errCrashed
			default:
			}
			c, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			select {
			case <-w.dead: // since then
				_ = c.Close()
				return nil, errCrashed
			default:
			}
			w.conns[c] = struct{}{}
			return c, nil
		},
	})
}

// Start starts a worker.
func (r *Rig) Start(ctx context.Context, name string) (*Worker, error) {
	w := &Worker{Name: name, rig: r, done: make(chan struct{}), dead: make(chan struct{}), conns: map[net.Conn]struct{}{}}
	conn, err := r.connect(ctx, w)
	if err != nil {
		return nil, err
	}
	w.conn = conn
	cfg := r.Config
	cfg.Worker = name
	assigned := cfg.OnAssigned
	cfg.OnAssigned = func(p int, owned bool) {
		r.Check.Assigned(name, p, owned)
		if assigned != nil {
			assigned(p, owned)
		}
	}
	ctx, w.leave = context.WithCancel(context.WithoutCancel(ctx))
	var h client.Handler = client.HandlerFunc(w.handle)
	if r.Wrap != nil {
		h = r.Wrap(name)(h)
	}
	go func() {
		defer close(w.done)
		w.err = partition.Consume(ctx, conn, r.Group, h, cfg)
	}()
	return w, nil
}

// Handler is the handler of a consumer without a gate.
func (r *Rig) Handler(name string) client.Handler {
	return client.HandlerFunc((&Worker{Name: name, rig: r, dead: make(chan struct{})}).handle)
}

var (
	errBusy    = errors.New("the service is busy")
	errCrashed = errors.New("the worker has crashed")
)

func (w *Worker) handle(ctx context.Context, d *client.Delivery) error {
	r := w.rig
	key, n, ok := parse(string(d.Message().GetData()))
	if !ok {
		return retry.Permanent(errors.New("no message of the test"))
	}
	select {
	case <-w.dead:
		return errCrashed
	default:
	}
	check := cmp.Or(r.Order, r.Check)
	check.Begin(w.Name, key, n)
	err := w.work(ctx, key)
	if !check.End(w.Name, key, n, err == nil) {
		return errCrashed
	}
	if err == nil && r.Done != nil {
		r.Done(key, n)
	}
	return err
}

func (w *Worker) work(ctx context.Context, key int) error {
	t := time.NewTimer(w.rig.Handle)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	case <-w.dead:
		return errCrashed
	}
	if r := w.rig; r.Failing > 0 && (r.Fails == nil || r.Fails(key)) && rand.Float64() < r.Failing {
		r.Failures.Add(1)
		return errBusy
	}
	return nil
}

// Leave stops the worker, and returns its error.
func (w *Worker) Leave() error {
	w.leave()
	<-w.done
	return errors.Join(w.err, w.conn.Close(context.Background()))
}

// Kill ends it as a crash does: its connections end, and nothing is settled any more.
func (w *Worker) Kill() {
	w.rig.Check.Gone(w.Name) // before anybody else can notice
	if w.rig.Order != nil {
		w.rig.Order.Gone(w.Name)
	}
	close(w.dead)
	w.cut()
	w.leave()
	go func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = w.conn.Close(ctx)
		<-w.done
	}()
}

// Conn is its connection.
func (w *Worker) Conn() *client.Conn { return w.conn }

// Done is closed when Consume has returned.
func (w *Worker) Done() <-chan struct{} { return w.done }

// Err is Consume's error.
func (w *Worker) Err() error { return w.err }

// Cut ends its connections. It opens others.
func (w *Worker) Cut() {
	w.rig.Check.Cut(w.Name)
	w.cut()
}

func (w *Worker) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.conns {
		_ = c.Close()
		delete(w.conns, c)
	}
}

// Publisher publishes the rig's messages.
type Publisher struct {
	rig *Rig
	p   *client.Publisher[string]
}

// NewPublisher returns one. A key's messages must come from one Publisher at a time.
func (r *Rig) NewPublisher(ctx context.Context, conn *client.Conn) (*Publisher, error) {
	p, err := client.NewPublisher[string](ctx, conn, address.Address{}, client.PublisherConfig{})
	return &Publisher{r, p}, err
}

// Publish publishes one message for each of the keys, in their order.
func (p *Publisher) Publish(ctx context.Context, keys ...int) error {
	texts := make([]string, len(keys))
	for i, key := range keys {
		texts[i] = fmt.Sprintf("%d/%d", key, p.rig.Check.Publish(key))
	}
	return p.p.PublishAll(ctx, texts, func(text string, m *client.Message) {
		m.Data = [][]byte{[]byte(text)}
		key, _, _ := strings.Cut(text, "/")
		client.PublishTo(p.rig.address(key))(m)
	})
}

func (r *Rig) address(key string) address.Address {
	if !r.ByQueue {
		return r.Group.Address(key)
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(key))
	return address.Queue(r.Group.Queues()[h.Sum32()%uint32(r.Group.Partitions)])
}

func parse(text string) (key int, n uint32, ok bool) {
	k, v, ok := strings.Cut(text, "/")
	key, err := strconv.Atoi(k)
	m, err2 := strconv.ParseUint(v, 10, 32)
	return key, uint32(m), ok && err == nil && err2 == nil
}

// KeyOf is the key of a delivery whose queue it came to directly.
func KeyOf(d *client.Delivery) string {
	key, _, _ := strings.Cut(string(d.Message().GetData()), "/")
	return key
}
