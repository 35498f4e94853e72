package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/retry"
)

// rawPipelined is go-amqp used as well as one can by hand: it doesn't wait for an
// answer before it sends the next message, and gives credit in batches. handlers is how
// many goroutines consume; 0 means one.
type rawPipelined struct{ handlers int }

// rawOneByOne is go-amqp used as its examples do: Send, which waits.
type rawOneByOne struct{}

func rawConnect(ctx context.Context, address string) (*amqp.Conn, *amqp.Session, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	vhost := "/"
	if len(u.Path) > 1 {
		vhost = u.Path[1:]
	}
	password, _ := u.User.Password()
	conn, err := amqp.Dial(ctx, address, &amqp.ConnOptions{HostName: "vhost:" + vhost, SASLType: amqp.SASLTypePlain(u.User.Username(), password)})
	if err != nil {
		return nil, nil, err
	}
	s, err := conn.NewSession(ctx, nil)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, s, nil
}

func rawMessage(body []byte) *amqp.Message {
	return &amqp.Message{
		Header:     &amqp.MessageHeader{Durable: true, Priority: 4},
		Properties: &amqp.MessageProperties{MessageID: strconv.FormatUint(messageIDs.Add(1), 10)},
		Data:       [][]byte{body},
	}
}

func queueAddress(queue string) string {
	a, err := address.Queue(queue).Build()
	if err != nil {
		panic(err) // the names are ours
	}
	return a
}

// pipeline sends on one link and calls done, in order, once each message is
// accepted.
type pipeline struct {
	sender  *amqp.Sender
	waiting chan awaited
	wg      sync.WaitGroup
	failed  chan error // one, for the first failure
}

type awaited struct {
	receipt amqp.SendReceipt
	done    func() error
}

func newPipeline(ctx context.Context, s *amqp.Session, to string) (*pipeline, error) {
	sender, err := s.NewSender(ctx, to, nil)
	if err != nil {
		return nil, err
	}
	p := &pipeline{sender: sender, waiting: make(chan awaited, inFlight), failed: make(chan error, 1)}
	p.wg.Go(func() {
		for a := range p.waiting {
			state, err := a.receipt.Wait(ctx)
			if _, ok := state.(*amqp.StateAccepted); err == nil && !ok {
				err = fmt.Errorf("the broker said %T", state)
			}
			if err == nil {
				err = a.done()
			}
			if err != nil {
				select {
				case p.failed <- err:
				default:
				}
			}
		}
	})
	return p, nil
}

func (p *pipeline) send(ctx context.Context, m *amqp.Message, done func() error) error {
	r, err := p.sender.SendWithReceipt(ctx, m, nil)
	if err != nil {
		return err
	}
	p.waiting <- awaited{r, done}
	return nil
}

// close waits for the answers.
func (p *pipeline) close() error {
	close(p.waiting)
	p.wg.Wait()
	select {
	case err := <-p.failed:
		return err
	default:
		return nil
	}
}

func (rawPipelined) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, s, err := rawConnect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close()
	p, err := newPipeline(ctx, s, queueAddress(queue))
	if err != nil {
		return err
	}
	done := func() error { m.tick(); return nil }
	for range m.total() {
		if err = p.send(ctx, rawMessage(body), done); err != nil {
			break
		}
	}
	return errors.Join(err, p.close())
}

func (rawOneByOne) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, s, err := rawConnect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close()
	sender, err := s.NewSender(ctx, queueAddress(queue), nil)
	if err != nil {
		return err
	}
	for range m.total() {
		if err := sender.Send(ctx, rawMessage(body), nil); err != nil {
			return err
		}
		m.tick()
	}
	return nil
}

// rawReceive hands every message to handle, which settles it, and grants credit in
// batches of half a window. So many goroutines receive and handle: Receive may be called by
// several at once, which takes one handoff less than a goroutine that hands out messages.
func rawReceive(ctx context.Context, s *amqp.Session, queue string, handlers int, handle func(*amqp.Receiver, *amqp.Message) error) error {
	r, err := s.NewReceiver(ctx, queueAddress(queue), &amqp.ReceiverOptions{Credit: -1})
	if err != nil {
		return err
	}
	if err := r.IssueCredit(inFlight); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var received atomic.Int64
	loop := func() error {
		for {
			m, err := r.Receive(ctx, nil)
			if err != nil {
				return err
			}
			if err := handle(r, m); err != nil {
				return err
			}
			if received.Add(1)%(inFlight/2) == 0 {
				if err := r.IssueCredit(inFlight / 2); err != nil {
					return err
				}
			}
		}
	}
	// The first that ends tells why; the others end because of it.
	var once sync.Once
	var first error
	_ = workers(max(handlers, 1), func() error {
		err := loop()
		once.Do(func() { first = err })
		cancel()
		return nil
	})
	return first
}

