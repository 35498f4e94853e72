package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/loglines"
)

const (
	// clockPatience bounds a question for the broker's time.
	clockPatience = 5 * time.Second
	// An answer holds for clockFresh, a failure for clockFailed: many consumers that
	// begin at once ask once. After a failure, as in an alarm, an earlier answer of the same
	// connection holds on: this host's clock may be wrong by far more than it drifts.
	clockFresh  = 10 * time.Minute
	clockFailed = time.Minute
	clockRounds = 3
	// clockQueueExpires is what removes the queue if nothing else does.
	clockQueueExpires = time.Minute
	// clockTolerance is how far clocks may differ without a word about it.
	clockTolerance = time.Second
)

// brokerClock caches the broker's time.
type brokerClock struct {
	// turn is held by the caller that asks. It is nil until the first one.
	turn chan struct{}
	// unanswered is for who holds turn.
	unanswered loglines.Outage
	// ask is Conn.askTime, but in tests.
	ask func(context.Context, *link.Wire) (brokerclock.Reading, error)

	mu       sync.Mutex
	on       *link.Wire // the connection that it was asked on
	read     brokerclock.Reading
	err      error     // why there is no read
	failed   time.Time // when the last question after read wasn't answered
	notified bool      // that the clocks differ

	// learning: brokerNow has started a query.
	learning atomic.Bool
}

// BrokerTime returns the current time of the broker's node; see [Start.BrokerTime]. If the
// connection is being rebuilt, it waits for up to 5 s, or until ctx ends. The error then matches
// [ErrConnectionLost], as it does if the connection is lost in between.
func (c *Conn) BrokerTime(ctx context.Context) (time.Time, error) { return c.brokerTime(ctx) }

// brokerTime returns the time by the clock of the node at the other end of the connection, late
// by at most the time that a message takes to come back. RabbitMQ has no request for it. But it
// writes the time, in milliseconds, into each message that it dead-letters. So brokerTime
// rejects a message into a queue that dead-letters to itself and is exclusive to this
// connection. The user needs the permission to configure, write, and read that queue, and to
// write to the default exchange (TestBrokerTellsItsTimeByADeath).
func (c *Conn) brokerTime(ctx context.Context) (time.Time, error) {
	return c.brokerTimeSince(ctx, time.Time{})
}

// askBrokerTime is brokerTime without answers from before the call.
func (c *Conn) askBrokerTime(ctx context.Context) (time.Time, error) {
	return c.brokerTimeSince(ctx, time.Now())
}

// ReadClock reads the broker's clock as brokerTime does, and tells how late the reading may be.
func (in internal) ReadClock(ctx context.Context) (brokerclock.Reading, error) {
	return in.conn.readClockSince(ctx, time.Time{})
}

func (c *Conn) brokerTimeSince(ctx context.Context, since time.Time) (time.Time, error) {
	r, err := c.readClockSince(ctx, since)
	return r.Broker, err
}

// readClockSince reads the broker's clock, or carries an answer forward that is no older than since.
func (c *Conn) readClockSince(ctx context.Context, since time.Time) (brokerclock.Reading, error) {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, clockPatience)
	defer cancel()
	w, err := c.pool.Wire(ctx)
	if err != nil {
		if !errors.Is(err, failure.ErrClosed) {
			err = failure.NewError("read the broker's time", "", failure.ErrConnectionLost, err)
		}
		return brokerclock.Reading{}, err
	}
	b := &c.clock
	b.mu.Lock()
	if b.turn == nil {
		b.turn = make(chan struct{}, 1)
	}
	turn := b.turn
	b.mu.Unlock()
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return brokerclock.Reading{}, context.Cause(ctx)
	}
	if known, r, err := b.now(w); known && !b.askedBefore(since) {
		return r, err
	}
	r, err := b.ask(ctx, w)
	if err != nil {
		if caller.Err() != nil || ctx.Err() != nil && c.isClosing() {
			return brokerclock.Reading{}, err // others may have more patience
		}
		if c.pool.HasLost(w) {
			return brokerclock.Reading{}, failure.NewError("read the broker's time", "", failure.ErrConnectionLost, err)
		}
		r.Own = time.Now()
		c.log.Log(ctx, b.unanswered.Level(r.Own), "hopback: the broker's time can't be read", "error", err)
	} else {
		b.unanswered = loglines.Outage{}
	}
	return b.learn(w, r, err, since)
}

