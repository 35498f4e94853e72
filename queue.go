package hopback

import (
	"context"
	"errors"
	"sync"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Queue is a quorum queue of values of type T. Failed messages are retried as Retry says. Conn
// and Name are required. Set the fields before the first call, and don't change them afterwards.
// Its methods are safe for concurrent use.
type Queue[T any] struct {
	// Conn is the connection to use.
	Conn *Conn
	// Name is the queue's name: 1 to 255 bytes of UTF-8 without line breaks. It can't start with
	// "amq.".
	Name string
	// Retry decides what happens to a message whose handler fails. All programs that use the
	// queue should have the same policy. Default: the zero [Policy], which retries five times.
	Retry Policy
	// Settings are further settings of the queue for Declare, such as its delivery limit or
	// maximum length. Leave its Name empty, or set it to the same name. Default: RabbitMQ's
	// defaults, and a dead-letter queue named <Name>.dead.
	Settings declare.QuorumQueue
	// Codec encodes and decodes values. Default: [client.JSONCodec].
	Codec client.Codec
	// Middleware wraps the handler inside the retries, so it sees the handler's own errors. The first one is the
	// outermost. Most middleware belongs here: breaker, ratelimit, dedupe, ordered. For middleware around the
	// retries, use [Queue.Handler].
	Middleware []client.Middleware

	mu        sync.Mutex
	opening   chan struct{} // holds a value while a publisher is opened
	publisher *client.Publisher[T]
}

// Topology returns what [Queue.Declare] creates: the queue, its dead-letter queue, and the
// exchanges and delay queues that its policy needs. Use it to check or print a topology without
// a broker. See [retry.Topology].
func (q *Queue[T]) Topology() (declare.Topology, error) {
	queue := q.Settings
	switch queue.Name {
	case "":
		queue.Name = q.Name
	case q.Name:
	default:
		return declare.Topology{}, argument.New("Queue.Settings.Name", queue.Name, "differs from Queue.Name", "leave it empty")
	}
	t, err := retry.Topology(q.Retry, queue)
	return t, named(err)
}

// named gives an invalid argument the name that the caller knows it by: retry.Topology has a list of
// queues.
func named(err error) error {
	invalid, ok := errors.AsType[*argument.Error](err)
	if !ok || len(invalid.Path) < 3 || invalid.Path[0] != argument.Root("work")[0] {
		return err
	}
	e := *invalid
	at := argument.Root("Queue")
	if field := invalid.Path[2]; field.Name != "Name" {
		at = at.Field("Settings")
	}
	e.Path = append(at, invalid.Path[2:]...)
	return &e
}

// Declare creates the queue, and what its policy needs, on the broker. Objects that already
// exist with the same settings stay unchanged, so every program can call Declare when it starts.
//
// The user needs the configure, write, and read permissions. If your program's user has no
// configure permission, don't call Declare; let a deployment job call it, or run "hopback
// topology apply".
//
// The errors are those of [declare.Apply]. If an object exists with other settings, the error is
// [declare.ErrConflict], and that object stays unchanged.
func (q *Queue[T]) Declare(ctx context.Context) error {
	if q == nil || q.Conn == nil {
		return errNoConn()
	}
	topology, err := q.Topology()
	if err != nil {
		return err
	}
	_, err = declare.Apply(ctx, q.Conn.Management(), topology)
	return err
}

// Publish sends v to the queue and waits for the broker's confirmation. It returns nil only when
// a majority of the queue's replicas has the message. For high throughput, call it from many
// goroutines, or use [client.Publisher.PublishAll] of [Queue.Publisher].
//
// Each edit can set headers, properties, or annotations of the message before it is sent. The
// errors are those of [client.Publisher.Publish]; [client.SafeToRetry] reports whether you can
// publish v again without a duplicate, and [client.WorthRetrying] whether that can succeed.
func (q *Queue[T]) Publish(ctx context.Context, v T, edit ...func(*Message)) error {
	p, err := q.Publisher(ctx)
	if err != nil {
		return err
	}
	return p.Publish(ctx, v, edit...)
}

// Publisher returns the publisher that [Queue.Publish] uses. The first call opens it, with the
// errors of [client.NewPublisher]. It closes together with the connection.
func (q *Queue[T]) Publisher(ctx context.Context) (*client.Publisher[T], error) {
	if q == nil {
		return nil, errNoConn()
	}
	q.mu.Lock()
	if q.opening == nil {
		q.opening = make(chan struct{}, 1)
	}
	p, opening := q.publisher, q.opening
	q.mu.Unlock()
	if p != nil {
		return p, nil
	}
	select {
	case opening <- struct{}{}:
		defer func() { <-opening }()
	case <-ctx.Done():
		return nil, &client.Error{Op: "publish", Target: q.Name, Kind: client.ErrNotSent, Err: context.Cause(ctx)}
	}
	q.mu.Lock()
	p = q.publisher
	q.mu.Unlock()
	if p != nil { // another call has opened it
		return p, nil
	}
	if err := q.check(); err != nil {
		return nil, err
	}
	p, err := client.NewPublisher[T](ctx, q.Conn, declare.QuorumQueue{Name: q.Name}.Address(), client.PublisherConfig{Codec: q.Codec})
	if err != nil {
		return nil, err
	}
	q.mu.Lock()
	q.publisher = p
	q.mu.Unlock()
	return p, nil
}

// Handler returns a handler that decodes values, calls handle, and retries by the queue's
// policy. Use it to add middleware around the retries, and pass the result to
// [client.Conn.Consume]: see [client.Middleware]. Without middleware, [Queue.Consume] does the
// same.
func (q *Queue[T]) Handler(handle func(ctx context.Context, v T) error) client.Handler {
	codec := q.Codec
	if codec == nil {
		codec = client.JSONCodec{}
	}
	return retry.With(q.Retry)(client.Chain(q.Middleware...)(client.Typed(codec, handle)))
}

// Consume calls handle for each message of the queue until ctx ends. Then it lets running
// handlers finish, for up to cfg.Grace (30 s by default), and returns nil. What happens to a
// message depends on the error of handle:
//
//   - nil: it is acknowledged.
//   - An error: it is retried after the policy's delay. After the last retry it goes to
//     <Name>.dead.
//   - [Permanent](err): it goes to <Name>.dead at once.
//   - [After](d, err): it is retried after d. [Snooze](d) does the same and uses up no retry.
//   - [Discard](err): it is acknowledged and dropped.
//
// Messages whose body can't be decoded, or whose handler panics, go to <Name>.dead. A message
// can be handled more than once, so handle should be idempotent.
//
// When it starts, Consume checks that the queue and what its policy needs exist, and returns an
// error that names what is missing. Later it survives the loss of the connection. See
// [client.Conn.Consume] for the errors.
func (q *Queue[T]) Consume(ctx context.Context, handle func(ctx context.Context, v T) error, cfg ConsumerConfig) error {
	if err := q.check(); err != nil {
		return err
	}
	if handle == nil {
		return argument.New("handle", nil, "is nil", "pass a function that handles a message")
	}
	return q.Conn.Consume(ctx, q.Name, q.Handler(handle), cfg)
}

func (q *Queue[T]) check() error {
	if q == nil || q.Conn == nil {
		return errNoConn()
	}
	_, err := q.Topology()
	return err
}

func errNoConn() error {
	return argument.New("Queue.Conn", nil, "is nil", "set it to the connection from hopback.Connect")
}