var errDone = errors.New("done")

// settledAll turns the end of a loop that was meant to end into nil.
func settledAll(ctx context.Context, err error) error {
	if errors.Is(err, errDone) || ctx.Err() != nil {
		return nil
	}
	return err
}

func (p rawPipelined) consume(ctx context.Context, url, queue string, m *meter) error {
	conn, s, err := rawConnect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close()
	open := context.WithoutCancel(ctx)
	err = settledAll(ctx, rawReceive(ctx, s, queue, p.handlers, func(r *amqp.Receiver, msg *amqp.Message) error {
		m.tick()
		// The end of the last one must not keep others from accepting handled messages.
		if err := r.AcceptMessage(open, msg); err != nil {
			return err
		}
		return ifDone(m)
	}))
	if err != nil {
		return err
	}
	// go-amqp may write a session's end before settlements that it still holds, and
	// nothing tells when it has written them. This isn't measured any more.
	time.Sleep(200 * time.Millisecond)
	return s.Close(open)
}

func ifDone(m *meter) error {
	select {
	case <-m.done:
		return errDone
	default:
		return nil
	}
}

// rawRetry is what a retried message looks like in a system without hopback: a copy
// with a counter.
func rawRetry(m *amqp.Message) *amqp.Message {
	c := &amqp.Message{Header: &amqp.MessageHeader{Durable: true, Priority: 4}, Properties: m.Properties, Data: m.Data}
	c.ApplicationProperties = make(map[string]any, len(m.ApplicationProperties)+1)
	for k, v := range m.ApplicationProperties {
		c.ApplicationProperties[k] = v
	}
	n, _ := c.ApplicationProperties["x-retry-count"].(int64)
	c.ApplicationProperties["x-retry-count"] = n + 1
	return c
}

// workers runs work by so many goroutines, and joins what they return.
func workers(n int, work func() error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = work() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// fail sends the copy without waiting, and accepts the original once the broker has
// confirmed the copy. Nobody does this by hand, and it loses its place when a link
// ends; it shows what go-amqp can do.
func (rawPipelined) fail(ctx context.Context, url string, bed *retryBed, concurrency int, meter *meter) error {
	conn, s, err := rawConnect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close()
	key, err := retry.RoutingKey(failDelay, bed.queues[0])
	if err != nil {
		return err
	}
	to, err := address.Exchange(bed.policy.Names.Prefix+"retry_exchange", key).Build()
	if err != nil {
		return err
	}
	open := context.WithoutCancel(ctx)
	copies, err := newPipeline(open, s, to)
	if err != nil {
		return err
	}
	err = settledAll(ctx, rawReceive(ctx, s, bed.queues[0], concurrency, func(r *amqp.Receiver, m *amqp.Message) error {
		meter.tick()
		return copies.send(open, rawRetry(m), func() error { return r.AcceptMessage(open, m) })
	}))
	return errors.Join(err, copies.close())
}

// read has the broker settle as it sends, which is the fastest that go-amqp can do.
func (rawPipelined) read(ctx context.Context, url, name string, m *meter) error {
	conn, s, err := rawConnect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	r, err := s.NewReceiver(ctx, "/queues/"+name, &amqp.ReceiverOptions{
		Credit: streamCredit, RequestedSenderSettleMode: amqp.SenderSettleModeSettled.Ptr(),
		Filters: []amqp.LinkFilter{amqp.NewLinkFilter("rabbitmq:stream-offset-spec", 0, "first")},
	})
	if err != nil {
		return err
	}
	for ifDone(m) == nil {
		if _, err := r.Receive(ctx, nil); err != nil {
			return err
		}
		m.tick()
	}
	return nil
}
