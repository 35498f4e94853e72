package officialclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/adapter/officialclient/internal/grace"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// fakeBroker makes connections whose faults a test chooses.
type fakeBroker struct {
	// dialErr, attachErr and publish are asked each time; nil means success.
	dialErr   func() error
	attachErr func(to address.Address) error
	answer    func(to address.Address, m *client.Message) (rabbitmqamqp.DeliveryState, error)
	// drops says that the queue isn't known to have a dead-letter exchange.
	drops atomic.Bool
	// received is what consumers get, in order.
	received chan any // a delivery, an error, or a func() that panics

	mu       sync.Mutex
	credits  []int32
	dials    int
	open     int
	attaches map[address.Address]int
}

func newFakeBroker() *fakeBroker {
	return &fakeBroker{received: make(chan any, 1000), attaches: map[address.Address]int{}}
}

func (b *fakeBroker) dial(context.Context) (connection, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dials++
	if b.dialErr != nil {
		if err := b.dialErr(); err != nil {
			return nil, err
		}
	}
	b.open++
	return &fakeConnection{b: b, gone: make(chan struct{})}, nil
}

func (b *fakeBroker) counts() (dials, open int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dials, b.open
}

type fakeConnection struct {
	b    *fakeBroker
	once sync.Once
	gone chan struct{}
}

func (c *fakeConnection) broker() client.Broker { return client.Broker{Version: "4.3.6"} }

func (c *fakeConnection) deadLetters(context.Context, string) bool { return !c.b.drops.Load() }

func (c *fakeConnection) close() {
	c.once.Do(func() {
		close(c.gone)
		c.b.mu.Lock()
		defer c.b.mu.Unlock()
		c.b.open--
	})
}

func (c *fakeConnection) consumer(_ context.Context, _ string, credits int32) (consumer, error) {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.b.credits = append(c.b.credits, credits)
	return &fakeConsumer{c: c}, nil
}

func (c *fakeConnection) publisher(_ context.Context, to address.Address) (publisher, error) {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.b.attaches[to]++
	if c.b.attachErr != nil {
		if err := c.b.attachErr(to); err != nil {
			return nil, err
		}
	}
	return &fakePublisher{c: c, to: to}, nil
}

type fakeConsumer struct{ c *fakeConnection }

func (k *fakeConsumer) close() {}

func (k *fakeConsumer) Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-k.c.gone:
		return nil, &amqp.ConnError{}
	case v := <-k.c.b.received:
		switch v := v.(type) {
		case error:
			return nil, v
		case func():
			v()
		case rabbitmqamqp.IDeliveryContext:
			return v, nil
		}
		return nil, nil
	}
}

type fakePublisher struct {
	c  *fakeConnection
	to address.Address
}

func (p *fakePublisher) close() {}

func (p *fakePublisher) publish(m *client.Message) (rabbitmqamqp.DeliveryState, error) {
	if p.c.b.answer == nil {
		return &rabbitmqamqp.StateAccepted{}, nil
	}
	return p.c.b.answer(p.to, m)
}

var quiet = slog.New(slog.DiscardHandler)

// start runs consume in the bubble; stop ends it and wants nil.
func start(t *testing.T, b *fakeBroker, cfg Config, h client.HandlerFunc) (stop func()) {
	t.Helper()
	cfg.Logger = quiet
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- consume(ctx, b.dial, "orders", h, cfg) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
		_, open := b.counts()
		assert.Zero(t, open, "every connection is closed")
	}
}

func (b *fakeBroker) deliver(id string) *settledDelivery {
	d := newDelivery(id)
	b.received <- d
	return d
}

func TestOriginalIsAcceptedOnlyAfterItsCopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		confirm := make(chan rabbitmqamqp.DeliveryState)
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) { return <-confirm, nil }
		var running atomic.Int64
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			running.Add(1)
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		first, second := b.deliver("1"), b.deliver("2")
		synctest.Wait()
		assert.EqualValues(t, 2, running.Load(), "a copy that isn't confirmed holds no slot")
		assert.Empty(t, first.did)
		confirm <- &rabbitmqamqp.StateAccepted{}
		confirm <- &rabbitmqamqp.StateAccepted{}
		assert.Equal(t, "accept", <-first.did)
		assert.Equal(t, "accept", <-second.did)
		stop()
	})
}

