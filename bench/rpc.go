package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/rpc"
)

// rpcPeer has a requester and a responder, on a connection each, and answers with what it is
// asked.
type rpcPeer interface {
	// serve returns a function that makes one call. callers is how many call at once.
	serve(ctx context.Context, l *lab, queue string, callers int) (call func(ctx context.Context, body []byte) error, stop func() error, err error)
}

const (
	nHopDirect = "hopback, direct"
	nHopQueued = "hopback, by queue"
	nRawDirect = "go-amqp, direct"
	nRawQueued = "go-amqp, by queue"
)

func since42(b client.Broker) bool { return b.AtLeast(4, 2) }

func calling(callers int) contest {
	title := fmt.Sprintf("a call and its reply, 256 B, %d at once", callers)
	if callers == 1 {
		title = "a call and its reply, 256 B, one at a time"
	}
	return contest{
		name: fmt.Sprintf("rpc-%d", callers), title: title, run: runCalls(callers),
		contestants: []contestant{
			{name: nHopDirect, peer: hopRPC{rpc.RepliesDirect}, needs: since42}, {name: nRawDirect, peer: rawRPC{direct: true}, needs: since42},
			{name: nHopQueued, peer: hopRPC{rpc.RepliesByQueue}}, {name: nRawQueued, peer: rawRPC{}},
		},
		pairs: []pair{{ours: nHopDirect, peer: nRawDirect}, {ours: nHopQueued, peer: nRawQueued}},
	}
}

// runCalls measures the time from a call to its reply.
func runCalls(callers int) func(context.Context, *lab, contestant, int) (metrics, error) {
	return func(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
		queue, err := l.queue(ctx)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		call, stop, err := c.peer.(rpcPeer).serve(ctx, l, queue, callers)
		if err != nil {
			return nil, err
		}
		each := max(n/10, 200) / callers
		if callers > 1 {
			each = max(n/2, 200) / callers
		}
		warm := warmUp(each)
		body := orderBody(256)
		var mu sync.Mutex
		var took []time.Duration
		var errs []error
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				own := make([]time.Duration, 0, each)
				var err error
				for i := 0; i < warm+each && err == nil; i++ {
					at := time.Now()
					if err = call(ctx, body); i >= warm {
						own = append(own, time.Since(at))
					}
				}
				mu.Lock()
				defer mu.Unlock()
				took, errs = append(took, own...), append(errs, err)
			})
		}
		all.Wait()
		return timings(took), errors.Join(append(errs, stop())...)
	}
}

type hopRPC struct{ replies rpc.Replies }

func (p hopRPC) serve(ctx context.Context, l *lab, queue string, callers int) (func(context.Context, []byte) error, func() error, error) {
	asking, closeAsking, err := hopConnect(ctx, l.url)
	if err != nil {
		return nil, nil, err
	}
	answering, closeAnswering, err := hopConnect(ctx, l.url)
	if err != nil {
		return nil, nil, err
	}
	r, err := rpc.NewResponder(ctx, answering, rpc.ResponderConfig{Codec: client.RawCodec{}})
	if err != nil {
		return nil, nil, err
	}
	q, err := rpc.NewRequester[[]byte, []byte](ctx, asking, address.Queue(queue), rpc.RequesterConfig{Codec: client.RawCodec{}, Replies: p.replies})
	if err != nil {
		return nil, nil, err
	}
	consuming, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- answering.Consume(consuming, queue, rpc.Respond(r, func(_ context.Context, b []byte) ([]byte, error) { return b, nil }), client.ConsumerConfig{Concurrency: callers})
	}()
	call := func(ctx context.Context, body []byte) error {
		_, err := q.Call(ctx, body)
		return err
	}
	return call, func() error {
		err := q.Close(ctx)
		cancel()
		err = errors.Join(err, <-ended)
		closeAsking()
		closeAnswering()
		return err
	}, nil
}

// rawRPC is the same by hand, and does the same work: each request and each reply is confirmed,
// and a request is accepted after its reply is.
type rawRPC struct{ direct bool }

