package officialclient

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// maxTargets is how many addresses a forwarder keeps links to. RabbitMQ ends the
// session at its 257th link.
const maxTargets = 200

// forwardPause is the pause between attempts at the same forward.
var forwardPause = client.ReconnectBackoff{Min: 200 * time.Millisecond, Max: 5 * time.Second}

// errStopped ends a forward that has become pointless, or whose forwarder closed.
var errStopped = errors.New("the forward was given up")

// forwarder publishes copies, on a connection apart from the consumer's: a fault
// in forwarding doesn't end deliveries, and a broker that reads no more from
// connections that publish, because of an alarm, still gets the settlements.
type forwarder struct {
	dial    dialer
	backoff client.ReconnectBackoff
	// turns bounds how many publishes are under way at once.
	turns chan struct{}
	// ctx ends when the forwarder closes. It has no deadline.
	ctx    context.Context
	cancel context.CancelFunc

	// connecting is the turn to make a connection; it guards dialed.
	connecting chan struct{}
	dialed     attempts

	mu      sync.Mutex
	conn    connection // nil if there is none
	targets map[address.Address]*target
	closing sync.WaitGroup // of connections and publishers
}

// target is the link to one address.
type target struct {
	users int // guarded by forwarder.mu
	// turn guards what follows.
	turn chan struct{}
	pub  publisher
	conn connection // that pub is on
	// known is set once the address was attached to.
	known    bool
	attached attempts
}

// attempts spaces out attempts at something that all forwards wait for.
type attempts struct {
	failures int
	next     time.Time
	err      error
}

func (a *attempts) failed(err error, b client.ReconnectBackoff) error {
	a.next, a.err = time.Now().Add(pauseBefore(b, a.failures)), err
	a.failures++
	return err
}

// tooSoon is the last error, if it is too soon for another attempt.
func (a *attempts) tooSoon() error {
	if a.failures > 0 && time.Now().Before(a.next) {
		return a.err
	}
	return nil
}