// A middleware that hides the Prepare of retry.With ends Consume, as in package client.
func TestHiddenPrepareEndsConsume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		inner := retry.With(retry.Policy{})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			t.Error("handled")
			return nil
		}))
		hiding := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return inner.Handle(ctx, d) })
		done := make(chan error, 1)
		go func() { done <- consume(t.Context(), b.dial, "orders", hiding, Config{Logger: quiet}) }()
		d := b.deliver("1")
		assert.Equal(t, "requeue", <-d.did)
		require.ErrorAs(t, <-done, new(*argument.Error))
	})
}

func TestForwardThatIsNotAcceptedGoesBack(t *testing.T) {
	for name, answer := range map[string]func() (rabbitmqamqp.DeliveryState, error){
		"released": func() (rabbitmqamqp.DeliveryState, error) { return &rabbitmqamqp.StateReleased{}, nil },
		"rejected": func() (rabbitmqamqp.DeliveryState, error) { return &rabbitmqamqp.StateRejected{}, nil },
		"lost":     func() (rabbitmqamqp.DeliveryState, error) { return nil, &amqp.ConnError{} },
		"link":     func() (rabbitmqamqp.DeliveryState, error) { return nil, &amqp.LinkError{} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker()
				var tries atomic.Int64
				b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
					tries.Add(1)
					return answer()
				}
				stop := start(t, b, Config{ForwardPatience: 20 * time.Second}, func(_ context.Context, d *client.Delivery) error {
					return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
				})
				began := time.Now()
				d := b.deliver("1")
				assert.Equal(t, "requeue with 1", <-d.did, "kept, as a failed delivery")
				assert.Greater(t, tries.Load(), int64(3))
				assert.LessOrEqual(t, time.Since(began), 20*time.Second)
				stop()
			})
		})
	}
}

// A queue that isn't known to have a dead-letter exchange would drop what fails too
// often: the original is kept until its copy is accepted.
func TestForwardThatIsNeverAcceptedIsKeptWhereTheQueueWouldDropIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		b.drops.Store(true)
		var accepts atomic.Bool
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			if accepts.Load() {
				return &rabbitmqamqp.StateAccepted{}, nil
			}
			return &rabbitmqamqp.StateReleased{}, nil
		}
		stop := start(t, b, Config{ForwardPatience: 20 * time.Second, FailureLimit: 1}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		time.Sleep(24 * time.Hour)
		assert.Empty(t, d.did)
		dials, _ := b.counts()
		assert.Less(t, dials, 2*24*3600/20, "the broker is asked once for each time that the patience ends, at most")
		accepts.Store(true)
		assert.Equal(t, "accept", <-d.did)

		// Once the queue is known to have one, the original goes back.
		accepts.Store(false)
		d = b.deliver("2")
		time.Sleep(time.Hour)
		assert.Empty(t, d.did)
		b.drops.Store(false)
		assert.Equal(t, "requeue with 1", <-d.did)
		stop()
	})
}

// A drain doesn't wait for a copy that isn't accepted, and settles nothing.
func TestDrainLeavesWhatIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		b.drops.Store(true)
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			return &rabbitmqamqp.StateReleased{}, nil
		}
		stop := start(t, b, Config{ForwardPatience: time.Second, Grace: time.Hour}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		time.Sleep(time.Minute)
		t0 := time.Now()
		stop()
		assert.LessOrEqual(t, time.Since(t0), 10*time.Second)
		assert.Empty(t, d.did, "the broker delivers it again")
	})
}

func TestForwardRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		var tries atomic.Int64
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			switch tries.Add(1) {
			case 1:
				return nil, &amqp.SessionError{}
			case 2:
				return nil, &amqp.LinkError{}
			case 3:
				return nil, &PanicError{Call: "publish"}
			}
			return &rabbitmqamqp.StateAccepted{}, nil
		}
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		assert.Equal(t, "accept", <-d.did)
		stop()
	})
}

