package client

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/link"
)

// clockConn is a Conn that is up, and whose broker is asked for its time by ask.
func clockConn(t *testing.T, ask func(context.Context, *link.Wire) (brokerclock.Reading, error)) *Conn {
	cfg, err := Config{Logger: quiet}.withDefaults()
	require.NoError(t, err)
	c := newConn(cfg, []link.Endpoint{{}})
	c.clock.ask = ask
	c.pool.Conns[0].Live = &link.Wire{AMQP: &amqp.Conn{}}
	t.Cleanup(func() {
		c.pool.Cancel()
		c.pool.Background.Wait()
	})
	return c
}

// Callers that can't wait for the broker's time start one query, however many they are.
func TestBrokerNowAsksOnceAndDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		c := clockConn(t, func(context.Context, *link.Wire) (brokerclock.Reading, error) {
			asked.Add(1)
			time.Sleep(time.Second)
			return brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(time.Hour), Late: 3 * time.Millisecond}, nil
		})
		for range 100 {
			_, known := c.brokerNow()
			require.False(t, known)
		}
		synctest.Wait()
		require.EqualValues(t, 1, asked.Load())
		time.Sleep(time.Second)
		synctest.Wait()
		for range 100 {
			now, known := c.brokerNow()
			require.True(t, known)
			require.WithinDuration(t, time.Now().Add(time.Hour), now, time.Millisecond)
		}
		require.EqualValues(t, 1, asked.Load())
		c.pool.Conns[0].Live = &link.Wire{AMQP: &amqp.Conn{}} // another connection, perhaps to another node
		_, known := c.brokerNow()
		require.False(t, known)
		time.Sleep(2 * time.Second)
		_, known = c.brokerNow()
		require.True(t, known)
		require.EqualValues(t, 2, asked.Load())
	})
}

// Where the broker can't be asked, this host's time stands in.
func TestBrokerNowIsThisHostsWhereTheBrokerCanNotBeAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockConn(t, func(context.Context, *link.Wire) (brokerclock.Reading, error) {
			return brokerclock.Reading{}, errors.New("refused")
		})
		_, known := c.brokerNow()
		require.False(t, known)
		synctest.Wait()
		now, known := c.brokerNow()
		require.True(t, known)
		assert.WithinDuration(t, time.Now(), now, time.Millisecond)
		c.pool.Conns[0].Live = nil
		_, known = c.brokerNow()
		assert.False(t, known, "there is no connection")
		close(c.pool.Closing)
		c.pool.Conns[0].Live = &link.Wire{AMQP: &amqp.Conn{}}
		_, known = c.brokerNow()
		assert.False(t, known, "nothing is asked any more")
	})
}

// A caller that has noticed that a clock was set gets an answer from after its call. Calls at the
// same time share one.
func TestBrokersTimeIsAskedForPastTheCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		ahead := time.Duration(0)
		c := clockConn(t, func(context.Context, *link.Wire) (brokerclock.Reading, error) {
			asked.Add(1)
			time.Sleep(10 * time.Millisecond)
			return brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(ahead), Late: 3 * time.Millisecond}, nil
		})
		_, err := c.brokerTime(t.Context())
		require.NoError(t, err)
		ahead = time.Hour
		now, err := c.brokerTime(t.Context())
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), now, time.Second, "the cached answer")
		require.EqualValues(t, 1, asked.Load())
		time.Sleep(time.Second)
		for range 50 {
			go func() {
				now, err := c.askBrokerTime(t.Context())
				assert.NoError(t, err)
				assert.WithinDuration(t, time.Now().Add(ahead), now, time.Second)
			}()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 2, asked.Load())
		now, err = c.brokerTime(t.Context())
		require.NoError(t, err)
		require.WithinDuration(t, time.Now().Add(ahead), now, time.Second, "it is the cached one now")
		require.EqualValues(t, 2, asked.Load())
	})
}

// An answer that is carried forward is as late as it was: a worker that compares the broker's time with a
// message's would handle it early otherwise.
func TestACarriedReadingTellsHowLateItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clockConn(t, func(context.Context, *link.Wire) (brokerclock.Reading, error) {
			return brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(time.Hour), Late: 3 * time.Millisecond}, nil
		})
		for range 2 {
			r, err := internal{c}.ReadClock(t.Context())
			require.NoError(t, err)
			assert.Equal(t, brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(time.Hour), Late: 3 * time.Millisecond}, r)
			time.Sleep(time.Second)
		}
	})
}

// An answer holds on while the broker can't be asked again, as in an alarm, on the same connection. Who asks
// for a later one gets none.
func TestTheBrokersTimeHoldsOnWhileItCanNotBeAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, alarm := 0, false
		c := clockConn(t, func(context.Context, *link.Wire) (brokerclock.Reading, error) {
			asked++
			if alarm {
				return brokerclock.Reading{}, errors.New("it accepts no messages")
			}
			return brokerclock.Reading{Own: time.Now(), Broker: time.Now().Add(time.Hour), Late: 3 * time.Millisecond}, nil
		})
		_, err := c.brokerTime(t.Context())
		require.NoError(t, err)
		alarm = true
		for range 3 * 60 {
			time.Sleep(time.Minute)
			now, err := c.brokerTime(t.Context())
			require.NoError(t, err)
			require.WithinDuration(t, time.Now().Add(time.Hour), now, time.Millisecond)
			c.brokerNow()
			synctest.Wait()
			now, known := c.brokerNow()
			require.True(t, known)
			require.WithinDuration(t, time.Now().Add(time.Hour), now, time.Millisecond)
		}
		assert.LessOrEqual(t, asked, 3*60, "a failure holds for a minute")
		_, err = c.askBrokerTime(t.Context())
		require.ErrorContains(t, err, "accepts no messages")
		c.pool.Conns[0].Live = &link.Wire{AMQP: &amqp.Conn{}} // perhaps to another node
		_, err = c.brokerTime(t.Context())
		require.ErrorContains(t, err, "accepts no messages")
		alarm = false
		time.Sleep(2 * time.Minute)
		_, err = c.askBrokerTime(t.Context())
		require.NoError(t, err)
	})
}
