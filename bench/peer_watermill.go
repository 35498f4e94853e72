package main

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wm "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// watermillPeer is watermill-amqp, on AMQP 0-9-1. Its Publish waits for the
// confirmation on a channel that nobody else uses meanwhile, so it needs many callers
// and a pool of channels.
type watermillPeer struct{}

// wmChannels is the size of the pool: more were slower.
const wmChannels = 64

func wmConfig(url string) wm.Config {
	c := wm.NewDurableQueueConfig(url)
	c.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"}
	c.Publish.ConfirmDelivery = true
	c.Publish.ChannelPoolSize = wmChannels
	c.Consume.Qos.PrefetchCount = inFlight
	return c
}

func (watermillPeer) publish(ctx context.Context, url, queue string, body []byte, m *meter) error {
	p, err := wm.NewPublisher(wmConfig(url), watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer p.Close()
	return together(wmChannels, m.total(), func() error {
		if err := p.Publish(queue, message.NewMessage(strconv.FormatUint(messageIDs.Add(1), 10), body)); err != nil {
			return err
		}
		m.tick()
		return ctx.Err()
	})
}

func (watermillPeer) consume(ctx context.Context, url, queue string, asJSON bool, m *meter) error {
	s, err := wm.NewSubscriber(wmConfig(url), watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ds, err := s.Subscribe(ctx, queue)
	if err != nil {
		return err
	}
	for d := range ds {
		if asJSON {
			var o order
			if err := json.Unmarshal(d.Payload, &o); err != nil {
				return err
			}
		}
		m.tick()
		d.Ack()
		if ifDone(m) != nil {
			time.Sleep(500 * time.Millisecond) // Ack and Close don't wait for what is on its way
			return nil
		}
	}
	return errors.Join(ctx.Err(), errors.New("the subscription ended"))
}

func (watermillPeer) survive(ctx context.Context, url, queue string, got func([]byte)) error {
	s, err := wm.NewSubscriber(wmConfig(url), watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer s.Close()
	ds, err := s.Subscribe(ctx, queue)
	if err != nil {
		return err
	}
	for d := range ds {
		got(d.Payload)
		d.Ack()
	}
	return nil
}
