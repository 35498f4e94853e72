package partitionrig

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/partition"
)

// Throughput is what Measure finds.
type Throughput struct {
	Published, Handled int // messages a second
	// CPU time of a message: while it is published, in the publisher and the broker, and while it is
	// handled, in the broker and the worker.
	Publisher, Takes, Hands, Worker time.Duration
}

func (t Throughput) String() string {
	return fmt.Sprintf("published %d/s, handled %d/s; CPU of a message: publisher %v, and broker %v; broker %v, and worker %v",
		t.Published, t.Handled, t.Publisher, t.Takes, t.Hands, t.Worker)
}

// Measure publishes messages with different keys to a group, by four publishers, and then has them
// handled, by a worker for each connection. The handlers do nothing. broker is the CPU time that all
// nodes have taken.
func Measure(ctx context.Context, g partition.Group, messages int, broker func() time.Duration, conns ...*client.Conn) (t Throughput, err error) {
	const publishers, batch = 4, 500
	cpu := func() (own, brokers time.Duration) {
		var u syscall.Rusage
		err = errors.Join(err, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()), broker()
	}
	all := time.Duration(messages)
	own, brokers := cpu()
	began := time.Now()
	errs := make(chan error, publishers+len(conns))
	for i := range publishers {
		go func() { errs <- publishKeys(ctx, conns[i%len(conns)], g, i*messages, messages/publishers, batch) }()
	}
	for range publishers {
		err = errors.Join(err, <-errs)
	}
	took := time.Since(began)
	own2, brokers2 := cpu()
	t.Published, t.Publisher, t.Takes = int(float64(messages)/took.Seconds()), (own2-own)/all, (brokers2-brokers)/all
	if err != nil {
		return t, err
	}
	var count, first, last atomic.Int64
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	handler := client.HandlerFunc(func(context.Context, *client.Delivery) error {
		now := time.Now().UnixNano()
		first.CompareAndSwap(0, now)
		if count.Add(1) == int64(messages) {
			last.Store(now)
			stop()
		}
		return nil
	})
	for i, conn := range conns {
		go func() {
			errs <- partition.Consume(ctx, conn, g, handler, partition.Config{Worker: fmt.Sprint("w", i), Concurrency: 64})
		}()
	}
	for range conns {
		err = errors.Join(err, <-errs)
	}
	own3, brokers3 := cpu()
	t.Handled, t.Worker, t.Hands = int(float64(messages)/time.Duration(last.Load()-first.Load()).Seconds()), (own3-own2)/all, (brokers3-brokers2)/all
	if n := count.Load(); n < int64(messages) {
		err = errors.Join(err, fmt.Errorf("%d of %d messages were handled", n, messages))
	}
	return t, err
}

func publishKeys(ctx context.Context, conn *client.Conn, g partition.Group, first, n, batch int) error {
	p, err := client.NewPublisher[int](ctx, conn, address.Address{}, client.PublisherConfig{})
	if err != nil {
		return err
	}
	defer func() { _ = p.Close(context.WithoutCancel(ctx)) }()
	keys := make([]int, batch)
	for at := 0; at < n; at += batch {
		for i := range keys {
			keys[i] = first + at + i
		}
		if err := p.PublishAll(ctx, keys, func(key int, m *client.Message) {
			client.PublishTo(g.Address(fmt.Sprint(key)))(m)
		}); err != nil {
			return err
		}
	}
	return nil
}
