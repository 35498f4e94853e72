package partition

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
)

// mailbox is the queue on which a worker hears the others' beats. Old beats say nothing, so it
// keeps few, and RabbitMQ deletes it when the worker is gone.
func (g Group) mailbox() declare.Topology {
	q := declare.ClassicQueue{
		Name: g.members() + "." + rand.Text(), DeadLetter: declare.Drop(),
		MessageTTL: 10 * time.Second, MaxLength: 10_000, Expires: time.Minute,
	}
	return declare.Topology{Queues: []declare.Queue{q}, Bindings: []declare.Binding{{Source: g.members(), Queue: q.Name}}}
}

// listen calls hear with each beat of the group until ctx ends. It returns when the link is there.
// fail is called if it ends before ctx does.
func (g Group) listen(ctx, starting context.Context, conn *client.Conn, hear func(beat), fail context.CancelCauseFunc) (stop func(), err error) {
	box := g.mailbox()
	name := box.Queues[0].Address().QueueName()
	apply := func(ctx context.Context) error {
		_, err := declare.Apply(ctx, conn.Management(), box)
		return err
	}
	if err := apply(starting); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		err := conn.Consume(ctx, name, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			if b, ok := readBeat(d.Message().GetData()); ok {
				hear(b)
			}
			return nil
		}), client.ConsumerConfig{Prefetch: 100, OnGone: apply})
		if err != nil {
			fail(err)
		}
	})
	return func() {
		cancel()
		running.Wait()
		ctx, done := context.WithTimeout(context.Background(), 2*time.Second)
		defer done()
		_, _ = declare.DeleteQueue(ctx, conn.Management(), name)
	}, nil
}

// join connects the worker with the others. heard is the ctx of that.
func (w *worker) join(ctx, heard context.Context, conn *client.Conn, fail context.CancelCauseFunc) (leave func(), err error) {
	to := address.Exchange(w.group.members(), "")
	p, err := client.NewPublisher[beat](ctx, conn, to, client.PublisherConfig{})
	if err != nil {
		return nil, err
	}
	hangUp, err := w.group.listen(heard, ctx, conn, func(b beat) { w.do(func() { w.hear(b) }) }, fail)
	if err != nil {
		return nil, errors.Join(err, p.Close(ctx))
	}
	var sending sync.WaitGroup
	quit := make(chan struct{})
	sending.Go(func() {
		for {
			select {
			case b := <-w.beats:
				send(heard, p, b)
			case <-quit:
				select {
				case b := <-w.beats:
					send(heard, p, b)
				default:
				}
				return
			}
		}
	})
	return func() {
		close(quit)
		sending.Wait()
		hangUp()
		ctx, done := context.WithTimeout(context.Background(), time.Second)
		defer done()
		_ = p.Close(ctx)
	}, nil
}

// send publishes a beat. If it can't be sent soon, the next one says more.
func send(ctx context.Context, p *client.Publisher[beat], b beat) {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	_ = p.Publish(ctx, b)
}

// awaitOpen waits until Reshard has opened the group's generation; false: ctx has ended.
func (w *worker) awaitOpen(ctx context.Context, conn *client.Conn, in inside.Conn[*client.Delivery]) bool {
	for failures := 0; ; {
		switch _, err := declare.Inspect(ctx, conn.Management(), w.group.opened()); {
		case err == nil:
			return true
		case !errors.Is(err, declare.ErrNotFound):
			failures++
		case failures == 0:
			w.log.Info("hopback: this generation of the group waits for Reshard", "generation", w.group.Generation)
			failures++
		}
		if !link.Pause(ctx, time.Second) {
			return false
		}
	}
}

// lastReports sends the last beat, after the loop has ended.
func (w *worker) lastReports() {
	w.leaving = true
	for _, p := range w.parts {
		if p.serves {
			p.serves = false
			w.assigned(p, false)
		}
	}
	w.report(false)
}
