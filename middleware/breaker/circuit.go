package breaker

import (
	"context"
	"errors"
	"sync"
	"time"
	"weak"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/outcome"
)

// sign is what a call says about the thing behind the circuit.
type sign int

const (
	signNothing sign = iota
	signUp
	signDown
)

// pass lets one call through. It holds for the period in which it was given: what
// a call says that began before the last change of the state is old news.
type pass struct{ period int }

// circuit is what all handlers of one Middleware share.
type circuit struct {
	cfg Config

	mu       sync.Mutex
	state    string
	period   int // counts the changes of the state
	failures int // in a row, while closed
	openFor  time.Duration
	probing  bool          // while half-open: a probe is running
	changed  chan struct{} // closed and renewed when those that wait should look again
	// consumers are those that are prepared. Nothing reports that one has ended, so
	// they must not be kept from being collected.
	consumers map[weak.Pointer[client.Control]]*consumer

	unnotified []Change // OnChange hasn't been called with these
	notifying  bool     // some goroutine is at it
}

// consumer is what the circuit knows of a client.Control.
type consumer struct {
	// uncounted: a returned delivery doesn't count as a delivery, with any of the
	// consumers that the Control serves.
	uncounted bool
	release   func() // of the limit that it has, or nil
}

func newCircuit(cfg Config) *circuit {
	return &circuit{cfg: cfg, state: stateClosed, changed: make(chan struct{}), consumers: map[weak.Pointer[client.Control]]*consumer{}}
}

// judge says what a result is a sign of.
func (c *circuit) judge(ctx context.Context, err error) sign {
	if err == nil {
		return signUp
	}
	if ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return signNothing
	}
	if c.cfg.Trips(err) {
		return signDown
	}
	if r, ok := client.OutcomeOf(err).(client.Requeue); ok && !r.Failed {
		return signNothing
	}
	if v := outcome.Read[client.Outcome](err); v.Kind == outcome.IsAfter && v.After.Snooze {
		return signNothing
	}
	return signUp
}

// join lets the circuit pause a consumer.
func (c *circuit) join(control *client.Control, uncounted bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := weak.Make(control)
	k, known := c.consumers[p]
	if !known {
		k = &consumer{uncounted: uncounted}
		c.consumers[p] = k
		c.limit(control, k)
	}
	k.uncounted = k.uncounted && uncounted
}

// of finds the consumer that ctx is of; nil if it has no Control. One that isn't
// known is one whose Prepare another middleware has kept from us. Called with mu
// held.
func (c *circuit) of(ctx context.Context) *consumer {
	control, ok := client.ControlFrom(ctx)
	if !ok {
		return nil
	}
	p := weak.Make(control)
	k, known := c.consumers[p]
	if !known {
		k = &consumer{}
		c.consumers[p] = k
		c.limit(control, k)
	}
	return k
}

// limit gives one consumer the limit that belongs to the state. Called with mu held,
// so that limits follow the state; what Control.Limit does never comes back here.
func (c *circuit) limit(control *client.Control, k *consumer) {
	old := k.release
	k.release = nil
	switch c.state {
	case stateOpen:
		k.release = control.Limit(0)
	case stateHalfOpen:
		k.release = control.Limit(1)
	}
	if old != nil {
		old() // only now, so that it is never without one in between
	}
}

// enter waits until the circuit lets a delivery through. An error means that it is
// to go back to its queue.
func (c *circuit) enter(ctx context.Context, returnable bool) (pass, error) {
	var patience <-chan time.Time
	for {
		c.mu.Lock()
		if c.state == stateClosed || c.state == stateHalfOpen && !c.probing {
			c.probing = c.state == stateHalfOpen
			p := pass{c.period}
			c.mu.Unlock()
			return p, nil
		}
		k := c.of(ctx)
		if c.state == stateOpen && k != nil && k.uncounted {
			c.mu.Unlock()
			return pass{}, ErrOpen
		}
		changed := c.changed
		c.mu.Unlock()
		if ctx.Err() != nil {
			return pass{}, context.Cause(ctx)
		}
		if k == nil && returnable && patience == nil {
			timer := time.NewTimer(holdLimit)
			defer timer.Stop()
			patience = timer.C
		}
		select {
		case <-changed:
		case <-patience:
			return pass{}, ErrOpen
		case <-ctx.Done():
		}
	}
}

// leave takes note of how a call went.
func (c *circuit) leave(ctx context.Context, p pass, says sign, err error) {
	c.mu.Lock()
	if p.period == c.period {
		switch {
		case c.state == stateClosed && says == signUp:
			c.failures = 0
		case c.state == stateClosed && says == signDown:
			if c.failures++; c.failures >= c.cfg.Failures {
				c.of(ctx)
				c.open(c.cfg.OpenFor, err)
			}
		case c.state == stateHalfOpen && says == signUp:
			c.become(stateClosed, Change{})
		case c.state == stateHalfOpen && says == signDown:
			c.open(min(2*c.openFor, c.cfg.MaxOpenFor), err)
		case c.state == stateHalfOpen:
			c.probing = false
			c.wake()
		}
	}
	c.mu.Unlock()
	c.notify()
}

// open is called with mu held.
func (c *circuit) open(d time.Duration, err error) {
	c.openFor = d
	c.become(stateOpen, Change{Err: err, OpenFor: d})
	period := c.period
	time.AfterFunc(d, func() {
		c.mu.Lock()
		if c.period == period {
			c.become(stateHalfOpen, Change{})
		}
		c.mu.Unlock()
		c.notify()
	})
}

// become changes the state; called with mu held.
func (c *circuit) become(s string, what Change) {
	what.From, what.To = c.state, s
	c.state, c.failures, c.probing = s, 0, false
	c.period++
	// The limits come first: a delivery that wakes up may be requeued, and must find its consumer paused.
	for p, k := range c.consumers {
		if control := p.Value(); control != nil {
			c.limit(control, k)
		} else {
			delete(c.consumers, p)
		}
	}
	c.wake()
	c.unnotified = append(c.unnotified, what)
}

func (c *circuit) wake() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// notify logs changes and calls OnChange, in order, without holding mu.
func (c *circuit) notify() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.notifying {
		return
	}
	c.notifying = true
	defer func() { c.notifying = false }()
	for len(c.unnotified) > 0 {
		what := c.unnotified[0]
		c.unnotified = c.unnotified[1:]
		c.mu.Unlock()
		func() {
			defer c.mu.Lock() // even if OnChange panics
			switch what.To {
			case stateOpen:
				c.cfg.Logger.Warn("hopback: circuit open, consuming is paused", "error", client.ErrorText(what.Err), "for", what.OpenFor)
			default:
				c.cfg.Logger.Info("hopback: circuit "+what.To, "was", what.From)
			}
			if c.cfg.OnChange != nil {
				c.cfg.OnChange(what)
			}
		}()
	}
}