func TestForwardTooLargeIsDeadLettered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			return nil, &amqp.Error{Condition: amqp.ErrCondMessageSizeExceeded}
		}
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		assert.Equal(t, "discard with unforwardable", <-d.did)
		stop()
	})
}

// A hundred messages for an exchange that is missing make few attempts to attach.
func TestAttachIsSharedAndSpacedOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		missing := address.Exchange("missing", "k")
		b.attachErr = func(to address.Address) error {
			if to == missing {
				return &amqp.SessionError{RemoteErr: &amqp.Error{Condition: amqp.ErrCondNotFound}}
			}
			return nil
		}
		stop := start(t, b, Config{Concurrency: 100, Prefetch: 200, ForwardPatience: 10 * time.Second}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: missing, Message: client.Copy(d.Message())}
		})
		var ds []*settledDelivery
		for i := range 100 {
			ds = append(ds, b.deliver(fmt.Sprint(i)))
		}
		for _, d := range ds {
			assert.Equal(t, "requeue with 1", <-d.did)
		}
		b.mu.Lock()
		assert.Less(t, b.attaches[missing], 30)
		b.mu.Unlock()
		stop()
	})
}

func TestLinksToAddressesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		f := newForwarder(b.dial, 10, client.ReconnectBackoff{Min: time.Millisecond, Max: time.Second})
		for i := range 3 * maxTargets {
			require.NoError(t, f.send(nil, address.Queue(fmt.Sprintf("q-%d", i)), client.NewMessage([]byte("m")), time.Second, nil))
			assert.LessOrEqual(t, len(f.targets), maxTargets)
		}
		f.close()
		require.ErrorIs(t, f.send(nil, address.Queue("late"), client.NewMessage([]byte("m")), time.Second, nil), errStopped)
	})
}

func TestConsumerIsReplacedWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		var down atomic.Bool
		b.dialErr = func() error {
			if down.Load() {
				return errDown
			}
			return nil
		}
		stop := start(t, b, Config{}, func(context.Context, *client.Delivery) error { return nil })
		d := b.deliver("1")
		assert.Equal(t, "accept", <-d.did)
		down.Store(true)
		b.received <- &amqp.LinkError{}
		time.Sleep(5 * time.Minute)
		dials, _ := b.counts()
		assert.Less(t, dials, 200, "no hot loop")
		down.Store(false)
		d = b.deliver("2")
		assert.Equal(t, "accept", <-d.did)
		stop()
	})
}

// What was received on a lost link can't be settled, so no handler begins on it
// and no copy of it is sent any more.
func TestLostLinkAbandonsItsDeliveries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		finish := make(chan struct{})
		var handled, copies atomic.Int64
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			copies.Add(1)
			return &rabbitmqamqp.StateAccepted{}, nil
		}
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			handled.Add(1)
			<-finish
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		first, second := b.deliver("1"), b.deliver("2")
		synctest.Wait()
		b.received <- &amqp.ConnError{}
		synctest.Wait()
		close(finish)
		time.Sleep(time.Minute)
		assert.EqualValues(t, 1, handled.Load())
		assert.Zero(t, copies.Load())
		assert.Empty(t, first.did)
		assert.Empty(t, second.did)
		again := b.deliver("1")
		assert.Equal(t, "accept", <-again.did)
		stop()
	})
}

func TestPanicInReceiveQuarantines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		stop := start(t, b, Config{Prefetch: 5}, func(context.Context, *client.Delivery) error { return nil })
		for range 3 {
			b.received <- func() { panic("interface conversion") }
		}
		for i := range 5 {
			d := b.deliver(fmt.Sprint(i))
			assert.Equal(t, "accept", <-d.did)
		}
		time.Sleep(time.Minute)
		b.mu.Lock()
		assert.Equal(t, []int32{5, 1, 1, 1, 5}, b.credits)
		b.mu.Unlock()
		stop()
	})
}

func TestHandlersFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			switch d.Message().Properties.MessageID {
			case "panic":
				panic(errDown)
			case "goexit":
				runtime.Goexit()
			case "hostile":
				return client.DeadLetter{Reason: "r", Err: hostile{}}
			case "as":
				return hostileAs{}
			}
			return nil
		})
		for _, c := range [][2]string{
			{"panic", "discard with panicked"}, {"goexit", "discard with panicked"}, {"hostile", "discard with r"},
			{"as", "requeue with 1"}, {"good", "accept"},
		} {
			d := b.deliver(c[0])
			assert.Equal(t, c[1], <-d.did, c[0])
		}
		stop()
	})
}

// hostileAs panics when it is looked at.
type hostileAs struct{}

func (hostileAs) Error() string { return "hostile" }
func (hostileAs) As(any) bool   { panic("don't look") }

func TestDrainWaitsForHandlersWithinGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		began := make(chan struct{}, 9)
		stop := start(t, b, Config{Concurrency: 2, Grace: 10 * time.Second}, func(ctx context.Context, d *client.Delivery) error {
			began <- struct{}{}
			if d.Message().Properties.MessageID == "slow" {
				<-ctx.Done()
				return client.Requeue{Err: ctx.Err()}
			}
			time.Sleep(5 * time.Second)
			return nil
		})
		quick, slow, waiting := b.deliver("quick"), b.deliver("slow"), b.deliver("waiting")
		synctest.Wait()
		t0 := time.Now()
		stop()
		assert.Equal(t, 10*time.Second, time.Since(t0))
		assert.Equal(t, "accept", <-quick.did)
		assert.Equal(t, "requeue", <-slow.did, "its ctx ended when the grace was over")
		assert.Empty(t, waiting.did, "left for the detach")
		assert.Len(t, began, 2)
	})
}

// The link of a running handler is lost, and then ctx ends: the handler still has
// its grace, and Consume waits for it, for 5 s longer at most.
func TestGraceHoldsForAHandlerWhoseLinkIsLost(t *testing.T) {
	const span = 20 * time.Second
	for name, c := range map[string]struct {
		handle func(ctx context.Context) error
		ends   time.Duration // Consume, after ctx
		cause  error
	}{
		"in time":             {func(context.Context) error { time.Sleep(10 * time.Second); return nil }, 9 * time.Second, nil},
		"heeds its ctx":       {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, span, grace.ErrOver},
		"blocks for too long": {func(context.Context) error { time.Sleep(time.Hour); return nil }, span + grace.Last, grace.ErrOver},
	} {
		for what, consume := range map[string]func(context.Context, *fakeBroker, client.Handler, Config) error{
			"Consume": func(ctx context.Context, b *fakeBroker, h client.Handler, cfg Config) error {
				return consume(ctx, b.dial, "orders", h, cfg)
			},
			"Serve": func(ctx context.Context, b *fakeBroker, h client.Handler, cfg Config) error {
				conn, err := b.dial(ctx)
				require.NoError(t, err)
				defer conn.close()
				k, err := conn.consumer(ctx, "orders", 64)
				require.NoError(t, err)
				return serve(ctx, b.dial, k, "orders", h, cfg)
			},
		} {
			t.Run(what+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := newFakeBroker()
					ctx, cancel := context.WithCancel(t.Context())
					var cause error
					h := client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
						err := c.handle(ctx)
						cause = context.Cause(ctx)
						return err
					})
					done := make(chan error, 1)
					go func() {
						done <- consume(ctx, b, h, Config{Grace: span, Concurrency: 2, Logger: quiet})
					}()
					b.deliver("1")
					synctest.Wait()
					b.received <- &amqp.ConnError{}
					time.Sleep(time.Second)
					cancel()
					began := time.Now()
					require.NoError(t, <-done)
					assert.Equal(t, c.ends, time.Since(began))
					if c.ends <= span {
						assert.Equal(t, c.cause, cause)
					}
					time.Sleep(time.Hour)
				})
			})
		}
	}
}

