// Package migrate moves the messages of a live queue to a new one. Use it to change what RabbitMQ
// can't change in place, such as a queue's type or an argument that no policy can set.
//
//	report, err := migrate.Run(ctx, conn, api, migrate.Config{
//		Old: "orders",
//		New: declare.QuorumQueue{Name: "orders.v2", DeliveryLimit: 5, DeadLetter: declare.ToQueue("orders.dead")},
//	})
//
// Publishers and consumers can continue at the same time. Every message is in a queue at all
// times. [Run] takes these steps:
//
//  1. Declare the new queue.
//  2. Bind it wherever the old queue is bound.
//  3. Unbind the old queue.
//  4. Move its messages. Run acknowledges each one only after the broker has confirmed its copy.
//  5. Delete the old queue when it is empty and has no consumers.
//
// Some messages are duplicated: those published between steps 2 and 3 go to both queues, and a
// lost connection can leave a copy and its original.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

// Config configures [Run]. Old and New are required.
type Config struct {
	// Old is the name of the queue to move from: a quorum or a classic queue.
	Old string
	// New is the queue to move to. It may exist already, declared in the same way.
	//
	//   - Declare its dead-letter target first.
	//   - If retries return by the queue's name, as with retry.Topology, apply the topology of
	//     the new name first, so that its consumers can retry. Messages in delay queues under the
	//     old name reach the new queue, because the old bindings are copied.
	New declare.Queue
	// Bindings are the bindings of the old queue. Default: those that the HTTP API lists.
	Bindings []declare.Binding
	// Keep leaves the old queue in place, empty, instead of deleting it. Default: false.
	Keep bool
	// Prefetch is the number of messages that are moved at once. Default: 1000.
	Prefetch int
	// Quiet is how long the old queue must be empty, without consumers and new messages, before
	// the move is complete. Default: 6 s. The counts of the HTTP API are up to 5 s old, so a
	// shorter time may miss messages that wait for dead-lettering.
	Quiet time.Duration
	// OnProgress is called a few times a second with the progress and the number of ready
	// messages in the old queue. It must not block. Default: nil.
	OnProgress func(r Report, left uint64)
}

// Report is the progress of a move.
type Report struct {
	// Moved is the number of messages that were copied and acknowledged.
	Moved uint64 `json:"moved"`
	// Bindings is the number of bindings that were copied to the new queue.
	Bindings int `json:"bindings"`
	// Deleted reports whether the old queue is gone.
	Deleted bool `json:"deleted"`
}

// Run moves a queue until it is empty and unused, or until ctx is done. You can stop it and run
// it again at any time. If the old queue doesn't exist any more, that is success.
//
// Errors: if a message can't be sent again (see client.Validate), Run stops with an
// *[argument.Error], and the message stays in the old queue.
//
//   - A publisher that sends to the old queue by its name keeps Run running, and so does a
//     consumer that stays.
//   - The broker's dead-letter history of a message and its delivery count aren't moved: no
//     client can set them. A message's own ttl starts again.
//   - api may be nil if Config.Bindings is set. Then Run doesn't see messages that the old queue
//     delays or keeps for at-least-once dead-lettering. They are deleted with it, unless
//     Config.Keep is set. From RabbitMQ 4.4 on, scheduled and parked messages are among them.
func Run(ctx context.Context, conn *client.Conn, api check.Reader, cfg Config) (Report, error) {
	var report Report
	if err := cfg.check(conn, api); err != nil {
		return report, err
	}
	m := conn.Management()
	topology := declare.Topology{Queues: []declare.Queue{cfg.New}}
	old, err := declare.Inspect(ctx, m, cfg.Old)
	switch {
	case errors.Is(err, declare.ErrNotFound):
		// A run before this one has finished, if the new queue is there.
		if _, err := declare.Inspect(ctx, m, cfg.New.Address().QueueName()); err != nil {
			return report, err
		}
		report.Deleted = true
		return report, nil
	case err != nil:
		return report, err
	case old.Type == "stream":
		return report, argument.New("Config.Old", cfg.Old, "is a stream, and reading doesn't remove messages from a stream", "publish to the new stream, and run consumers of both for a while")
	}

	bindings := cfg.Bindings
	if bindings == nil {
		s, err := check.Read(ctx, check.Sources{HTTP: api}, declare.Topology{})
		if err != nil {
			return report, err
		}
		for _, b := range s.Bindings {
			if b.Queue == cfg.Old {
				bindings = append(bindings, b)
			}
		}
	}
	for _, b := range bindings {
		b.Queue = cfg.New.Address().QueueName()
		topology.Bindings = append(topology.Bindings, b)
	}
	if _, err := declare.Apply(ctx, m, topology); err != nil {
		return report, err
	}
	report.Bindings = len(bindings)
	// Only now: everything that an exchange sends has the new queue to go to.
	for _, b := range bindings {
		b.Queue = cfg.Old
		if err := declare.DeleteBinding(ctx, m, b); err != nil {
			return report, err
		}
	}

	v := mover{conn: conn, cfg: cfg, to: cfg.New.Address(), bindings: report.Bindings}
	for {
		err := v.untilQuiet(ctx)
		report.Moved = v.moved.Load()
		if err != nil || cfg.Keep {
			return report, err
		}
		_, err = audit.DeleteQueueIf(ctx, check.Sources{AMQP: m, HTTP: api}, cfg.Old, audit.DeleteCondition{Empty: true, Unused: true})
		if err == nil {
			report.Deleted = true
			return report, nil
		}
		if !errors.Is(err, declare.ErrInUse) {
			return report, err
		}
	}
}