func newForwarder(dial dialer, depth int, b client.ReconnectBackoff) *forwarder {
	f := &forwarder{
		dial: dial, backoff: b, turns: make(chan struct{}, depth),
		connecting: make(chan struct{}, 1), targets: map[address.Address]*target{},
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// send publishes m to to, again and again until the broker accepts it, or until
// patience has passed since the first failure. It returns errStopped when stop is
// closed meanwhile. An error that isn't errStopped leaves it uncertain whether
// the broker has the copy, unless its SafeToRetry says so.
func (f *forwarder) send(stop <-chan struct{}, to address.Address, m *client.Message, patience time.Duration, report func(err error, again time.Duration)) error {
	var since time.Time
	for failures := 0; ; failures++ {
		err := f.try(stop, to, m)
		if err == nil || hopeless(err) || errors.Is(err, errStopped) {
			return err
		}
		if f.ctx.Err() != nil {
			return errStopped
		}
		if since.IsZero() {
			since = time.Now()
		}
		wait := pauseBefore(forwardPause, failures)
		if time.Since(since)+wait > patience {
			return err
		}
		if failures == 0 {
			report(err, wait)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-stop:
		case <-f.ctx.Done():
		}
		t.Stop()
	}
}

// hopeless says whether the message itself is why it can't be sent.
func hopeless(err error) bool {
	_, bad := errors.AsType[*argument.Error](err)
	return bad || errors.Is(err, client.ErrTooLarge)
}

func (f *forwarder) try(stop <-chan struct{}, to address.Address, m *client.Message) error {
	if !f.take(f.turns, stop) {
		return errStopped
	}
	defer func() { <-f.turns }()
	t, err := f.target(to)
	if err != nil {
		return err
	}
	defer f.leave(t)
	pub, conn, err := f.attach(stop, t, to)
	if err != nil {
		return err
	}
	state, err := pub.publish(m)
	if err != nil {
		err := newError("forward", to.String(), client.ErrOutcomeUnknown, err)
		if !errors.Is(err, client.ErrTooLarge) {
			f.drop(t, pub, conn, err)
		}
		return err
	}
	return answer(to, state)
}

// answer is nil only if the broker has stored the copy.
func answer(to address.Address, state rabbitmqamqp.DeliveryState) error {
	e := &client.Error{Op: "forward", Target: to.String()}
	switch s := state.(type) {
	case *rabbitmqamqp.StateAccepted:
		return nil
	case *rabbitmqamqp.StateReleased:
		e.Kind = client.ErrUnroutable
	case *rabbitmqamqp.StateRejected:
		e.Kind = client.ErrRefused
		if s.Error != nil {
			e.Condition, e.Text = string(s.Error.Condition), s.Error.Description
		}
	default:
		e.Kind, e.Text = client.ErrRefused, fmt.Sprintf("answered with %T", state)
	}
	return e
}

// take waits for a turn, and returns false if it is no longer wanted.
func (f *forwarder) take(turn chan struct{}, stop <-chan struct{}) bool {
	select {
	case <-stop:
		return false
	case <-f.ctx.Done():
		return false
	default:
	}
	select {
	case turn <- struct{}{}:
		return true
	case <-stop:
		return false
	case <-f.ctx.Done():
		return false
	}
}

func (f *forwarder) target(to address.Address) (*target, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.targets[to]
	if t == nil {
		if !f.room() {
			return nil, &client.Error{Op: "forward", Target: to.String(), Kind: client.ErrNotSent, Text: "too many different forward addresses are in use"}
		}
		t = &target{turn: make(chan struct{}, 1)}
		f.targets[to] = t
	}
	t.users++
	return t, nil
}

// room makes room for one more target by closing one that nobody uses.
func (f *forwarder) room() bool {
	if len(f.targets) < maxTargets {
		return true
	}
	for to, t := range f.targets {
		if t.users == 0 {
			delete(f.targets, to)
			if t.pub != nil {
				f.later(t.pub.close)
			}
			return true
		}
	}
	return false
}

func (f *forwarder) leave(t *target) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t.users--
}

// attach returns t's link, and makes one if there is none.
func (f *forwarder) attach(stop <-chan struct{}, t *target, to address.Address) (publisher, connection, error) {
	if !f.take(t.turn, stop) {
		return nil, nil, errStopped
	}
	defer func() { <-t.turn }()
	if t.pub != nil && f.current(t.conn) {
		return t.pub, t.conn, nil
	}
	t.pub = nil
	if err := t.attached.tooSoon(); err != nil {
		return nil, nil, err
	}
	conn, err := f.connect(stop)
	if err != nil {
		return nil, nil, err
	}
	if !t.known {
		err = f.scout(to)
	}
	var pub publisher
	if err == nil {
		if pub, err = conn.publisher(f.ctx, to); err != nil && !onlyLink(err) {
			f.retire(conn)
		}
	}
	if err != nil {
		t.known = false
		return nil, nil, t.attached.failed(err, f.backoff)
	}
	t.pub, t.conn, t.known, t.attached = pub, conn, true, attempts{}
	return pub, conn, nil
}

// scout attaches to an address on a connection made for that. All links of an
// official connection share one session, which RabbitMQ ends, on 4.0 for an
// exchange that is missing and on both for one that the user may not write to;
// so one bad address would fail the forwards to all others.
func (f *forwarder) scout(to address.Address) error {
	conn, err := f.dial(f.ctx)
	if err != nil {
		return err
	}
	defer conn.close()
	_, err = conn.publisher(f.ctx, to)
	return err
}

// connect returns the connection, and makes one if there is none.
func (f *forwarder) connect(stop <-chan struct{}) (connection, error) {
	if !f.take(f.connecting, stop) {
		return nil, errStopped
	}
	defer func() { <-f.connecting }()
	f.mu.Lock()
	conn := f.conn
	f.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	if err := f.dialed.tooSoon(); err != nil {
		return nil, err
	}
	conn, err := f.dial(f.ctx)
	if err != nil {
		return nil, f.dialed.failed(err, f.backoff)
	}
	f.dialed = attempts{}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		f.later(conn.close)
		return nil, errStopped
	}
	f.conn = conn
	return conn, nil
}

func (f *forwarder) current(conn connection) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conn == conn
}

// drop gives up a link that has failed, and the connection unless only the link
// has ended.
func (f *forwarder) drop(t *target, pub publisher, conn connection, err error) {
	if !onlyLink(err) {
		f.retire(conn)
		return
	}
	if !f.take(t.turn, nil) {
		return
	}
	defer func() { <-t.turn }()
	if t.pub == pub {
		t.pub, t.known = nil, false
		// Or it would be attached again if the connection recovered.
		f.mu.Lock()
		defer f.mu.Unlock()
		f.later(pub.close)
	}
}

// retire gives up a connection: what is on it has ended with it.
func (f *forwarder) retire(conn connection) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn == conn {
		f.conn = nil
		f.later(conn.close)
	}
}

// later closes something without waiting for it. f.mu is held.
func (f *forwarder) later(end func()) {
	if f.ctx.Err() != nil {
		go end() // close waits already, or doesn't any more
		return
	}
	f.closing.Go(end)
}

// close cuts everything off. Forwards that are under way return errStopped: the
// broker delivers their originals again.
func (f *forwarder) close() {
	f.cancel()
	f.mu.Lock()
	if f.conn != nil {
		f.closing.Go(f.conn.close)
		f.conn = nil
	}
	f.mu.Unlock()
	f.closing.Wait()
}
