package main

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// amqp091Peer is the AMQP 0-9-1 client, with deferred confirmations: its fastest way to
// publish that loses nothing.
type amqp091Peer struct {
	handlers int // goroutines that consume; 0 means one
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

func (amqp091Peer) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, ch, err := open091(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := ch.Confirm(false); err != nil {
		return err
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

func deliveries091(ch *amqp091.Channel, queue string) (<-chan amqp091.Delivery, error) {
	if err := ch.Qos(inFlight, 0, false); err != nil {
		return nil, err
	}
	return ch.Consume(queue, "", false, false, false, false, nil)
}

func (p amqp091Peer) consume(ctx context.Context, url, queue string, m *meter) error {
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
