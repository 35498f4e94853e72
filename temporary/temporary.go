// Package temporary consumes from a queue of the consumer's own: declared for it, bound,
// and deleted with it. Each instance of a service has its own copy of every message, for
// instance to keep a cache fresh:
//
//	err := temporary.Consume(ctx, conn, temporary.Queue{
//		Bindings: []declare.Binding{{Source: "prices", Key: "price.#"}},
//	}, client.JSON(update), client.ConsumerConfig{})
//
// RabbitMQ's exclusive queues end with their connection, and all that they hold. A queue of
// this package outlives the loss of its connection for Queue.Linger: what comes meanwhile
// waits in it. Where it has gone after all, it is declared again, and Queue.Lost is told.
package temporary

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
)

// Queue describes the queue. The zero Queue has no bindings: publishers send to its
// address, which Declared tells.
type Queue struct {
	// Prefix is how the name begins. A random part of 26 characters follows it. Default:
	// "temporary-".
	Prefix string
	// Bindings are from exchanges that exist. Their Queue and Exchange are left empty.
	Bindings []declare.Binding
	// Linger is how long the queue stays without its consumer, with what comes meanwhile.
	// It should outlast reconnects. Default: 5 minutes.
	Linger time.Duration
	// MaxLength is how many messages may wait; the oldest are dropped then. Default: no
	// limit.
	MaxLength int64
	// Declared, if not nil, is called with the queue's name before its first message is
	// consumed, and again whenever the queue was declared anew. It must not block.
	Declared func(name string)
	// Lost, if not nil, is called when the queue was gone and has been declared and bound
	// again. Messages of the time between are lost, and those that waited in it. A cache
	// should be read afresh. It is called on a goroutine of its own, and Consume returns
	// after it.
	Lost func()
	// Logger is told of a queue that was gone. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultPrefix = "temporary-"
	defaultLinger = 5 * time.Minute
	// deleteTimeout bounds the deletion at the end. The queue expires otherwise.
	deleteTimeout = 5 * time.Second
	// lookEvery is how often the consumer is asked whether its queue is there. It costs no
	// request.
	lookEvery    = 200 * time.Millisecond
	pauseBetween = time.Second
)

// Consume declares the queue and its bindings, and consumes from it until ctx ends: see
// [client.Conn.Consume], whose errors it returns. Then it deletes the queue.
//
// The queue is a classic one. It has a name that nobody else has, and isn't exclusive in
// AMQP 0-9-1's sense, since a Conn may reach it over another connection. Its messages are
// lost with the node that they are on. retry.With refuses such a queue. What fails is best
// tried again in place, or ignored until the next message tells more.
//
// An error at the start is an *argument.Error for a bad q, a *declare.Error if the queue
// can't be declared or bound, or one of Consume's.
func Consume(ctx context.Context, conn *client.Conn, q Queue, h client.Handler, cfg client.ConsumerConfig) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	if f, ok := h.(client.HandlerFunc); h == nil || ok && f == nil {
		return argument.New("handler", nil, "is nil", "give Consume a Handler, such as client.JSON(func(ctx, price) error {...})")
	}
	q, t, err := q.topology()
	if err != nil {
		return err
	}
	name := t.Queues[0].Address().QueueName()
	defer remove(conn, t)
	if err := apply(ctx, conn, t); err != nil || ctx.Err() != nil {
		return err
	}
	if q.Declared != nil {
		q.Declared(name)
	}
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		q.watch(watching, conn, t, name)
	}()
	defer func() {
		stop()
		<-watched
	}()
	return conn.Consume(ctx, name, h, cfg)
}

// apply declares the queue, again and again while the connection is lost. It returns nil
// if ctx has ended.
func apply(ctx context.Context, conn *client.Conn, t declare.Topology) error {
	for {
		_, err := declare.Apply(ctx, conn.Management(), t)
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if !errors.Is(err, client.ErrConnectionLost) && !errors.Is(err, client.ErrOutcomeUnknown) {
			return fmt.Errorf("temporary queue: %w", err)
		}
		if !wait(ctx, lookEvery) {
			return nil
		}
	}
}

// watch declares the queue again when its consumer finds it gone. The consumer goes on
// looking for it meanwhile.
func (q Queue) watch(ctx context.Context, conn *client.Conn, t declare.Topology, name string) {
	unfinished := false // it was declared again, and not all of its bindings
	for wait(ctx, lookEvery) {
		gone := unfinished || slices.ContainsFunc(conn.Stats().Consumers, func(c instrument.ConsumerStats) bool {
			return c.Queue == name && !c.Up && errors.Is(c.Err, client.ErrNotFound)
		})
		if !gone {
			continue
		}
		report, err := declare.Apply(ctx, conn.Management(), t)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			unfinished = true // its consumer may have it again before it is bound
			q.Logger.Warn("hopback: a temporary queue is gone and can't be declared again; trying on", "queue", name, "error", err)
			wait(ctx, pauseBetween)
		case unfinished || report.Count(declare.Created) > 0:
			unfinished = false
			q.Logger.Warn("hopback: a temporary queue was gone and has been declared again; messages of the time between are lost", "queue", name)
			if q.Declared != nil {
				q.Declared(name)
			}
			if q.Lost != nil {
				q.Lost()
			}
		}
	}
}

// topology checks q.
func (q Queue) topology() (Queue, declare.Topology, error) {
	if q.Prefix == "" {
		q.Prefix = defaultPrefix
	}
	if q.Linger == 0 {
		q.Linger = defaultLinger
	}
	if q.Logger == nil {
		q.Logger = slog.Default()
	}
	name := q.Prefix + rand.Text()
	at := argument.Root("Queue")
	switch {
	case address.Queue(name).Validate() != nil:
		return q, declare.Topology{}, argument.At(at.Field("Prefix"), argument.Malformed, q.Prefix, "makes no name of a queue", "use at most 229 bytes of UTF-8, without line breaks")
	case q.Linger < time.Second:
		return q, declare.Topology{}, argument.At(at.Field("Linger"), argument.OutOfRange, q.Linger, "is below a second", "use the time that a reconnect may take, such as 5m")
	case q.MaxLength < 0:
		return q, declare.Topology{}, argument.At(at.Field("MaxLength"), argument.OutOfRange, q.MaxLength, "is negative", "leave it out for no limit")
	}
	t := declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: name, Expires: q.Linger, MaxLength: q.MaxLength, DeadLetter: declare.Drop()}}}
	for i, b := range q.Bindings {
		if b.Queue != "" || b.Exchange != "" {
			return q, t, argument.At(at.Field("Bindings").Index(i), argument.Conflict, b.Queue+b.Exchange, "names a destination", "leave Queue and Exchange empty: it is the temporary queue")
		}
		b.Queue = name
		t.Bindings = append(t.Bindings, b)
	}
	return q, t, t.Validate()
}

// remove deletes the queue, whose messages nobody else wants.
func remove(conn *client.Conn, t declare.Topology) {
	ctx, cancel := context.WithTimeout(context.Background(), deleteTimeout)
	defer cancel()
	t.Bindings = nil // they go with the queue
	_, _ = declare.Delete(ctx, conn.Management(), t)
}

// wait is false if ctx has ended.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(max(d, 0))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
