package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
)

// official is RabbitMQ's own AMQP 1.0 client.
type official struct{}

func officialConnect(ctx context.Context, address string) (*rabbitmqamqp.AmqpConnection, func(), error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, nil, err
	}
	password, _ := u.User.Password()
	env := rabbitmqamqp.NewEnvironment(address, &rabbitmqamqp.AmqpConnOptions{SASLType: amqp.SASLTypePlain(u.User.Username(), password)})
	conn, err := env.NewConnection(ctx)
	if err != nil {
		return nil, nil, err
	}
	return conn, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}, nil
}

func officialMessage(body []byte) *amqp.Message {
	m := rabbitmqamqp.NewMessage(body)
	m.Header = &amqp.MessageHeader{Durable: true, Priority: 4}
	m.Properties = &amqp.MessageProperties{MessageID: strconv.FormatUint(messageIDs.Add(1), 10)}
	return m
}

func officialOutcome(r *rabbitmqamqp.PublishResult, err error) error {
	if err != nil {
		return err
	}
	if _, ok := r.Outcome.(*rabbitmqamqp.StateAccepted); !ok {
		return fmt.Errorf("the broker said %T", r.Outcome)
	}
	return nil
}

func (official) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	p, err := conn.NewPublisher(ctx, &rabbitmqamqp.QueueAddress{Queue: queue}, &rabbitmqamqp.PublisherOptions{MaxInFlight: inFlight})
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	answered := func(r *rabbitmqamqp.PublishResult, err error) {
		if err := officialOutcome(r, err); err != nil {
			select {
			case failed <- err:
			default:
			}
			return
		}
		m.tick()
	}
	for range m.total() {
		if err := p.PublishAsync(ctx, officialMessage(body), answered); err != nil {
			return err
		}
	}
	select {
	case <-m.done:
		return nil
	case err := <-failed:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (official) consume(ctx context.Context, url, queue string, asJSON bool, m *meter) error {
	return officialReceive(ctx, url, queue, func(d rabbitmqamqp.IDeliveryContext) error {
		if asJSON {
			var o order
			if err := json.Unmarshal(d.Message().GetData(), &o); err != nil {
				return err
			}
		}
		m.tick()
		if err := d.Accept(ctx); err != nil {
			return err
		}
		return ifDone(m)
	})
}

func officialReceive(ctx context.Context, url, queue string, handle func(rabbitmqamqp.IDeliveryContext) error) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	c, err := conn.NewConsumer(ctx, queue, &rabbitmqamqp.ConsumerOptions{InitialCredits: inFlight})
	if err != nil {
		return err
	}
	return settledAll(ctx, officialLoop(ctx, c, handle))
}

func officialLoop(ctx context.Context, c *rabbitmqamqp.Consumer, handle func(rabbitmqamqp.IDeliveryContext) error) error {
	for {
		d, err := c.Receive(ctx)
		if err != nil {
			return err
		}
		if err := handle(d); err != nil {
			return err
		}
	}
}

func (official) stream(ctx context.Context, url, queue string, in <-chan []byte, ready func(), got func([]byte)) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	p, err := conn.NewPublisher(ctx, &rabbitmqamqp.QueueAddress{Queue: queue}, &rabbitmqamqp.PublisherOptions{MaxInFlight: inFlight})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var consumed error
	wg.Go(func() {
		defer cancel()
		consumed = officialReceive(ctx, url, queue, func(d rabbitmqamqp.IDeliveryContext) error {
			got(d.Message().GetData())
			return d.Accept(ctx)
		})
	})
	ready()
	for err == nil {
		select {
		case body := <-in:
			err = p.PublishAsync(context.WithoutCancel(ctx), officialMessage(body), nil)
			continue
		case <-ctx.Done():
		}
		break
	}
	cancel()
	wg.Wait()
	return errors.Join(err, consumed)
}

// fail is the textbook decorator on the official client.
func (official) fail(ctx context.Context, url string, bed *retryBed, concurrency int, handle func([]byte) (time.Duration, bool)) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	publishers := map[time.Duration]*rabbitmqamqp.Publisher{}
	for _, d := range bed.delays {
		to := &rabbitmqamqp.ExchangeAddress{Exchange: bed.policy.Names.Prefix + "retry_exchange", Key: fmt.Sprintf("delay.%d.%s", d.Milliseconds(), bed.queues[0])}
		if publishers[d], err = conn.NewPublisher(ctx, to, nil); err != nil {
			return err
		}
	}
	c, err := conn.NewConsumer(ctx, bed.queues[0], &rabbitmqamqp.ConsumerOptions{InitialCredits: inFlight})
	if err != nil {
		return err
	}
	return workers(concurrency, func() error {
		return settledAll(ctx, officialLoop(ctx, c, func(d rabbitmqamqp.IDeliveryContext) error {
			if delay, again := handle(d.Message().GetData()); again {
				if err := officialOutcome(publishers[delay].Publish(ctx, rawRetry(d.Message()))); err != nil {
					return err
				}
			}
			return d.Accept(ctx)
		}))
	})
}

func (official) survive(ctx context.Context, url, queue string, got func([]byte)) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	c, err := conn.NewConsumer(ctx, queue, &rabbitmqamqp.ConsumerOptions{InitialCredits: inFlight})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		d, err := c.Receive(ctx)
		if err != nil {
			time.Sleep(time.Millisecond) // it returns errors while it reconnects
			continue
		}
		got(d.Message().GetData())
		_ = d.Accept(ctx)
	}
	return nil
}
