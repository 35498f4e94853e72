package declare

import (
	"context"
	"errors"
	"fmt"
	"slices"

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

// DeleteIf is [Delete], unless messages would be lost by it or others need what is
// in t: then it is [ErrInUse], one joined *[Error] for each reason, and nothing is
// deleted.
//
// Others need an exchange that has a binding from or to something that isn't in t,
// or to which a queue that isn't in t dead-letters, and a queue that has consumers,
// or to which something that isn't in t leads. Messages are lost with a queue that
// has any, those that are held or delayed included. What t shares with others, as
// all topologies of package retry share their delay queues, is so kept for them.
//
// src.HTTP is required, since nothing else tells of others. All is asked first, and
// each queue once more over AMQP before it is deleted; what arrives in between is
// lost. Messages that consumers hold, and those that are delayed or on their way to
// dead-lettering, are seen some seconds late.
func DeleteIf(ctx context.Context, src Sources, t Topology) (Report, error) {
	if src.HTTP == nil {
		return Report{}, argument.New("Sources.HTTP", nil, "is nil, and only the HTTP API tells who else needs what is to be deleted", "give httpapi.New, or use Delete, which doesn't ask")
	}
	if err := checkRequester(src.AMQP); err != nil {
		return Report{}, err
	}
	s, err := readHTTP(ctx, src.HTTP)
	if err != nil {
		return Report{}, err
	}
	// The HTTP API's counts are some seconds old, those over AMQP aren't.
	now, err := readAMQP(ctx, src.AMQP, Topology{Queues: t.Queues})
	if err != nil {
		return Report{}, err
	}
	for _, q := range now.Queues {
		i := slices.IndexFunc(s.Queues, func(old QueueInfo) bool { return old.Name == q.Name })
		if i >= 0 {
			s.Queues[i].Messages, s.Queues[i].Consumers = q.Messages, q.Consumers
		}
	}
	if err := Uses(s, t); err != nil {
		return Report{}, err
	}
	return remove(ctx, src.AMQP, t, true)
}

// Uses is what keeps t from being deleted by [DeleteIf], over what was read before:
// an *[Error] for each, joined, that matches [ErrInUse]; or nil.
func Uses(s Snapshot, t Topology) error {
	queues, exchanges := map[string]bool{}, map[string]bool{}
	for _, q := range t.Queues {
		if !isNil(q) {
			queues[q.Address().QueueName()] = true
		}
	}
	for _, x := range t.Exchanges {
		exchanges[x.Name] = true
	}
	var errs []error
	use := func(t Thing, text string, args ...any) {
		errs = append(errs, &Error{Op: opDelete, Thing: t, Reason: ErrInUse, Err: fmt.Errorf(text, args...)})
	}
	for _, q := range s.Queues {
		if !queues[q.Name] {
			continue
		}
		thing := Thing{KindQueue, q.Name}
		if q.Consumers > 0 {
			use(thing, "it has %d consumers", q.Consumers)
		}
		if q.Messages > 0 {
			use(thing, "%d messages are ready in it", q.Messages)
		}
		if held := q.MessagesUnacknowledged + q.MessagesDelayed + q.MessagesDeadLettering; held > 0 {
			use(thing, "%d messages are held by consumers, %d delayed, %d wait for dead-lettering", q.MessagesUnacknowledged, q.MessagesDelayed, q.MessagesDeadLettering)
		}
	}
	ours := func(exchange string) bool { return exchanges[exchange] }
	for _, b := range s.Bindings {
		in := queues[b.Queue] && b.Queue != "" || ours(b.Exchange)
		mentioned := slices.ContainsFunc(t.Bindings, func(known Binding) bool { return sameBinding(known, b) })
		switch {
		case mentioned:
		case ours(b.Source) && !in:
			use(Thing{KindExchange, b.Source}, "it leads to what isn't to be deleted: %s", b.describe())
		case !ours(b.Source) && in:
			to := Thing{KindQueue, b.Queue}
			if b.Queue == "" {
				to = Thing{KindExchange, b.Exchange}
			}
			use(to, "what isn't to be deleted leads to it: %s", b.describe())
		}
	}
	r := newRoutes(s)
	for _, q := range r.sorted() {
		exchange, key, ok := q.deadLetters()
		switch {
		case !ok || queues[q.Name]:
		case ours(exchange):
			use(Thing{KindExchange, exchange}, "queue %.80q, which isn't to be deleted, dead-letters to it", q.Name)
		case exchange == "" && key != nil && queues[*key]:
			use(Thing{KindQueue, *key}, "queue %.80q, which isn't to be deleted, dead-letters to it", q.Name)
		}
	}
	for _, x := range r.sortedExchanges() {
		if ours(x.alternate) && !ours(x.Name) {
			use(Thing{KindExchange, x.alternate}, "it is the alternate exchange of %.80q, which isn't to be deleted", x.Name)
		}
	}
	return errors.Join(errs...)
}