// Serve gives up on a link that nothing mends; its handlers have their grace first.
func TestServeThatGivesUpLeavesHandlersTheirGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		conn, err := b.dial(t.Context())
		require.NoError(t, err)
		defer conn.close()
		k, err := conn.consumer(t.Context(), "orders", 64)
		require.NoError(t, err)
		b.deliver("1")
		began := time.Now()
		time.AfterFunc(time.Second, func() { b.received <- &amqp.LinkError{} })
		var ended error
		err = serve(t.Context(), b.dial, k, "orders", client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			time.Sleep(10 * time.Second)
			ended = ctx.Err()
			return nil
		}), Config{Logger: quiet})
		require.ErrorIs(t, err, client.ErrConnectionLost)
		require.NoError(t, ended)
		assert.Equal(t, 10*time.Second, time.Since(began))
	})
}

func TestDrainGivesUpOnAPublishThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		hang := make(chan struct{})
		b.answer = func(address.Address, *client.Message) (rabbitmqamqp.DeliveryState, error) {
			<-hang
			return nil, &amqp.ConnError{}
		}
		stop := start(t, b, Config{Grace: time.Second}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		synctest.Wait()
		t0 := time.Now()
		stop()
		assert.LessOrEqual(t, time.Since(t0), time.Second+grace.Last+closeTimeout)
		assert.Empty(t, d.did, "the broker delivers it again")
		close(hang)
		synctest.Wait()
		assert.Empty(t, d.did)
	})
}

func TestServeBacksOffThenGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		var calls atomic.Int64
		c := receiverFunc(func(context.Context) (rabbitmqamqp.IDeliveryContext, error) {
			calls.Add(1)
			return nil, &amqp.ConnError{}
		})
		t0 := time.Now()
		err := serve(t.Context(), b.dial, c, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), Config{Logger: quiet, RecoveryPatience: time.Minute})
		require.ErrorIs(t, err, client.ErrConnectionLost)
		assert.Less(t, calls.Load(), int64(60))
		assert.Greater(t, time.Since(t0), 30*time.Second)
	})
}

func TestServeGivesUpAtOnceWhatNothingMends(t *testing.T) {
	for _, why := range []error{&amqp.LinkError{}, &amqp.SessionError{}, errDown, nil} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker()
			c := receiverFunc(func(context.Context) (rabbitmqamqp.IDeliveryContext, error) { return nil, why })
			t0 := time.Now()
			err := serve(t.Context(), b.dial, c, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), Config{Logger: quiet})
			require.ErrorIs(t, err, client.ErrConnectionLost)
			assert.Zero(t, time.Since(t0))
		})
	}
}

func TestServeGivesBackWhatNoHandlerBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		conn, err := b.dial(t.Context())
		require.NoError(t, err)
		k, err := conn.consumer(t.Context(), "orders", 10)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		finish := make(chan struct{})
		go func() {
			done <- serve(ctx, b.dial, k, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { <-finish; return nil }), Config{Logger: quiet, Prefetch: 1})
		}()
		one, two, three := b.deliver("1"), b.deliver("2"), b.deliver("3")
		synctest.Wait()
		cancel()
		assert.Equal(t, "requeue", <-two.did)
		assert.Equal(t, "requeue", <-three.did)
		close(finish)
		assert.Equal(t, "accept", <-one.did)
		require.NoError(t, <-done)
	})
}

type receiverFunc func(context.Context) (rabbitmqamqp.IDeliveryContext, error)

func (f receiverFunc) Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error) {
	return f(ctx)
}

func TestDialGuards(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]Dialer{
		"panics":   func(context.Context) (*rabbitmqamqp.AmqpConnection, error) { panic("nil map") },
		"nothing":  func(context.Context) (*rabbitmqamqp.AmqpConnection, error) { return nil, nil },
		"an error": func(context.Context) (*rabbitmqamqp.AmqpConnection, error) { return nil, errDown },
		"no network": func(ctx context.Context) (*rabbitmqamqp.AmqpConnection, error) {
			return rabbitmqamqp.Dial(ctx, "amqp://127.0.0.1:1", nil)
		},
	} {
		_, err := d.dialer()(t.Context())
		require.ErrorIs(t, err, client.ErrUnreachable, name)
	}
	_, err := Dialer(func(context.Context) (*rabbitmqamqp.AmqpConnection, error) {
		return nil, errors.New("SASL PLAIN auth failed with code 0x1")
	}).dialer()(t.Context())
	require.ErrorIs(t, err, client.ErrAuthentication)
}