// learn takes the answer to a question, or why there is none. It returns what is known then.
func (b *brokerClock) learn(w *link.Wire, r brokerclock.Reading, err error, since time.Time) (brokerclock.Reading, error) {
	b.mu.Lock()
	if err != nil && b.on == w && b.err == nil && !b.stepped(r.Own) {
		b.failed = r.Own
		if b.read.Own.Before(since) {
			b.mu.Unlock()
			return brokerclock.Reading{}, err
		}
	} else {
		b.on, b.read, b.err, b.failed = w, r, err, time.Time{}
	}
	b.mu.Unlock()
	_, r, err = b.now(w)
	return r, err
}

// stepped reports whether this host's clock has stepped since the last answer, or the host slept. It is called with mu
// held.
func (b *brokerClock) stepped(own time.Time) bool {
	return (own.Round(0).Sub(b.read.Own.Round(0)) - own.Sub(b.read.Own)).Abs() > time.Second
}

// brokerNow is brokerTime for callers that can't wait. It returns false while the time is
// unknown, and then starts a query. If the broker can't be asked, it returns this host's time.
func (c *Conn) brokerNow() (now time.Time, known bool) {
	w := c.pool.Up()
	if w == nil {
		return time.Time{}, false
	}
	known, r, err := c.clock.now(w)
	switch {
	case !known:
		c.learnTime()
	case err != nil:
		return time.Now(), true
	}
	return r.Broker, known
}

// learnTime queries the broker's time, unless a query is already running.
func (c *Conn) learnTime() {
	if !c.clock.learning.CompareAndSwap(false, true) {
		return
	}
	asking := c.pool.InBackground(func() {
		defer c.clock.learning.Store(false)
		_, _ = c.brokerTime(c.pool.Ctx) // which keeps the answer, and logs the error
	})
	if !asking {
		c.clock.learning.Store(false)
	}
}

// now is the broker's time, if that is known of the connection w.
func (b *brokerClock) now(w *link.Wire) (known bool, r brokerclock.Reading, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	own := time.Now()
	age := own.Sub(b.read.Own)
	again := own.Sub(b.failed) > clockFailed
	switch {
	case b.on != w || b.stepped(own) || b.err == nil && age > clockFresh && again || b.err != nil && age > clockFailed:
		return false, r, nil
	case b.err != nil:
		return true, r, b.err
	}
	return true, brokerclock.Reading{Own: own, Broker: b.read.Broker.Add(age), Late: b.read.Late}, nil
}

// askedBefore reports whether the last answer is older than t.
func (b *brokerClock) askedBefore(t time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read.Own.Before(t)
}

// askTime reads this process's clock and the broker's.
func (c *Conn) askTime(ctx context.Context, w *link.Wire) (brokerclock.Reading, error) {
	fail := func(err error) (brokerclock.Reading, error) { return brokerclock.Reading{}, err }
	queue := "hopback-clock-" + rand.Text()
	path := "/queues/" + queue // nothing to encode
	// The queue is exclusive to its connection, and the Conn's own management may be on
	// another.
	management := managementOf(w, c.pool.RenewAfter)
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), clockPatience)
		defer cancel()
		management.close(ctx)
	}()
	status, reply, err := management.Request(ctx, "PUT", path, map[string]any{
		"durable": false, "exclusive": true, "auto_delete": true,
		"arguments": map[string]any{
			"x-queue-type": "classic", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue,
			"x-expires": clockQueueExpires.Milliseconds(),
		},
	})
	if err != nil {
		return fail(err)
	}
	if status != 201 {
		return fail(fmt.Errorf("the broker refused to declare a queue for it: %d %v", status, reply))
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), clockPatience)
		defer cancel()
		_, _, _ = management.Request(ctx, "DELETE", path, nil)
	}()
	sess, err := w.OpenSession(ctx, c.pool.RenewAfter)
	if err != nil {
		return fail(err)
	}
	type answer struct {
		read brokerclock.Reading
		err  error
	}
	answers := make(chan answer, 1)
	// What hangs ends with its session.
	work, cancel := context.WithCancel(w.Ctx)
	go func() {
		r, err := timeOfDeaths(work, sess, path)
		answers <- answer{r, err}
	}()
	select {
	case a := <-answers:
		cancel()
		link.CloseSession(sess)
		return a.read, a.err
	case <-ctx.Done():
		cancel()
		link.CloseSession(sess)
		return fail(context.Cause(ctx))
	}
}