func (p rawRPC) serve(ctx context.Context, l *lab, queue string, callers int) (func(context.Context, []byte) error, func() error, error) {
	asking, s, err := rawConnect(ctx, l.url)
	if err != nil {
		return nil, nil, err
	}
	answering, rs, err := rawConnect(ctx, l.url)
	if err != nil {
		return nil, nil, err
	}
	replies, err := p.replies(ctx, l, s)
	if err != nil {
		return nil, nil, err
	}
	out, err := s.NewSender(ctx, queueAddress(queue), nil)
	if err != nil {
		return nil, nil, err
	}
	if err := answerByHand(ctx, rs, queue, callers); err != nil {
		return nil, nil, err
	}
	var mu sync.Mutex
	waiting := map[string]chan *amqp.Message{}
	go func() {
		for {
			m, err := replies.Receive(ctx, nil)
			if err != nil {
				return
			}
			if !p.direct {
				_ = replies.AcceptMessage(ctx, m)
			}
			id, _ := m.Properties.CorrelationID.(string)
			mu.Lock()
			c := waiting[id]
			delete(waiting, id)
			mu.Unlock()
			if c != nil {
				c <- m
			}
		}
	}()
	to := replies.Address()
	call := func(ctx context.Context, body []byte) error {
		m := rawMessage(body)
		id := m.Properties.MessageID.(string)
		m.Properties.ReplyTo, m.Properties.CorrelationID = &to, id
		c := make(chan *amqp.Message, 1)
		mu.Lock()
		waiting[id] = c
		mu.Unlock()
		receipt, err := out.SendWithReceipt(ctx, m, nil)
		if err == nil {
			_, err = receipt.Wait(ctx)
		}
		if err != nil {
			return err
		}
		select {
		case <-c:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return call, func() error { return errors.Join(asking.Close(), answering.Close()) }, nil
}

func (p rawRPC) replies(ctx context.Context, l *lab, s *amqp.Session) (*amqp.Receiver, error) {
	if p.direct {
		return s.NewReceiver(ctx, "", &amqp.ReceiverOptions{
			DynamicAddress: true, SourceCapabilities: []string{"rabbitmq:volatile-queue"}, SourceExpiryPolicy: amqp.ExpiryPolicyLinkDetach,
			RequestedSenderSettleMode: amqp.SenderSettleModeSettled.Ptr(), Credit: 256,
		})
	}
	name := l.name()
	// It expires by itself.
	if _, err := declare.Apply(ctx, l.conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: name, DeadLetter: declare.Drop(), Expires: time.Minute}}}); err != nil {
		return nil, err
	}
	return s.NewReceiver(ctx, queueAddress(name), &amqp.ReceiverOptions{Credit: 256})
}

func answerByHand(ctx context.Context, s *amqp.Session, queue string, concurrency int) error {
	in, err := s.NewReceiver(ctx, queueAddress(queue), &amqp.ReceiverOptions{Credit: int32(max(2*concurrency, 64))})
	if err != nil {
		return err
	}
	anywhere, err := s.NewSender(ctx, "", nil)
	if err != nil {
		return err
	}
	answer := func(m *amqp.Message) {
		reply := &amqp.Message{
			Header: &amqp.MessageHeader{Priority: 4}, Data: [][]byte{m.GetData()},
			Properties: &amqp.MessageProperties{To: m.Properties.ReplyTo, CorrelationID: m.Properties.CorrelationID},
		}
		if receipt, err := anywhere.SendWithReceipt(ctx, reply, nil); err == nil {
			if _, err = receipt.Wait(ctx); err == nil {
				_ = in.AcceptMessage(ctx, m)
			}
		}
	}
	go func() {
		slots := make(chan struct{}, concurrency)
		for {
			m, err := in.Receive(ctx, nil)
			if err != nil {
				return
			}
			slots <- struct{}{}
			go func() {
				answer(m)
				<-slots
			}()
		}
	}()
	return nil
}
