package declare

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/values"
)

// Delete removes t from the broker: bindings first, then queues with all their messages, then
// exchanges. To delete only what is unused, see [DeleteIdle] and audit.DeleteUnused.
//
// Errors and the Report are those of [Apply]. Delete validates only names, not arguments. A
// resource that doesn't exist isn't an error. The bindings of a deleted exchange or queue are
// deleted with it.
func Delete(ctx context.Context, r Requester, t Topology) (Report, error) {
	return remove(ctx, r, t, false)
}

// DeleteIdle is [Delete], but returns [ErrInUse] for a queue that has a ready message or a
// consumer. It inspects each queue right before it deletes it; a message that is published in
// between is lost.
//
// AMQP doesn't show messages that consumers hold, that are delayed, or that wait for
// dead-lettering. Use audit.DeleteUnused to count those too, and to keep resources that others
// need.
func DeleteIdle(ctx context.Context, r Requester, t Topology) (Report, error) {
	return remove(ctx, r, t, true)
}

// remove deletes t; if idle is set, a queue only when it is idle.
func remove(ctx context.Context, r Requester, t Topology, idle bool) (Report, error) {
	errs := []error{checkRequester(r)}
	r, done := spread(r, len(t.Queues)+len(t.Exchanges)+len(t.Bindings))
	defer done()
	queues, exchanges := map[string]bool{}, map[string]bool{}
	var bindingSteps, queueSteps, exchangeSteps []step
	for _, q := range t.Queues {
		if isNil(q) || queues[q.Address().QueueName()] {
			continue
		}
		name := q.Address().QueueName()
		queues[name] = true
		errs = append(errs, names.Check(names.Label("Queue", name).Field("Name"), name))
		queueSteps = append(queueSteps, step{resource: Resource{kindQueue, name}, do: func(ctx context.Context) (string, error) {
			if idle {
				return deleted(deleteIdleQueue(ctx, r, name))
			}
			_, err := deleteQueue(ctx, r, name)
			return deleted(err)
		}})
	}
	for _, x := range t.Exchanges {
		if exchanges[x.Name] {
			continue
		}
		exchanges[x.Name] = true
		errs = append(errs, names.CheckOwn(names.Label("Exchange", x.Name).Field("Name"), x.Name, keepOwn))
		exchangeSteps = append(exchangeSteps, step{resource: Resource{kindExchange, x.Name}, do: func(ctx context.Context) (string, error) {
			return deleted(deleteExchange(ctx, r, x.Name))
		}})
	}
	for _, b := range t.Bindings {
		if exchanges[b.Source] || queues[b.Queue] || exchanges[b.Exchange] {
			continue
		}
		errs = append(errs, b.Validate())
		bindingSteps = append(bindingSteps, step{resource: Resource{kindBinding, b.describe()}, do: func(ctx context.Context) (string, error) {
			return deleted(deleteBinding(ctx, r, b))
		}})
	}
	if err := errors.Join(errs...); err != nil {
		return Report{}, err
	}
	return run(ctx, [][]step{bindingSteps, queueSteps, exchangeSteps})
}

// What the errors of functions that take a name are about.
var (
	queueName    = argument.Root("queue name")
	exchangeName = argument.Root("exchange name")
)

const keepOwn = "leave it out; the broker's own exchanges can't be deleted"

func deleted(err error) (string, error) {
	if err != nil {
		return resultOf(err), err
	}
	return stepDeleted, nil
}

// DeleteQueue deletes a queue with all its messages and returns how many were ready. A queue that
// doesn't exist isn't an error.
func DeleteQueue(ctx context.Context, r Requester, name string) (messages uint64, err error) {
	if err := errors.Join(checkRequester(r), names.Check(queueName, name)); err != nil {
		return 0, err
	}
	return deleteQueue(ctx, r, name)
}

func deleteQueue(ctx context.Context, r Requester, name string) (uint64, error) {
	return countRequest(ctx, r, opDelete, name, names.QueuePath(name))
}

func deleteIdleQueue(ctx context.Context, r Requester, name string) error {
	info, err := Inspect(ctx, r, name)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case info.Messages > 0:
		err = fmt.Errorf("it contains %s; drain or purge the queue first", values.Count(info.Messages, "ready message"))
	case info.Consumers > 0:
		err = fmt.Errorf("it has %s; stop all consumers first", values.Count(info.Consumers, "consumer"))
	default:
		_, err := deleteQueue(ctx, r, name)
		return err
	}
	return &Error{Op: opDelete, Resource: Resource{kindQueue, name}, Reason: ErrInUse, Err: err}
}

// DeleteExchange deletes an exchange and its bindings. An exchange that doesn't exist isn't an
// error.
func DeleteExchange(ctx context.Context, r Requester, name string) error {
	if err := errors.Join(checkRequester(r), names.CheckOwn(exchangeName, name, keepOwn)); err != nil {
		return err
	}
	return deleteExchange(ctx, r, name)
}

func deleteExchange(ctx context.Context, r Requester, name string) error {
	_, _, err := request(ctx, r, opDelete, Resource{kindExchange, name}, "DELETE", names.ExchangePath(name), nil)
	return err
}

// DeleteBinding deletes the one binding with the same ends, key, headers, and arguments. A
// binding that doesn't exist isn't an error.
func DeleteBinding(ctx context.Context, r Requester, b Binding) error {
	if err := errors.Join(checkRequester(r), b.Validate()); err != nil {
		return err
	}
	return deleteBinding(ctx, r, b)
}

func deleteBinding(ctx context.Context, r Requester, b Binding) error {
	resource := Resource{kindBinding, b.describe()}
	args, _ := b.arguments(nil)
	if len(args) == 0 {
		_, _, err := request(ctx, r, opDelete, resource, "DELETE", b.deletePath(), nil)
		return err
	}
	// The broker identifies a binding with arguments by a hash of them, which only the broker can
	// compute: ask for it.
	found, err := listBindings(ctx, r, opDelete, b)
	if err != nil {
		return err
	}
	for _, f := range found {
		if !reflect.DeepEqual(f.arguments, args) {
			continue
		}
		if !strings.HasPrefix(f.location, "/bindings/") {
			return badReply(opDelete, resource, "GET", b.listPath(), 200, "a binding without a location")
		}
		if _, _, err := request(ctx, r, opDelete, resource, "DELETE", f.location, nil); err != nil {
			return err
		}
	}
	return nil
}

// Purge removes the ready messages of a queue and returns their number. Messages that consumers
// hold stay. If the queue doesn't exist, the error matches [ErrNotFound].
func Purge(ctx context.Context, r Requester, queue string) (messages uint64, err error) {
	if err := errors.Join(checkRequester(r), names.Check(queueName, queue)); err != nil {
		return 0, err
	}
	return countRequest(ctx, r, opPurge, queue, names.QueuePath(queue)+"/messages")
}

// countRequest sends a DELETE that is answered with a count of messages.
func countRequest(ctx context.Context, r Requester, op, queue, path string) (uint64, error) {
	resource := Resource{kindQueue, queue}
	status, reply, err := request(ctx, r, op, resource, "DELETE", path, nil)
	if err != nil {
		return 0, err
	}
	n, ok := replyUint(replyMap(reply)["message_count"])
	if !ok {
		return 0, badReply(op, resource, "DELETE", path, status, "no message_count")
	}
	return n, nil
}