// timeOfDeaths dead-letters a message a few times, and returns the result of the fastest round.
func timeOfDeaths(ctx context.Context, sess link.Session, address string) (r brokerclock.Reading, err error) {
	fail := func(err error) (brokerclock.Reading, error) { return brokerclock.Reading{}, err }
	receiver, err := sess.Receiver(ctx, address, link.ReceiverOptions{})
	if err != nil {
		return fail(err)
	}
	if err := receiver.IssueCredit(clockRounds + 1); err != nil {
		return fail(err)
	}
	sender, err := sess.Sender(ctx, address)
	if err != nil {
		return fail(err)
	}
	if sess.Intake().Now().Blocked {
		return fail(errors.New("it accepts no messages, probably because of a memory or disk alarm"))
	}
	if _, _, err := sender.Send(NewMessage([]byte("time?")), make(link.ChanReceipt, 1)); err != nil {
		return fail(err)
	}
	m, err := receiver.Receive(ctx)
	if err != nil {
		return fail(err)
	}
	quickest := time.Duration(math.MaxInt64)
	for range clockRounds {
		began := time.Now()
		if err := receiver.Settle(m.ID, link.Disposition{Kind: link.DispositionModified, Dead: true}); err != nil {
			return fail(err)
		}
		if m, err = receiver.Receive(ctx); err != nil {
			return fail(err)
		}
		died := timeOfDeath(m.Msg)
		if died.IsZero() {
			return fail(errors.New("it doesn't report when a message was dead-lettered"))
		}
		if took := time.Since(began); took < quickest {
			// The broker's clock showed died after began, so this is never behind; the
			// millisecond is what the time is cut to.
			quickest = took
			r = brokerclock.Reading{Own: began, Broker: died.Add(time.Millisecond), Late: took + time.Millisecond}
		}
	}
	_ = receiver.Settle(m.ID, link.Disposition{Kind: link.DispositionAccepted})
	return r, nil
}

// timeOfDeath reads RabbitMQ's annotation; zero if it isn't there.
func timeOfDeath(m *Message) time.Time {
	var last time.Time
	see := func(death any) {
		var t any
		switch d := death.(type) {
		case map[any]any:
			t = d["last-time"]
		case map[string]any:
			t = d["last-time"]
		}
		if t, ok := t.(time.Time); ok && t.After(last) {
			last = t
		}
	}
	switch deaths := m.Annotations["x-opt-deaths"].(type) {
	case []map[any]any:
		for _, d := range deaths {
			see(d)
		}
	case []any:
		for _, d := range deaths {
			see(d)
		}
	}
	return last
}

// clockDiffers reports how far the broker's clock is ahead, once per connection.
func (c *Conn) clockDiffers(ahead time.Duration) {
	if ahead.Abs() < clockTolerance {
		return
	}
	b := &c.clock
	b.mu.Lock()
	notified := b.notified
	b.notified = true
	b.mu.Unlock()
	if notified {
		return
	}
	c.log.Warn("hopback: the broker's clock differs from this host's; times in messages go by the broker's clock", "ahead", ahead.Round(time.Millisecond))
	if w := c.pool.Up(); w != nil {
		c.events.connection(w.Place(), Event{Kind: EventClockDiffers, Ahead: ahead})
	}
}
