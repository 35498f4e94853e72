package hopback

import (
	"context"
	"sync"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/retry"
)

// Queue is a quorum queue of values of type T whose failed messages are retried. Conn and Name
// are required. Set the fields before the first call, and don't change them afterwards. Its
// methods may be called concurrently.
type Queue[T any] struct {
	// Conn is the connection to use.
	Conn *Conn
	// Name is the queue's name: 1 to 255 bytes of UTF-8 without line breaks. It can't begin with
	// "amq.".
	Name string
	// Retry decides what happens to a message whose handler fails. The zero value retries it five
	// times. All programs that use the queue should have the same policy.
	Retry Policy
	// Settings are further settings of the queue, such as its delivery limit or maximum length,
	// for Declare. Its Name stays empty, or is the same. Default: RabbitMQ's defaults; messages
	// that aren't retried any more go to the queue <Name>.dead.
	Settings declare.QuorumQueue
	// Codec encodes and decodes values. Default: [client.JSONCodec].
	Codec client.Codec

	mu        sync.Mutex
	opening   chan struct{} // holds a value while a publisher is opened
	publisher *client.Publisher[T]
}

// Topology returns what Declare creates: the queue, its dead-letter queue, and the exchanges and
// delay queues that its policy needs. See [retry.Topology].
func (q *Queue[T]) Topology() (declare.Topology, error) {
	queue := q.Settings
	switch queue.Name {
	case "":
		queue.Name = q.Name
	case q.Name:
	default:
		return declare.Topology{}, argument.New("Queue.Settings.Name", queue.Name, "differs from Queue.Name", "leave it empty")
	}
	return retry.Topology(q.Retry, queue)
}

// Declare creates the queue, and what its policy needs, on the broker. What exists already with
// the same settings stays as it is, so every program may call Declare when it starts. The user
// needs the configure, write, and read permissions. A program whose user has no configure
// permission leaves Declare out; some other program, or "hopback topology apply", calls it.
//
// The errors are those of [declare.Apply]: a queue that exists with other settings is
// [declare.ErrConflict], and nothing about it changes.
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
// the broker has the message on a majority of the queue's replicas. Call it from many goroutines
// for throughput, or use [client.Publisher.PublishAll] of the queue's Publisher.
//
// Each edit can set headers, properties, or annotations of the message before it is sent. The
// errors are those of [client.Publisher.Publish]; [client.SafeToRetry] reports whether sending v
// again can't store it twice.
func (q *Queue[T]) Publish(ctx context.Context, v T, edit ...func(*Message)) error {
	p, err := q.Publisher(ctx)
	if err != nil {
		return err
	}
	return p.Publish(ctx, v, edit...)
}

// Publisher returns the publisher that Publish uses. The first call opens it, with the errors of
// [client.NewPublisher]. It closes together with the connection.
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

// Handler returns handle as a handler that decodes values and retries by the queue's policy. Use
// it to put middleware around it, or inside: see [client.Middleware]. Consume is
// Conn.Consume with this handler.
func (q *Queue[T]) Handler(handle func(ctx context.Context, v T) error) client.Handler {
	codec := q.Codec
	if codec == nil {
		codec = client.JSONCodec{}
	}
	return retry.With(q.Retry)(client.Typed(codec, handle))
}

// Consume calls handle for each message of the queue until ctx ends. Then it lets running handlers
// finish, for up to cfg.Grace (30 s by default), and returns nil.
//
//	handle returns      the message
//	nil                 is acknowledged
//	an error            comes back after the policy's delay; after the last retry it goes to <Name>.dead
//	Permanent(err)      goes to <Name>.dead at once
//	After(d, err)       comes back after d
//
// A message whose body can't be decoded, or whose handler panics, goes to <Name>.dead. Consume
// checks when it starts that the queue and what its policy needs exist, and returns an error that
// says what is missing. It survives the loss of the connection. See [client.Conn.Consume] for the
// errors. A message may be handled more than once, so handle should be idempotent.
func (q *Queue[T]) Consume(ctx context.Context, handle func(ctx context.Context, v T) error, cfg ConsumerConfig) error {
	if err := q.check(); err != nil {
		return err
	}
	if handle == nil {
		return argument.New("handle", nil, "is nil", "give a function that handles a message")
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