func (c *Config) check(conn *client.Conn, api check.Reader) error {
	switch {
	case conn == nil:
		return argument.New("conn", nil, "is nil", "pass a connection")
	case c.New == nil:
		return argument.New("Config.New", nil, "is nil", "set the queue to move to")
	case c.New.Address().QueueName() == c.Old:
		return argument.New("Config.New", c.Old, "is the old queue's name", "choose another name")
	case c.Bindings == nil && api == nil:
		return argument.New("Config.Bindings", nil, "isn't set, and without the HTTP API the bindings are unknown", "set it, with an empty list for no bindings, or pass the HTTP API")
	case c.Prefetch < 0 || c.Quiet < 0:
		return argument.New("Config", nil, "has a negative Prefetch or Quiet", "leave it out for the default")
	}
	for i, b := range c.Bindings {
		if b.Queue != c.Old {
			return argument.New(fmt.Sprintf("Config.Bindings[%d]", i), b.Queue, "isn't a binding of the old queue", "leave it out")
		}
	}
	if c.Prefetch == 0 {
		c.Prefetch = 1000
	}
	if c.Quiet == 0 {
		c.Quiet = 6 * time.Second
	}
	return errors.Join(address.Queue(c.Old).Validate(), c.New.Validate())
}

type mover struct {
	conn  *client.Conn
	cfg   Config
	to    address.Address
	moved atomic.Uint64

	bindings int
}

// peek is how often the old queue is inspected while it is moved.
const peek = 200 * time.Millisecond

// untilQuiet moves messages until there have been none for a while, and nobody else consumes from
// the queue.
func (v *mover) untilQuiet(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	done := make(chan error, 1)
	var once sync.Once
	var unsendable error
	go func() {
		done <- v.conn.Consume(ctx, v.cfg.Old, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			c := client.Copy(d.Message())
			if h := d.Message().Header; h != nil {
				c.Header.TTL = h.TTL
			}
			if err := client.Validate(c); err != nil {
				once.Do(func() {
					unsendable = err
					stop(err)
				})
				return client.Requeue{Err: err}
			}
			v.moved.Add(1)
			return client.Forward{To: v.to, Message: c}
		}), client.ConsumerConfig{
			Prefetch: v.cfg.Prefetch,
			// A full new queue makes the move wait. If messages were requeued as failed, they
			// would use up their delivery limit.
			ForwardPatience: forEver,
			NoIsolation:     true, // the move doesn't run a handler that a message could crash
		})
	}()
	ended, err := v.watch(ctx, done)
	stop(nil)
	if !ended {
		err = errors.Join(err, <-done) // the consumer drains: its copies are confirmed
	}
	if unsendable != nil {
		return unsendable
	}
	return err
}

// forEver is longer than any migration.
const forEver = 10 * 365 * 24 * time.Hour

var errConsumerEnded = errors.New("hopback: the consumer that moves the messages stopped unexpectedly; run the migration again")

// watch returns nil when the queue has been quiet for long enough; ended reports whether the
// consumer has stopped.
func (v *mover) watch(ctx context.Context, done <-chan error) (ended bool, err error) {
	ticker := time.NewTicker(peek)
	defer ticker.Stop()
	since, last := time.Now(), v.moved.Load()
	for {
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case err := <-done:
			return true, errors.Join(context.Cause(ctx), err, errConsumerEnded)
		case <-ticker.C:
		}
		info, err := declare.Inspect(ctx, v.conn.Management(), v.cfg.Old)
		if errors.Is(err, declare.ErrNoReply) && ctx.Err() == nil {
			since = time.Now() // the connection comes back
			continue
		}
		if err != nil {
			return false, err
		}
		if v.cfg.OnProgress != nil {
			v.cfg.OnProgress(Report{Moved: v.moved.Load(), Bindings: v.bindings}, info.Messages)
		}
		// One consumer is this one.
		if now := v.moved.Load(); info.Messages > 0 || info.Consumers > 1 || now != last {
			since, last = time.Now(), now
		}
		if time.Since(since) >= v.cfg.Quiet {
			return false, nil
		}
	}
}
