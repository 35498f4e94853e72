package schedule

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/link"
)

// ReasonUndeliverable is why a message is in Names.UndeliverableQueue. Its
// client.AnnotationError has the broker's words.
const ReasonUndeliverable client.Reason = "undeliverable"

// DispatchConfig configures Dispatch. The zero value is ready to use.
type DispatchConfig struct {
	// Names are those of the ladder. Default: the ladder that all services share.
	Names Names
	// Concurrency is how many messages are published at once, up to 10,000. Default: 256.
	Concurrency int
	// Store, if not nil, says which messages were cancelled. They aren't published. So
	// messages for consumers that aren't hopback's can be cancelled until they are due.
	Store Store
	// Allow, if not nil, reports whether a message may go to an address. The message names
	// the address, and Dispatch publishes with this connection's permissions. So without
	// Allow, anyone who may write to the ladder's exchanges, as every scheduling service may,
	// can write to everything that this connection's user may write to. A message for
	// another address is dead-lettered to Names.UndeliverableQueue. An address of the ladder
	// itself is never allowed: the message would come back without end.
	//
	// Default: all other addresses. Messages for queues that the ladder is bound to don't
	// pass Dispatch, and aren't asked about.
	Allow func(to address.Address) bool
}

const (
	defaultConcurrency = 256
	maxConcurrency     = 10_000
)

// Dispatch publishes messages that are due to their targets, until ctx ends. Then it
// returns nil, after those under way. Any number of processes may run it side by side.
//
// It is for messages that the broker can't bring to their target by itself; see the
// package's comment. A message is accepted when the broker has taken it at its target.
// Hence one may be published twice, with the same message-id, and none is lost:
//
//   - If no queue is bound for its key, or the exchange or queue is gone, or the user
//     may not write to it, or Allow doesn't allow the address, or the message can't be
//     sent, it is dead-lettered to Names.UndeliverableQueue, with ReasonUndeliverable.
//   - If a queue refuses it, because it is full, it is tried again until it is taken.
//     Messages for other targets go on.
//   - If a queue doesn't answer, it is published again, until it is confirmed. Messages for
//     other targets wait for a place for up to 10 s.
//   - If the Store fails, it comes back, and the Store is asked again.
//
// The errors are those of client.Conn.Consume and client.NewPublisher.
func Dispatch(ctx context.Context, conn *client.Conn, cfg DispatchConfig) error {
	if err := cfg.Names.check(argument.Root("DispatchConfig").Field("Names")); err != nil {
		return err
	}
	if cfg.Concurrency < 0 || cfg.Concurrency > maxConcurrency {
		return argument.New("DispatchConfig.Concurrency", cfg.Concurrency, "is out of range", "use 1 to 10,000, or 0 for the default of 256")
	}
	if cfg.Concurrency == 0 {
		cfg.Concurrency = defaultConcurrency
	}
	p, err := client.NewPublisher[*client.Message](ctx, conn, address.Address{}, client.PublisherConfig{Pending: cfg.Concurrency, Copies: true})
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, client.ErrNotSent) {
			return nil
		}
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closePatience)
		defer cancel()
		_ = p.Close(closing)
	}()
	d := &dispatcher{p: p, store: cfg.Store, names: cfg.Names, allow: cfg.Allow}
	return conn.Consume(ctx, cfg.Names.DispatchQueue(), d, client.ConsumerConfig{Concurrency: cfg.Concurrency})
}

const (
	closePatience = 10 * time.Second
	// answerPatience is how long a message may wait for its target's answer here, where it
	// occupies one of DispatchConfig.Concurrency.
	answerPatience = 10 * time.Second
	// storePause is what a message waits for that a failing Store gives back.
	storePause = time.Second
)

type dispatcher struct {
	p     *client.Publisher[*client.Message]
	store Store
	names Names
	allow func(address.Address) bool
}

var (
	errOwn       = errors.New("the address is part of the ladder itself")
	errForbidden = errors.New("DispatchConfig.Allow doesn't allow the address")
)

// permitted returns why a message may not go to an address, or nil.
func (d *dispatcher) permitted(to address.Address) error {
	switch {
	case d.names.owns(to):
		return fmt.Errorf("schedule: delivering to %v: %w", to, errOwn)
	case d.allow != nil && !d.allow(to):
		return fmt.Errorf("schedule: delivering to %v: %w", to, errForbidden)
	}
	return nil
}

// Handle publishes one message to its target.
func (d *dispatcher) Handle(ctx context.Context, del *client.Delivery) error {
	m, to, err := restored(del.Message())
	if err == nil {
		err = d.permitted(to)
	}
	if err != nil {
		return client.DeadLetter{Reason: ReasonUndeliverable, Err: err}
	}
	if d.store != nil {
		gone, err := cancelled(ctx, d.store, del)
		switch {
		case err != nil:
			link.Pause(ctx, storePause)
			return client.Requeue{Err: err}
		case gone:
			return nil
		}
	}
	publishing, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	err = d.p.Publish(publishing, m)
	var bad *argument.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &bad), errors.Is(err, client.ErrUnroutable), errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrUnauthorized), errors.Is(err, client.ErrTooLarge):
		return client.DeadLetter{Reason: ReasonUndeliverable, Err: fmt.Errorf("schedule: delivering to %v: %w", to, err)}
	case errors.Is(err, client.ErrRefused), publishing.Err() != nil && ctx.Err() == nil:
		// The consumer tries that again, apart from what goes to other addresses. A queue
		// that hasn't answered may have the message already: then it has it twice.
		return client.Forward{To: to, Message: m, Err: err}
	}
	return client.Requeue{Err: err}
}
