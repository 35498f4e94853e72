package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/values"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/rules"
)

// DeleteCondition is the condition of [DeleteQueueIf]. The zero value means no condition.
type DeleteCondition struct {
	// Empty requires that the queue has no ready message. With the HTTP API it must also have no
	// message that a consumer holds, that is delayed, or that waits for dead-lettering. Default:
	// false.
	Empty bool
	// Unused requires that the queue has no consumer and, with the HTTP API, no binding. Default:
	// false.
	Unused bool
}

// DeleteQueueIf deletes a queue if cond holds, and otherwise returns [declare.ErrInUse]. It
// returns the number of messages that were ready. A queue that doesn't exist isn't an error.
//
// RabbitMQ has no conditional delete over AMQP 1.0, and none for quorum queues over any protocol.
// So DeleteQueueIf checks first and then deletes. A message that is published in between is lost.
// To prevent that, remove the queue's bindings first. Without src.HTTP only ready messages and
// consumers are checked.
func DeleteQueueIf(ctx context.Context, src check.Sources, name string, cond DeleteCondition) (messages uint64, err error) {
	info, err := declare.Inspect(ctx, src.AMQP, name)
	switch {
	case errors.Is(err, declare.ErrNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	}
	refuse := func(text string, args ...any) (uint64, error) {
		return 0, &declare.Error{Op: "delete", Resource: rules.QueueResource(name), Reason: declare.ErrInUse, Err: fmt.Errorf(text, args...)}
	}
	if cond.Empty && info.Messages > 0 {
		return refuse("it contains %s; drain or purge the queue first", values.Count(info.Messages, "ready message"))
	}
	if cond.Unused && info.Consumers > 0 {
		return refuse("it has %s; stop all consumers first", values.Count(info.Consumers, "consumer"))
	}
	if src.HTTP != nil && (cond.Empty || cond.Unused) {
		s, err := rules.ReadHTTP(ctx, src.HTTP)
		if err != nil {
			return 0, err
		}
		for _, q := range s.Queues {
			if held := q.MessagesUnacknowledged + q.MessagesDelayed + q.MessagesDeadLettering; q.Name == name && cond.Empty && held > 0 {
				return refuse("%s", hiddenMessages(q))
			}
		}
		for _, b := range s.Bindings {
			if cond.Unused && b.Queue == name {
				return refuse("the exchange %.80q is bound to it; delete the binding first", b.Source)
			}
		}
	}
	return declare.DeleteQueue(ctx, src.AMQP, name)
}

// DeleteUnused deletes t like [declare.Delete], unless that would lose messages or delete
// something that others need. In that case it deletes nothing, and the error joins a
// *[declare.Error] for each reason and matches [declare.ErrInUse]. src.AMQP and src.HTTP are both
// required.
//
//   - An exchange is needed if it has a binding from or to something outside t, or if a queue
//     outside t dead-letters to it.
//   - A queue is needed if it has consumers, or if a binding or a dead-letter target outside t
//     leads to it, or if it contains messages, including unacknowledged and delayed ones.
//   - So DeleteUnused refuses to delete resources that several topologies share, such as the
//     delay queues of package retry, while another topology needs them.
//   - DeleteUnused reads everything first, and inspects each queue again over AMQP before it
//     deletes it. A message that arrives in between is lost. Counts of messages that consumers
//     hold, that are delayed, or that wait for dead-lettering are some seconds old.
func DeleteUnused(ctx context.Context, src check.Sources, t declare.Topology) (declare.Report, error) {
	if src.HTTP == nil {
		return declare.Report{}, argument.New("Sources.HTTP", nil, "is nil, but only the HTTP API shows who else uses these resources", "set it with httpapi.New, or use Delete, which doesn't check")
	}
	if err := checkRequester(src.AMQP); err != nil {
		return declare.Report{}, err
	}
	s, err := rules.ReadHTTP(ctx, src.HTTP)
	if err != nil {
		return declare.Report{}, err
	}
	// The HTTP API's counts are some seconds old, those over AMQP aren't.
	now, err := rules.ReadAMQP(ctx, src.AMQP, declare.Topology{Queues: t.Queues})
	if err != nil {
		return declare.Report{}, err
	}
	for _, q := range now.Queues {
		i := slices.IndexFunc(s.Queues, func(old declare.QueueInfo) bool { return old.Name == q.Name })
		if i >= 0 {
			s.Queues[i].Messages, s.Queues[i].Consumers = q.Messages, q.Consumers
		}
	}
	if err := checkUnused(s, t); err != nil {
		return declare.Report{}, err
	}
	return declare.DeleteIdle(ctx, src.AMQP, t)
}

// checkUnused does the check of [DeleteUnused] on a snapshot. It returns nil if t can be
// deleted. Otherwise it returns a *[declare.Error] for each reason, joined, that matches
// [declare.ErrInUse].
func checkUnused(s check.Snapshot, t declare.Topology) error {
	queues, exchanges := map[string]bool{}, map[string]bool{}
	for _, name := range rules.QueueNames(t) {
		queues[name] = true
	}
	for _, x := range t.Exchanges {
		exchanges[x.Name] = true
	}
	var errs []error
	use := func(t declare.Resource, text string, args ...any) {
		errs = append(errs, &declare.Error{Op: "delete", Resource: t, Reason: declare.ErrInUse, Err: fmt.Errorf(text, args...)})
	}
	for _, q := range s.Queues {
		if !queues[q.Name] {
			continue
		}
		resource := rules.QueueResource(q.Name)
		if q.Consumers > 0 {
			use(resource, "it has %s; stop all consumers first", values.Count(q.Consumers, "consumer"))
		}
		if q.Messages > 0 {
			use(resource, "it contains %s; drain or purge the queue first", values.Count(q.Messages, "ready message"))
		}
		if held := q.MessagesUnacknowledged + q.MessagesDelayed + q.MessagesDeadLettering; held > 0 {
			use(resource, "%s", hiddenMessages(q))
		}
	}
	ours := func(exchange string) bool { return exchanges[exchange] }
	for _, b := range s.Bindings {
		in := queues[b.Queue] && b.Queue != "" || ours(b.Exchange)
		mentioned := slices.ContainsFunc(t.Bindings, func(known declare.Binding) bool { return rules.SameBinding(known, b) })
		switch {
		case mentioned:
		case ours(b.Source) && !in:
			use(rules.ExchangeResource(b.Source), "it routes to a resource outside the topology: %s", rules.BindingName(b))
		case !ours(b.Source) && in:
			to := rules.QueueResource(b.Queue)
			if b.Queue == "" {
				to = rules.ExchangeResource(b.Exchange)
			}
			use(to, "a resource outside the topology routes to it: %s", rules.BindingName(b))
		}
	}
	r := rules.NewRoutes(context.Background(), s)
	for _, q := range r.Sorted() {
		exchange, key, ok := q.DeadLetters()
		switch {
		case !ok || queues[q.Name]:
		case ours(exchange):
			use(rules.ExchangeResource(exchange), "queue %.80q outside the topology dead-letters to it", q.Name)
		case exchange == "" && key != nil && queues[*key]:
			use(rules.QueueResource(*key), "queue %.80q outside the topology dead-letters to it", q.Name)
		}
	}
	for _, x := range r.SortedExchanges() {
		if ours(x.Alternate) && !ours(x.Name) {
			use(rules.ExchangeResource(x.Alternate), "it is the alternate exchange of %.80q, which is outside the topology", x.Name)
		}
	}
	return errors.Join(errs...)
}

// hiddenMessages describes the messages of a queue that only the HTTP API shows.
func hiddenMessages(q declare.QueueInfo) string {
	return fmt.Sprintf("it contains %s, %d delayed, and %d waiting for dead-lettering; wait until the queue is empty",
		values.Count(q.MessagesUnacknowledged, "unacknowledged message"), q.MessagesDelayed, q.MessagesDeadLettering)
}

func checkRequester(r declare.Requester) error {
	if r == nil {
		return argument.New("Sources.AMQP", nil, "is nil", "pass conn.Management()")
	}
	return nil
}
