package declare

import (
	"context"
	"errors"
	"reflect"
	"strings"
)

// Delete makes the broker not have t: bindings first, then queues with all
// messages in them, then exchanges. What isn't there is no error. Bindings of an
// exchange or a queue that is deleted go with it.
//
// Errors and Report are as with [Apply], but that DeadLetter needn't be
// answered, nor any other argument be right: only names count.
func Delete(ctx context.Context, r Requester, t Topology) (Report, error) {
	return remove(ctx, r, t, false)
}

// remove deletes t; if unused, a queue only when AMQP tells of no message and no
// consumer.
func remove(ctx context.Context, r Requester, t Topology, unused bool) (Report, error) {
	errs := []error{checkRequester(r)}
	queues, exchanges := map[string]bool{}, map[string]bool{}
	var bindingSteps, queueSteps, exchangeSteps []step
	for _, q := range t.Queues {
		if isNil(q) || queues[q.Address().QueueName()] {
			continue
		}
		name := q.Address().QueueName()
		queues[name] = true
		errs = append(errs, checkName(label("Queue", name)+".Name", name))
		queueSteps = append(queueSteps, step{thing: Thing{KindQueue, name}, do: func(ctx context.Context) (Outcome, error) {
			if unused {
				_, err := DeleteQueueIf(ctx, Sources{AMQP: r}, name, If{Empty: true, Unused: true})
				return deleted(err)
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
		errs = append(errs, checkOwnName(label("Exchange", x.Name)+".Name", x.Name, keepOwn))
		exchangeSteps = append(exchangeSteps, step{thing: Thing{KindExchange, x.Name}, do: func(ctx context.Context) (Outcome, error) {
			return deleted(deleteExchange(ctx, r, x.Name))
		}})
	}
	for _, b := range t.Bindings {
		if exchanges[b.Source] || queues[b.Queue] || exchanges[b.Exchange] {
			continue
		}
		errs = append(errs, b.Validate())
		bindingSteps = append(bindingSteps, step{thing: Thing{KindBinding, b.describe()}, do: func(ctx context.Context) (Outcome, error) {
			return deleted(deleteBinding(ctx, r, b))
		}})
	}
	if err := errors.Join(errs...); err != nil {
		return Report{}, err
	}
	return run(ctx, [][]step{bindingSteps, queueSteps, exchangeSteps})
}

const keepOwn = "the broker's own exchanges can't be deleted: leave it out"

func deleted(err error) (Outcome, error) {
	if err != nil {
		return outcomeOf(err), err
	}
	return Deleted, nil
}

// DeleteQueue deletes a queue with everything in it, and returns how many
// messages were ready in it. A queue that doesn't exist is no error.
func DeleteQueue(ctx context.Context, r Requester, name string) (messages uint64, err error) {
	if err := errors.Join(checkRequester(r), checkName("queue name", name)); err != nil {
		return 0, err
	}
	return deleteQueue(ctx, r, name)
}

func deleteQueue(ctx context.Context, r Requester, name string) (uint64, error) {
	return countRequest(ctx, r, opDelete, name, queuePath(name))
}

// DeleteExchange deletes an exchange and its bindings. An exchange that doesn't
// exist is no error.
func DeleteExchange(ctx context.Context, r Requester, name string) error {
	if err := errors.Join(checkRequester(r), checkOwnName("exchange name", name, keepOwn)); err != nil {
		return err
	}
	return deleteExchange(ctx, r, name)
}

func deleteExchange(ctx context.Context, r Requester, name string) error {
	_, _, err := request(ctx, r, opDelete, Thing{KindExchange, name}, "DELETE", exchangePath(name), nil)
	return err
}

// DeleteBinding deletes the one binding that has the same ends, key, headers
// and arguments. A binding that doesn't exist is no error.
func DeleteBinding(ctx context.Context, r Requester, b Binding) error {
	if err := errors.Join(checkRequester(r), b.Validate()); err != nil {
		return err
	}
	return deleteBinding(ctx, r, b)
}

func deleteBinding(ctx context.Context, r Requester, b Binding) error {
	thing := Thing{KindBinding, b.describe()}
	args, _ := b.arguments("")
	if len(args) == 0 {
		_, _, err := request(ctx, r, opDelete, thing, "DELETE", b.deletePath(), nil)
		return err
	}
	// A binding with arguments is known to the broker by a hash of them, which
	// only the broker can compute: ask for it.
	found, err := listBindings(ctx, r, opDelete, b)
	if err != nil {
		return err
	}
	for _, f := range found {
		if !reflect.DeepEqual(f.arguments, args) {
			continue
		}
		if !strings.HasPrefix(f.location, "/bindings/") {
			return badReply(opDelete, thing, "GET", b.listPath(), 200, "a binding without a location")
		}
		if _, _, err := request(ctx, r, opDelete, thing, "DELETE", f.location, nil); err != nil {
			return err
		}
	}
	return nil
}

// Purge removes the messages that are ready in a queue and returns how many
// those were; messages that a consumer holds stay. A queue that doesn't exist
// is [ErrNotFound].
func Purge(ctx context.Context, r Requester, queue string) (messages uint64, err error) {
	if err := errors.Join(checkRequester(r), checkName("queue name", queue)); err != nil {
		return 0, err
	}
	return countRequest(ctx, r, opPurge, queue, queuePath(queue)+"/messages")
}

// countRequest sends a DELETE that is answered with a count of messages.
func countRequest(ctx context.Context, r Requester, op, queue, path string) (uint64, error) {
	thing := Thing{KindQueue, queue}
	status, reply, err := request(ctx, r, op, thing, "DELETE", path, nil)
	if err != nil {
		return 0, err
	}
	n, ok := replyUint(replyMap(reply)["message_count"])
	if !ok {
		return 0, badReply(op, thing, "DELETE", path, status, "no message_count")
	}
	return n, nil
}
