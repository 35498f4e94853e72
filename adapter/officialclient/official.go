package officialclient

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"runtime/debug"
	"strings"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// connection is what the adapter uses of a *rabbitmqamqp.AmqpConnection. Its
// state isn't among that: it says open when the session is dead.
type connection interface {
	consumer(ctx context.Context, queue string, credits int32) (consumer, error)
	publisher(ctx context.Context, to address.Address) (publisher, error)
	broker() client.Broker
	// deadLetters says whether a queue's arguments have a dead-letter exchange.
	deadLetters(ctx context.Context, queue string) bool
	// close returns in bounded time. May be called twice.
	close()
}

type consumer interface {
	Receiver
	close()
}

type publisher interface {
	publish(m *client.Message) (rabbitmqamqp.DeliveryState, error)
	close()
}

type dialer func(context.Context) (connection, error)

// PanicError is a panic within the official client.
type PanicError struct {
	Call  string // the call that panicked, such as "receive"
	Value any    // of the panic
	Stack []byte // as of runtime/debug.Stack
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("hopback: the official client panicked in %s: %v", e.Call, e.Value)
}

// guarded calls into the official client, and makes an error of its panics.
func guarded[T any](call string, f func() (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Call: call, Value: p, Stack: debug.Stack()}
		}
	}()
	return f()
}

func (d Dialer) dialer() dialer {
	return func(ctx context.Context) (connection, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		c, err := guarded("dial", func() (*rabbitmqamqp.AmqpConnection, error) { return d(ctx) })
		if err == nil && c == nil {
			err = argument.New("dial", nil, "returned no connection and no error", "return one of them")
		}
		if err != nil {
			if u, ok := errors.AsType[*url.Error](err); ok {
				err = u.Err // without the URL, which may hold a password
			}
			e := newError("connect", "", client.ErrUnreachable, err)
			if strings.Contains(err.Error(), "auth failed") { // go-amqp has no type for it
				e.Kind = client.ErrAuthentication
			}
			return nil, e
		}
		return &official{conn: c}, nil
	}
}

type official struct{ conn *rabbitmqamqp.AmqpConnection }

func (o *official) broker() client.Broker {
	props := o.conn.Properties()
	text := func(key string) string { s, _ := props[key].(string); return s }
	return client.Broker{Product: text("product"), Version: text("version"), Node: text("node"), Cluster: text("cluster_name")}
}

func (o *official) deadLetters(ctx context.Context, queue string) bool {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	q, err := guarded("manage", func() (*rabbitmqamqp.AmqpQueueInfo, error) { return o.conn.Management().QueueInfo(ctx, queue) })
	return err == nil && q != nil && q.Arguments()["x-dead-letter-exchange"] != nil
}

func (o *official) consumer(ctx context.Context, queue string, credits int32) (consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := guarded("attach", func() (*rabbitmqamqp.Consumer, error) {
		return o.conn.NewConsumer(ctx, queue, &rabbitmqamqp.ConsumerOptions{InitialCredits: credits})
	})
	if err != nil {
		return nil, newError("consume", queue, client.ErrConnectionLost, err)
	}
	return officialConsumer{c}, nil
}

// publisher attaches a link of to's own. One link for all addresses, with the
// address in each message, would overwrite the sender's To property.
//
// ctx must not have a deadline: see settle.
func (o *official) publisher(ctx context.Context, to address.Address) (publisher, error) {
	var target rabbitmqamqp.ITargetAddress = &rabbitmqamqp.ExchangeAddress{Exchange: to.ExchangeName(), Key: to.RoutingKey()}
	if to.IsQueue() {
		target = &rabbitmqamqp.QueueAddress{Queue: to.QueueName()}
	}
	p, err := guarded("attach", func() (*rabbitmqamqp.Publisher, error) { return o.conn.NewPublisher(ctx, target, nil) })
	if err != nil {
		return nil, newError("forward", to.String(), client.ErrConnectionLost, err)
	}
	return officialPublisher{p}, nil
}

func (o *official) close() {
	bounded("close", func(ctx context.Context) error { return o.conn.Close(ctx) })
}

type officialConsumer struct{ *rabbitmqamqp.Consumer }

// close detaches the consumer. It must come before the connection is closed: a
// connection that closes first counts a delivery for all that was prefetched.
func (c officialConsumer) close() { bounded("close", c.Close) }

type officialPublisher struct{ *rabbitmqamqp.Publisher }

func (p officialPublisher) close() { bounded("close", p.Close) }

// publish waits for the broker's answer, however long that takes: while the
// broker has an alarm, it doesn't answer, and giving up would make duplicates. It
// ends when the link does.
func (p officialPublisher) publish(m *client.Message) (rabbitmqamqp.DeliveryState, error) {
	// Without a deadline: see settle.
	r, err := guarded("publish", func() (*rabbitmqamqp.PublishResult, error) { return p.Publish(context.Background(), m) })
	if err != nil {
		return nil, err
	}
	if r == nil {
		return nil, errors.New("the official client returned no result")
	}
	return r.Outcome, nil
}

// bounded closes something, and waits for that no longer than closeTimeout: the
// official client holds a lock while it reconnects, and a broker may not answer.
func bounded(call string, f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		// An error says that it was closed, or lost, already.
		_, _ = guarded(call, func() (struct{}, error) { return struct{}{}, f(ctx) })
	}()
	t := time.NewTimer(closeTimeout)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// newError makes a *client.Error of what the official client returned. kind is
// used unless the broker's condition tells it more exactly.
func newError(op, target string, kind, err error) *client.Error {
	e := &client.Error{Op: op, Target: target, Kind: kind, Err: err}
	if remote, ok := errors.AsType[*amqp.Error](err); ok && remote != nil {
		e.Condition, e.Text = string(remote.Condition), remote.Description
		switch remote.Condition {
		case amqp.ErrCondNotFound, amqp.ErrCondResourceDeleted:
			e.Kind = client.ErrNotFound
		case amqp.ErrCondUnauthorizedAccess:
			e.Kind = client.ErrUnauthorized
		case amqp.ErrCondMessageSizeExceeded:
			e.Kind = client.ErrTooLarge
		}
	}
	return e
}

// onlyLink says whether err certainly ended no more than the link it came from.
// go-amqp answers an attach that was refused with a bare *amqp.Error, and wraps
// the broker's error in the layer that it ended everywhere else.
func onlyLink(err error) bool {
	if _, ok := errors.AsType[*amqp.ConnError](err); ok {
		return false
	}
	if _, ok := errors.AsType[*amqp.SessionError](err); ok {
		return false
	}
	if _, ok := errors.AsType[*amqp.LinkError](err); ok {
		return true
	}
	_, refused := errors.AsType[*amqp.Error](err)
	return refused
}
