package declare

import (
	"context"
	"errors"
	"fmt"

	"github.com/hopback/hopback/argument"
)

// If is what must be so for something to be deleted. The zero value asks for
// nothing.
type If struct {
	// Empty: the queue has no message that is ready, and as far as the HTTP API
	// can tell, none that is held by a consumer, delayed, or on its way to
	// dead-lettering either.
	Empty bool
	// Unused: the queue has no consumer, and no binding that the HTTP API shows;
	// the exchange has no binding, to it or from it.
	Unused bool
}

// DeleteQueueIf deletes a queue if it is as cond says, and otherwise is
// [ErrInUse]. A queue that doesn't exist is no error.
//
// RabbitMQ has no such guard over AMQP 1.0, nor at quorum queues over any
// protocol: it is asked first, and told to delete then. What is published to the
// queue in between is lost, so take its bindings away before. Without
// src.HTTP only what AMQP tells is looked at, see [If].
func DeleteQueueIf(ctx context.Context, src Sources, name string, cond If) (messages uint64, err error) {
	if err := errors.Join(checkRequester(src.AMQP), checkName("queue name", name)); err != nil {
		return 0, err
	}
	info, err := Inspect(ctx, src.AMQP, name)
	switch {
	case errors.Is(err, ErrNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	}
	refuse := func(text string, args ...any) (uint64, error) {
		return 0, &Error{Op: opDelete, Thing: Thing{KindQueue, name}, Reason: ErrInUse, Err: fmt.Errorf(text, args...)}
	}
	if cond.Empty && info.Messages > 0 {
		return refuse("%d messages are ready", info.Messages)
	}
	if cond.Unused && info.Consumers > 0 {
		return refuse("%d consumers", info.Consumers)
	}
	if src.HTTP != nil && (cond.Empty || cond.Unused) {
		s, err := readHTTP(ctx, src.HTTP)
		if err != nil {
			return 0, err
		}
		for _, q := range s.Queues {
			if held := q.MessagesUnacknowledged + q.MessagesDelayed + q.MessagesDeadLettering; q.Name == name && cond.Empty && held > 0 {
				return refuse("%d messages are held by consumers, %d delayed, %d wait for dead-lettering", q.MessagesUnacknowledged, q.MessagesDelayed, q.MessagesDeadLettering)
			}
		}
		for _, b := range s.Bindings {
			if cond.Unused && b.Queue == name {
				return refuse("the exchange %.80q is bound to it", b.Source)
			}
		}
	}
	return deleteQueue(ctx, src.AMQP, name)
}

// DeleteExchangeIf deletes an exchange if it is as cond says, and otherwise is
// [ErrInUse]; Empty means nothing here. Unused needs src.HTTP, since an exchange's
// bindings can't be listed over AMQP.
func DeleteExchangeIf(ctx context.Context, src Sources, name string, cond If) error {
	if err := errors.Join(checkRequester(src.AMQP), checkOwnName("exchange name", name, keepOwn)); err != nil {
		return err
	}
	if cond.Unused {
		if src.HTTP == nil {
			return argument.New("Sources.HTTP", nil, "is nil, and only the HTTP API tells whether an exchange has bindings", "give httpapi.New, or leave If.Unused out")
		}
		s, err := readHTTP(ctx, src.HTTP)
		if err != nil {
			return err
		}
		for _, b := range s.Bindings {
			if b.Source == name || b.Exchange == name {
				return &Error{Op: opDelete, Thing: Thing{KindExchange, name}, Reason: ErrInUse, Err: errors.New("there is a binding " + b.describe())}
			}
		}
	}
	return deleteExchange(ctx, src.AMQP, name)
}
