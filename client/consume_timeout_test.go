package client

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// RabbitMQ 4.3 gives a link nothing more, once it has taken a delivery back, until the stale
// delivery is settled and a flow has come behind that.
func TestADeliveryThatIsTakenBackStarvesNoOther(t *testing.T) {
	for _, prefetch := range []int{0, 1, 2, 64} {
		t.Run(fmt.Sprint(prefetch), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Publish("stuck")
				k := startConsumer(b, ConsumerConfig{Concurrency: 2, Prefetch: prefetch}, func(ctx context.Context, d *Delivery) error {
					if linktest.IDOf(d.Message()) == "stuck" {
						time.Sleep(time.Hour)
					}
					return nil
				})
				synctest.Wait()
				b.Revoke("stuck", false)
				synctest.Wait()
				b.Publish("m")
				synctest.Wait()
				assert.Equal(t, []string{"stale release stuck", "accept m"}, b.History("stale", "accept"))
				time.Sleep(2 * time.Hour)
				require.NoError(t, k.end())
			})
		})
	}
}

// The settlement and the broker's word that the delivery was taken back may cross.
func TestASettlementThatCrossesWithTheTimeoutStarvesNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("m0")
		crossing, crossed := make(chan struct{}), make(chan struct{})
		b.Hook = func(step string) error {
			if step == "settle m0" {
				close(crossing)
				<-crossed
			}
			return nil
		}
		k := startConsumer(b, ConsumerConfig{Prefetch: 64}, returns(nil))
		<-crossing
		b.Revoke("m0", false)
		synctest.Wait()
		close(crossed)
		synctest.Wait()
		b.Publish("m1")
		synctest.Wait()
		assert.Equal(t, []string{"accept m1"}, b.History("accept"))
		assert.Empty(t, b.History("drain"), "a drain before the settlement would keep the flow behind it from being sent")
		require.NoError(t, k.end())
	})
}

func TestAHandlersContextEndsBeforeTheConsumerTimeout(t *testing.T) {
	const limit = 30 * time.Minute
	for name, c := range map[string]struct {
		configured, queues time.Duration
		version            string
		ends               bool
	}{
		"the consumer's": {configured: limit, version: "4.3.0", ends: true},
		"the queue's":    {queues: limit, version: "4.3.0", ends: true},
		"both":           {configured: limit, queues: time.Minute, version: "4.3.0", ends: true},
		"none":           {version: "4.3.0"},
		"4.0 has none":   {queues: limit, version: "4.0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version, b.Timeout = c.version, c.queues
				started := time.Now()
				k := startConsumer(b, ConsumerConfig{ConsumerTimeout: c.configured}, func(ctx context.Context, _ *Delivery) error {
					select {
					case <-ctx.Done():
						assert.Equal(t, limit-time.Minute, time.Since(started))
						assert.Equal(t, ErrConsumerTimeoutNear, context.Cause(ctx))
						assert.Equal(t, context.DeadlineExceeded, ctx.Err())
						inner, cancel := context.WithCancel(ctx)
						defer cancel()
						assert.Equal(t, context.DeadlineExceeded, inner.Err(), "what is made of it ends in the same way")
						at, ok := ctx.Deadline()
						assert.True(t, ok)
						assert.Equal(t, limit-time.Minute, at.Sub(started))
						return ctx.Err()
					case <-time.After(2 * limit):
						return nil
					}
				})
				synctest.Wait() // the broker has said what the queue's is
				b.Publish("m")
				time.Sleep(3 * limit)
				require.NoError(t, k.end())
				if c.ends {
					assert.Equal(t, []string{"requeue as failed m"}, b.History(settlements...))
				} else {
					assert.Equal(t, []string{"accept m"}, b.History(settlements...))
				}
			})
		})
	}
}

// A handler that ignores its ctx fails before the broker takes its delivery back, unless that
// could drop the message.
func TestAHandlerThatIgnoresItsContextFailsBeforeTheConsumerTimeout(t *testing.T) {
	const limit = time.Minute
	for _, keeps := range []bool{true, false} {
		t.Run(fmt.Sprint(keeps), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Publish("m", "n")
				started := time.Now()
				k := startConsumerOf(b, ConsumerConfig{Concurrency: 2, ConsumerTimeout: limit, Prefetch: 64}, func(_ context.Context, d *Delivery) error {
					if linktest.IDOf(d.Message()) == "m" {
						time.Sleep(time.Hour)
					}
					return nil
				}, keeps)
				if keeps {
					require.NoError(t, b.Await(within(t, time.Hour), func() bool { return b.Last.Failed }))
					assert.Equal(t, limit-limit/20, time.Since(started))
					assert.EqualValues(t, 1, b.Last.Annotations[AnnotationKnownCount])
				}
				time.Sleep(2 * time.Hour)
				require.NoError(t, k.end())
				if keeps {
					assert.Equal(t, []string{"accept n", "requeue as failed m"}, b.History(settlements...))
				} else {
					assert.Equal(t, []string{"accept n", "accept m"}, b.History(settlements...))
				}
			})
		})
	}
}

// A handler has at least half of the time: one whose delivery has waited for longer isn't
// ended.
func TestAHandlerThatBeganLateIsNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		b := linktest.NewFakeBroker(t)
		b.Publish("m0", "m1", "m2")
		k := startConsumer(b, ConsumerConfig{ConsumerTimeout: limit, Prefetch: 64}, func(ctx context.Context, d *Delivery) error {
			time.Sleep(25 * time.Second)
			if linktest.IDOf(d.Message()) == "m1" { // it began at 25 s: 29 s more are too long
				<-ctx.Done()
			}
			return ctx.Err()
		})
		time.Sleep(time.Hour)
		require.NoError(t, k.end())
		assert.Equal(t, []string{"accept m0", "requeue as failed m1", "accept m2"}, b.History(settlements...))
	})
}

// A policy's consumer timeout shows when the broker takes deliveries back.
func TestTheConsumerTimeoutIsLearned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 10 * time.Minute
		b := linktest.NewFakeBroker(t)
		causes := make(chan error, 10)
		k := startConsumer(b, ConsumerConfig{}, func(ctx context.Context, _ *Delivery) error {
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return ctx.Err()
		})
		b.Publish("m")
		for _, held := range []time.Duration{limit / 10, limit, limit} { // the first was received late
			time.Sleep(held)
			b.Revoke("m", true)
			require.ErrorIs(t, <-causes, ErrConsumerTimeout)
		}
		began := time.Now()
		require.ErrorIs(t, <-causes, ErrConsumerTimeoutNear)
		assert.InDelta(t, limit-limit/10, time.Since(began), float64(time.Second))
		require.NoError(t, k.end())
		assert.Len(t, b.History("requeue as failed"), 1)
	})
}
