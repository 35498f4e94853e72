package schedule

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/oldbroker"
)

// DispatchConfig configures [Dispatch]. The zero value is ready to use.
type DispatchConfig struct {
	// Names are the names of the ladder. Default: the ladder that all services share.
	Names Names
	// Claimable makes Dispatch serve [Names.ClaimableQueue] instead of [Names.DispatchQueue]: it parks
	// each message under its message-id until it is due, and publishes it then. It needs RabbitMQ
	// 4.4. To serve both queues, call Dispatch twice. Default: false.
	Claimable bool
	// Concurrency is how many messages are published at once, up to 10,000. Default: 256.
	Concurrency int
	// Store knows which messages were canceled. Dispatch drops those. Use it to cancel messages
	// for consumers that don't use [With]. Default: nil, no message is dropped.
	Store Store
	// Allow reports whether Dispatch may publish to an address. Messages contain their target,
	// and Dispatch publishes with the permissions of its connection. So without Allow, anyone who
	// may write to the ladder's exchanges, as every scheduling service may, can write to
	// everything that this connection's user may write to. Messages for other addresses are
	// dead-lettered to [Names.UndeliverableQueue]. Default: nil, all addresses are allowed.
	//
	//   - An address of the ladder itself is never allowed: the message would return endlessly.
	//   - Allow isn't called for messages to queues that are bound to the ladder, because those
	//     don't pass Dispatch.
	Allow func(to address.Address) bool
}

const (
	defaultConcurrency = 256
	maxConcurrency     = 10_000
)

// Dispatch publishes due messages to their targets, for messages that the ladder can't route by
// itself: see the package documentation. Run it in one or more processes. It stops when ctx is
// canceled: then it finishes the messages in flight and returns nil. The errors are those of
// client.Conn.Consume and client.NewPublisher.
//
// Dispatch acknowledges a message once the broker has accepted it at its target. So no message is
// lost, and one may be published twice, with the same message-id.
//
//   - A message that can't be delivered is dead-lettered to [Names.UndeliverableQueue], with
//     client.ReasonUndeliverable. This happens if no queue is bound for its key, if the exchange or
//     queue is gone, if the user may not write to it, if Allow doesn't allow the address, or if
//     the message can't be sent.
//   - If a queue refuses a message because it is full, Dispatch retries until the queue accepts
//     it. Messages for other targets keep flowing.
//   - If a queue doesn't answer, Dispatch publishes the message again until it is confirmed.
//     Messages for other targets wait for a free slot for up to 10 s.
//   - If the Store returns an error, the message is requeued, and Dispatch asks the Store again.
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
	if !cfg.Claimable {
		return conn.Consume(ctx, cfg.Names.DispatchQueue(), d, client.ConsumerConfig{Concurrency: cfg.Concurrency})
	}
	if b := conn.Broker(); oldbroker.Of(b.AtLeast).LacksTokens && b.Version != "" {
		return noTokens("DispatchConfig.Claimable", b)
	}
	return conn.Consume(ctx, cfg.Names.ClaimableQueue(), parker{d, conn}, client.ConsumerConfig{Concurrency: cfg.Concurrency})
}

const (
	closePatience = 10 * time.Second
	// answerPatience is how long a message may wait for its target's answer here, where it
	// occupies one of DispatchConfig.Concurrency.
	answerPatience = 10 * time.Second
	// storePause is how long a message waits after a failing Store requeued it.
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
	errForbidden = errors.New("DispatchConfig.Allow refused the address")
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
		return client.DeadLetter{Reason: client.ReasonUndeliverable, Err: err}
	}
	if d.store != nil {
		gone, err := canceled(ctx, d.store, del)
		switch {
		case err != nil:
			backoff.Sleep(ctx, storePause)
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
		return client.DeadLetter{Reason: client.ReasonUndeliverable, Err: fmt.Errorf("schedule: delivering to %v: %w", to, err)}
	case errors.Is(err, client.ErrRefused), publishing.Err() != nil && ctx.Err() == nil:
		// The consumer retries that, separately from messages to other addresses. A queue that
		// hasn't answered may have the message already: then it has it twice.
		return client.Forward{To: to, Message: m, Err: err}
	}
	return client.Requeue{Err: err}
}
