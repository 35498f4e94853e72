package chaos

import (
	"bytes"
	"context"
	"errors"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/rpc"
)

// Called is a service that answers requests with package rpc. Its callers wait for the replies.
const Called = "called"

// Misanswered is a call that got another's reply, or a reply to a request that never succeeds, or none to one that does.
const Misanswered ViolationKind = "misanswered"

// calling calls with the messages of lane "called". A call that has ended with a reply, or because its request is a
// dead letter, was accepted.
type calling struct {
	l *simLane
	r *rpc.Requester[*client.Message, *client.Message]
}

// Publish waits for the reply as long as it takes, with all retries: a request that expires would be gone.
func (c calling) Publish(ctx context.Context, m *client.Message, _ ...func(*client.Message)) error {
	_, id, err := c.l.read(m)
	if err != nil {
		return err
	}
	once, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.l.stretch(giveUpAfter))
	defer cancel()
	reply, err := c.r.Call(once, m, func(out *client.Message) { out.Properties.MessageID = messageName(c.l.n, id) })
	succeeds := c.l.script.Fate(c.l.n, id).End == EndHandled
	var givenUp *rpc.GivenUpError
	switch {
	case errors.As(err, &givenUp) && succeeds:
		c.l.wrong(Misanswered, c.l.n, "message %d: %v, though its handler succeeds in the end", id, err)
	case err == nil && !succeeds:
		c.l.wrong(Misanswered, c.l.n, "message %d has a reply, though its handler never succeeds", id)
	case err == nil && !bytes.Equal(reply.GetData(), m.GetData()):
		c.l.wrong(Misanswered, c.l.n, "message %d has the reply %x to another request", id, reply.GetData()[:min(len(reply.GetData()), bodyHead)])
	}
	if givenUp != nil {
		return nil
	}
	return err
}

// newCalling opens a requester.
func (l *simLane) newCalling(ctx context.Context, conn *client.Conn) (publishing, error) {
	r, err := rpc.NewRequester[*client.Message, *client.Message](ctx, conn, address.Queue(l.queue), rpc.RequesterConfig{})
	return calling{l, r}, err
}

type deliveryKey struct{}

// answer returns the handler of one life of a worker: its reply is the request.
func (w *simWorker) answer(life context.Context, conn *client.Conn) (client.Handler, error) {
	r, err := rpc.NewResponder(life, conn, rpc.ResponderConfig{})
	if err != nil {
		return nil, err
	}
	inner := rpc.Respond(r, func(ctx context.Context, m *client.Message) (*client.Message, error) {
		d, _ := ctx.Value(deliveryKey{}).(*client.Delivery)
		if err := w.handle(ctx, d); err != nil {
			return nil, err
		}
		return client.NewMessage(m.GetData()), nil
	})
	return client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
		return inner.Handle(context.WithValue(ctx, deliveryKey{}, d), d)
	}), nil
}
