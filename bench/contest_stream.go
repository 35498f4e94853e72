package main

import (
	"context"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/stream"
)

// streamCredit is how many messages of a stream each peer may hold: 1,000 is the default
// of package stream.
const streamCredit = 1000

// streamReader consumes a stream from its beginning, one handler at a time, until m is
// done.
type streamReader interface {
	read(ctx context.Context, url, name string, m *meter) error
}

func streamContest() contest {
	return contest{
		name: "stream", title: "consume a stream from its beginning, no-op handler, 256 B", real: true, run: runStream,
		contestants: []contestant{{name: nHop, peer: hopback{}}, {name: nRaw, peer: rawPipelined{}}, {name: nOfficial, peer: official{}}},
		pairs:       []pair{{ours: nHop, peer: nOfficial, faster: 1.2, cpu: 0.8}, {ours: nHop, peer: nRaw}},
	}
}

// runStream has all contestants of a run read the same stream.
func runStream(ctx context.Context, l *lab, c contestant, n int) (metrics, error) {
	n = fit(n, 256)
	name, err := l.stream(ctx, warmUp(n)+n)
	if err != nil {
		return nil, err
	}
	m := newMeter(warmUp(n), n)
	settleDown()
	if err := c.peer.(streamReader).read(ctx, l.url, name, m); err != nil {
		return nil, err
	}
	return m.metrics(), nil
}

// stream returns a stream with n messages, which is made and filled the first time.
func (l *lab) stream(ctx context.Context, n int) (string, error) {
	l.mu.Lock()
	name := l.streams[n]
	l.mu.Unlock()
	if name != "" {
		return name, nil
	}
	name = l.name()
	if err := l.apply(ctx, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: name}}}); err != nil {
		return "", err
	}
	l.mu.Lock()
	l.streams[n] = name
	l.mu.Unlock()
	return name, l.fill(ctx, name, orderBody(256), n)
}

func (p hopback) read(ctx context.Context, url, name string, m *meter) error {
	conn, hangUp, err := hopConnect(p.with(ctx), url)
	if err != nil {
		return err
	}
	defer hangUp()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h := client.HandlerFunc(func(context.Context, *client.Delivery) error {
		m.tick()
		if ifDone(m) != nil {
			cancel()
		}
		return nil
	})
	// Positions are saved, as they would be.
	return stream.Consume(ctx, conn, name, h, stream.Config{Consumer: "bench", Offsets: &stream.MemoryStore{}, Prefetch: streamCredit, Logger: quiet})
}

func (official) read(ctx context.Context, url, name string, m *meter) error {
	conn, hangUp, err := officialConnect(ctx, url)
	if err != nil {
		return err
	}
	defer hangUp()
	c, err := conn.NewConsumer(ctx, name, &rabbitmqamqp.StreamConsumerOptions{InitialCredits: streamCredit, Offset: &rabbitmqamqp.OffsetFirst{}})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = c.Close(ctx)
	}()
	return settledAll(ctx, officialLoop(ctx, c, func(d rabbitmqamqp.IDeliveryContext) error {
		m.tick()
		if err := d.Accept(ctx); err != nil {
			return err
		}
		return ifDone(m)
	}))
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
