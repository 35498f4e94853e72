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

// fakeBroker is both sides of Serve, with faults that a test chooses. It stands for the
// consumer, too.
type fakeBroker struct {
	// attachErr and answer are asked each time; nil means success.
	attachErr func(to address.Address) error
	answer    func(to address.Address, m *client.Message) error
	// drops says that the queue isn't known to have a dead-letter exchange.
	drops atomic.Bool
	// received is what the consumer gets, in order.
	received chan any // a delivery, an error, or a func() that panics

	mu       sync.Mutex
	asked    int // for dead-letter exchanges
	open     int // publishers
	attaches map[address.Address]int
}

func newFakeBroker() *fakeBroker {
	return &fakeBroker{received: make(chan any, 1000), attaches: map[address.Address]int{}}
}

func (b *fakeBroker) start() client.Start {
	return client.Start{Broker: client.Broker{Version: "4.3.6"}}
}

func (b *fakeBroker) deadLetters(context.Context, string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	return !b.drops.Load()
}

func (b *fakeBroker) publisher(_ context.Context, to address.Address) (publisher, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attaches[to]++
	if b.attachErr != nil {
		if err := b.attachErr(to); err != nil {
			return nil, err
		}
	}
	b.open++
	return &fakePublisher{b: b, to: to}, nil
}

func (b *fakeBroker) Receive(ctx context.Context) (rabbitmqamqp.IDeliveryContext, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case v := <-b.received:
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
	b  *fakeBroker
	to address.Address
}

func (p *fakePublisher) Close(context.Context) error {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	p.b.open--
	return nil
}

func (p *fakePublisher) Publish(ctx context.Context, m *client.Message, _ ...func(*client.Message)) error {
	if p.b.answer == nil {
		return nil
	}
	answer := make(chan error, 1)
	go func() { answer <- p.b.answer(p.to, m) }()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return &client.Error{Op: "publish", Kind: client.ErrOutcomeUnknown, Err: ctx.Err()}
	}
}

// answers are errors of a publisher.
func answers(kind error) func(address.Address, *client.Message) error {
	return func(address.Address, *client.Message) error { return &client.Error{Op: "publish", Kind: kind} }
}

var quiet = slog.New(slog.DiscardHandler)

// start runs serve in the bubble; stop ends it and wants nil.
func start(t *testing.T, b *fakeBroker, cfg Config, h client.HandlerFunc) (stop func()) {
	t.Helper()
	cfg.Logger = quiet
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, b, b, "orders", h, cfg) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
		b.mu.Lock()
		defer b.mu.Unlock()
		assert.Zero(t, b.open, "every publisher is closed")
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
		confirm := make(chan error)
		b.answer = func(address.Address, *client.Message) error { return <-confirm }
		var running atomic.Int64
		stop := start(t, b, Config{}, func(_ context.Context, d *client.Delivery) error {
			running.Add(1)
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		first, second := b.deliver("1"), b.deliver("2")
		synctest.Wait()
		assert.EqualValues(t, 2, running.Load(), "a copy that isn't confirmed holds no slot")
		assert.Empty(t, first.did)
		confirm <- nil
		confirm <- nil
		assert.Equal(t, "accept", <-first.did)
		assert.Equal(t, "accept", <-second.did)
		stop()
	})
}

// A middleware that hides the Prepare of retry.With ends Serve, as in package client.
func TestHiddenPrepareEndsServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		inner := retry.With(retry.Policy{})(client.HandlerFunc(func(context.Context, *client.Delivery) error {
			t.Error("handled")
			return nil
		}))
		hiding := client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error { return inner.Handle(ctx, d) })
		done := make(chan error, 1)
		go func() { done <- serve(t.Context(), b, b, "orders", hiding, Config{Logger: quiet}) }()
		d := b.deliver("1")
		assert.Equal(t, "requeue", <-d.did)
		require.ErrorAs(t, <-done, new(*argument.Error))
	})
}

