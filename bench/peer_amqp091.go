package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// amqp091Peer is the AMQP 0-9-1 client, with deferred confirmations: its fastest way to
// publish that loses nothing.
type amqp091Peer struct {
	handlers int  // goroutines that consume; 0 means one
	alone    bool // publishes one message at a time
}

func open091(url string) (*amqp091.Connection, *amqp091.Channel, error) {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return nil, nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, ch, nil
}

func message091(body []byte) amqp091.Publishing {
	return amqp091.Publishing{DeliveryMode: amqp091.Persistent, MessageId: strconv.FormatUint(messageIDs.Add(1), 10), Body: body}
}

// confirms awaits deferred confirmations in order, at most inFlight at a time.
func confirms(ctx context.Context, done func() error) (wait chan<- *amqp091.DeferredConfirmation, finish func() error) {
	waiting := make(chan *amqp091.DeferredConfirmation, inFlight)
	failed := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for c := range waiting {
			ok, err := c.WaitContext(ctx)
			if err == nil && !ok {
				err = errors.New("the broker said nack")
			}
			if err == nil {
				err = done()
			}
			if err != nil {
				select {
				case failed <- err:
				default:
				}
			}
		}
	})
	return waiting, func() error {
		close(waiting)
		wg.Wait()
		select {
		case err := <-failed:
			return err
		default:
			return nil
		}
	}
}

func (p amqp091Peer) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, ch, err := open091(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := ch.Confirm(false); err != nil {
		return err
	}
	if p.alone {
		return publishAlone091(ctx, ch, queue, body, m)
	}
	wait, finish := confirms(ctx, func() error { m.tick(); return nil })
	for range m.total() {
		var c *amqp091.DeferredConfirmation
		if c, err = ch.PublishWithDeferredConfirmWithContext(ctx, "", queue, false, false, message091(body)); err != nil {
			break
		}
		wait <- c
	}
	return errors.Join(err, finish())
}

func publishAlone091(ctx context.Context, ch *amqp091.Channel, queue string, body []byte, m *meter) error {
	for range m.total() {
		c, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", queue, false, false, message091(body))
		if err != nil {
			return err
		}
		if ok, err := c.WaitContext(ctx); err != nil || !ok {
			return errors.Join(err, errors.New("not confirmed"))
		}
		m.tick()
	}
	return nil
}

func deliveries091(ch *amqp091.Channel, queue string) (<-chan amqp091.Delivery, error) {
	if err := ch.Qos(inFlight, 0, false); err != nil {
		return nil, err
	}
	return ch.Consume(queue, "", false, false, false, false, nil)
}

func (p amqp091Peer) consume(ctx context.Context, url, queue string, asJSON bool, m *meter) error {
	conn, ch, err := open091(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ds, err := deliveries091(ch, queue)
	if err != nil {
		return err
	}
	handle := func(d amqp091.Delivery) error {
		if asJSON {
			var o order
			if err := json.Unmarshal(d.Body, &o); err != nil {
				return err
			}
		}
		m.tick()
		return d.Ack(false)
	}
	err = workers(max(p.handlers, 1), func() error {
		for {
			select {
			case d, ok := <-ds:
				if !ok {
					return errors.New("the channel was closed")
				}
				if err := handle(d); err != nil {
					return err
				}
			case <-m.done:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	if err == nil {
		// With the channel's end RabbitMQ drops acks that it hasn't passed on to the
		// queue yet, and nothing tells when it has. This isn't measured any more.
		time.Sleep(200 * time.Millisecond)
	}
	return err
}

func (amqp091Peer) stream(ctx context.Context, url, queue string, in <-chan []byte, ready func(), got func([]byte)) error {
	conn, ch, err := open091(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	other, out, err := open091(url)
	if err != nil {
		return err
	}
	defer other.Close()
	if err := out.Confirm(false); err != nil {
		return err
	}
	ds, err := deliveries091(ch, queue)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		for {
			select {
			case d, ok := <-ds:
				if !ok {
					return
				}
				got(d.Body)
				_ = d.Ack(false)
			case <-ctx.Done():
				return
			}
		}
	})
	wait, finish := confirms(context.WithoutCancel(ctx), func() error { return nil })
	ready()
	for err == nil {
		select {
		case body := <-in:
			var c *amqp091.DeferredConfirmation
			if c, err = out.PublishWithDeferredConfirm("", queue, false, false, message091(body)); err == nil {
				wait <- c
			}
			continue
		case <-ctx.Done():
		}
		break
	}
	cancel()
	wg.Wait()
	return errors.Join(err, finish())
}

// fail is the textbook decorator: publish, wait for the confirmation, and ack.
func (amqp091Peer) fail(ctx context.Context, url string, bed *retryBed, concurrency int, handle func([]byte) (time.Duration, bool)) error {
	conn, ch, err := open091(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	out, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := out.Confirm(false); err != nil {
		return err
	}
	ds, err := deliveries091(ch, bed.queues[0])
	if err != nil {
		return err
	}
	return workers(concurrency, func() error {
		for {
			select {
			case d, ok := <-ds:
				if !ok {
					return errors.New("the channel was closed")
				}
				if delay, again := handle(d.Body); again {
					headers := amqp091.Table{}
					for k, v := range d.Headers {
						headers[k] = v
					}
					n, _ := headers["x-retry-count"].(int64)
					headers["x-retry-count"] = n + 1
					c, err := out.PublishWithDeferredConfirm(bed.policy.Names.Prefix+"retry_exchange", fmt.Sprintf("delay.%d.%s", delay.Milliseconds(), bed.queues[0]), false, false,
						amqp091.Publishing{Headers: headers, DeliveryMode: amqp091.Persistent, MessageId: d.MessageId, Body: d.Body})
					if err != nil {
						return err
					}
					if ok, err := c.WaitContext(ctx); err != nil || !ok {
						return settledAll(ctx, errors.Join(err, errors.New("not confirmed")))
					}
				}
				if err := d.Ack(false); err != nil {
					return err
				}
			case <-ctx.Done():
				return nil
			}
		}
	})
}