func TestForwardThatIsNotAcceptedGoesBack(t *testing.T) {
	for name, kind := range map[string]error{
		"released": client.ErrUnroutable, "rejected": client.ErrRefused, "missing": client.ErrNotFound, "lost": client.ErrOutcomeUnknown,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newFakeBroker()
				var tries atomic.Int64
				b.answer = func(to address.Address, m *client.Message) error {
					tries.Add(1)
					return answers(kind)(to, m)
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
		b.answer = func(to address.Address, m *client.Message) error {
			if accepts.Load() {
				return nil
			}
			return answers(client.ErrUnroutable)(to, m)
		}
		stop := start(t, b, Config{ForwardPatience: 20 * time.Second, FailureLimit: 1}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		time.Sleep(24 * time.Hour)
		assert.Empty(t, d.did)
		b.mu.Lock()
		assert.Less(t, b.asked, 2*24*3600/20, "the broker is asked once for each time that the patience ends, at most")
		b.mu.Unlock()
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

// A drain doesn't wait for a copy that isn't accepted: the original goes back.
func TestDrainGivesBackWhatIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		b.drops.Store(true)
		b.answer = answers(client.ErrUnroutable)
		stop := start(t, b, Config{ForwardPatience: time.Second, Grace: time.Hour}, func(_ context.Context, d *client.Delivery) error {
			return client.Forward{To: address.Queue("next"), Message: client.Copy(d.Message())}
		})
		d := b.deliver("1")
		time.Sleep(time.Minute)
		t0 := time.Now()
		stop()
		assert.LessOrEqual(t, time.Since(t0), 10*time.Second)
		assert.Equal(t, "requeue", <-d.did)
	})
}

func TestForwardRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		var tries atomic.Int64
		b.answer = func(to address.Address, m *client.Message) error {
			switch tries.Add(1) {
			case 1:
				return answers(client.ErrOutcomeUnknown)(to, m)
			case 2:
				return answers(client.ErrNotFound)(to, m)
			}
			return nil
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
		b.answer = answers(client.ErrTooLarge)
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
				return &client.Error{Op: "publish", Kind: client.ErrNotFound}
			}
			return nil
		}
		stop := start(t, b, Config{Concurrency: 100, ForwardPatience: 10 * time.Second}, func(_ context.Context, d *client.Delivery) error {
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
		f := newCopies(b)
		for i := range 3 * maxLinks {
			require.NoError(t, f.publish(t.Context(), address.Queue(fmt.Sprintf("q-%d", i)), client.NewMessage([]byte("m"))))
			assert.LessOrEqual(t, len(f.links), maxLinks)
		}
		f.close()
		synctest.Wait()
		assert.Zero(t, b.open)
		require.ErrorIs(t, f.publish(t.Context(), address.Queue("late"), client.NewMessage([]byte("m"))), client.ErrClosed)
	})
}

// What was received on a lost link can't be settled, so no handler begins on it
// and no copy of it is sent any more.
func TestLostLinkAbandonsItsDeliveries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		finish := make(chan struct{})
		var handled, copies atomic.Int64
		b.answer = func(address.Address, *client.Message) error {
			copies.Add(1)
			return nil
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
		assert.Equal(t, "requeue", <-waiting.did)
		assert.Len(t, began, 2)
	})
}

// The link of a running handler is lost, and then ctx ends: the handler still has
// its grace, and Serve waits for it, for 5 s longer at most.
func TestGraceHoldsForAHandlerWhoseLinkIsLost(t *testing.T) {
	const span = 20 * time.Second
	for name, c := range map[string]struct {
		handle func(ctx context.Context) error
		ends   time.Duration // Serve, after ctx
		cause  error
	}{
		"in time":             {func(context.Context) error { time.Sleep(10 * time.Second); return nil }, 9 * time.Second, nil},
		"heeds its ctx":       {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, span, grace.ErrOver},
		"blocks for too long": {func(context.Context) error { time.Sleep(time.Hour); return nil }, span + grace.Last, grace.ErrOver},
	} {
		t.Run(name, func(t *testing.T) {
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
					done <- serve(ctx, b, b, "orders", h, Config{Grace: span, Concurrency: 2, Logger: quiet})
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

// Serve returns if nothing can repair the link; its handlers have their grace first.
func TestServeThatGivesUpLeavesHandlersTheirGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		b.deliver("1")
		began := time.Now()
		time.AfterFunc(time.Second, func() { b.received <- &amqp.LinkError{} })
		var ended error
		err := serve(t.Context(), b, b, "orders", client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
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
		b.answer = func(to address.Address, m *client.Message) error {
			<-hang
			return answers(client.ErrOutcomeUnknown)(to, m)
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
		err := serve(t.Context(), b, c, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), Config{Logger: quiet, RecoveryPatience: time.Minute})
		require.ErrorIs(t, err, client.ErrConnectionLost)
		assert.Less(t, calls.Load(), int64(60))
		assert.Greater(t, time.Since(t0), 30*time.Second)
	})
}

// errPanic stands for a panic of the official client.
var errPanic = errors.New("it panics")

func TestServeGivesUpAtOnceWhatNothingMends(t *testing.T) {
	for _, why := range []error{&amqp.LinkError{}, &amqp.SessionError{}, errDown, errPanic, nil} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBroker()
			c := receiverFunc(func(context.Context) (rabbitmqamqp.IDeliveryContext, error) {
				if why == errPanic {
					panic("interface conversion")
				}
				return nil, why
			})
			t0 := time.Now()
			err := serve(t.Context(), b, c, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), Config{Logger: quiet})
			require.ErrorIs(t, err, client.ErrConnectionLost)
			assert.Zero(t, time.Since(t0))
		})
	}
}

func TestServeGivesBackWhatNoHandlerBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		finish := make(chan struct{})
		go func() {
			done <- serve(ctx, b, b, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error { <-finish; return nil }), Config{Logger: quiet})
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
