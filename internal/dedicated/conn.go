// Package dedicated opens connections that serve one task each, next to those of a client.Conn:
// to read a queue or a stream, or to send copies. It passes messages on as the bytes that they
// are. go-amqp decodes every message, and doesn't keep all of AMQP's types: symbols become
// strings, and it can't read decimals at all.
//
// A [Conn] has one session. It isn't rebuilt when it is lost. Its memory is bounded: what a
// [Receiver] has received and not taken is at most 16 MiB and one message. A [Subscription] sets
// its own bound.
package dedicated

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/userid"
)

// Dialer makes network connections to where a client.Conn is connected to, or to the endpoint
// that is so many behind it.
type Dialer interface {
	Dial(ctx context.Context, behind int) (link.Dialed, error)
}

// maxBytes bounds what a Receiver has received and not taken.
const maxBytes = 16 << 20

// ErrClosed is the error of a Conn that was closed by its user.
var ErrClosed = amqp.ErrClosed

// Conn is a connection with one session.
type Conn struct {
	c     *amqp.Conn
	login *userid.Login
	// maxMessage is link.Dialed.MaxMessageSize.
	maxMessage uint64

	mu      sync.Mutex
	changed chan struct{} // closed and replaced when something changes that somebody may wait for
	session *amqp.Session
	senders map[string]*sender
	ended   error // why the session has ended
}

// Open opens a connection for package desk. ctx bounds the opening alone.
func Open(ctx context.Context, to Dialer) (*Conn, error) { return OpenFor(ctx, to, "desk", 0) }

// OpenFor is Open, to the endpoint that is so many behind the one that the client.Conn is
// connected to. The purpose is the end of the connection's name.
func OpenFor(ctx context.Context, to Dialer, purpose string, behind int) (*Conn, error) {
	d, err := to.Dial(ctx, behind)
	if err != nil {
		return nil, err
	}
	d.Name += "-" + purpose
	c, err := amqp.Open(ctx, d.Net, amqp.Config{
		ContainerID: d.Name, Hostname: d.Host, Mechanism: d.Mechanism, Response: d.Response,
		// Twice as long: a busy machine isn't a lost connection.
		IdleTimeout: max(d.IdleTimeout, 2*time.Second) + 10*time.Second, MaxSessions: 1,
		Properties: frames.Map{{Key: frames.Symbol("connection_name"), Value: d.Name}, {Key: frames.Symbol("product"), Value: "hopback"}},
	})
	if err != nil {
		if e, ok := errors.AsType[*amqp.HandshakeError](err); !ok || !e.Refused && e.Remote == nil {
			d.Failed()
		}
		return nil, fmt.Errorf("%s: %w", d.Shown, openError(err))
	}
	return &Conn{c: c, login: d.Login, maxMessage: d.MaxMessageSize, changed: make(chan struct{}), senders: map[string]*sender{}}, nil
}

// openError says what a refused handshake means.
func openError(err error) error {
	e, ok := errors.AsType[*amqp.HandshakeError](err)
	switch {
	case !ok:
		return err
	case e.Refused:
		return &RefusedError{Condition: "amqp:unauthorized-access", Text: "the broker refused the login"}
	case e.Remote != nil:
		return fmt.Errorf("the broker closed the connection: %w", refusal(e.Remote))
	case e.Phase == amqp.PhaseOpen:
		return fmt.Errorf("the broker closed the connection when asked for the virtual host: %w", e.Err)
	}
	return err
}

// RefusedError is the broker's refusal of a link, a session or a message.
type RefusedError struct {
	Condition string // such as "amqp:not-found"; may be empty
	Text      string
}

func (e *RefusedError) Error() string {
	if e.Condition == "" {
		return e.Text
	}
	return e.Condition + ": " + e.Text
}

func refusal(e *frames.Error) *RefusedError {
	return &RefusedError{string(e.Condition), e.Description}
}

// LostError is the end of a connection or a link before the answer to a message: it may be stored.
type LostError struct{ Err error }

func (e *LostError) Error() string { return "the connection ended before the answer: " + e.Err.Error() }

// Unwrap returns Err.
func (e *LostError) Unwrap() error { return e.Err }

// Outcomes of messages that were sent and aren't stored.
var (
	ErrReleased = errors.New("no queue is bound for the routing key")
	ErrModified = errors.New("modified by the broker")
)

// begin returns the session, which begins with the first link.
func (c *Conn) begin(ctx context.Context, maxBytes int64) (*amqp.Session, error) {
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil {
		return s, nil
	}
	s, err := c.c.Begin(ctx, amqp.SessionConfig{MaxBytes: maxBytes, OnEnd: func(err error) {
		c.mu.Lock()
		c.ended = c.ending(err)
		c.mu.Unlock()
		c.c.Fail(c.ended)
	}})
	if err != nil {
		return nil, c.ending(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	return s, nil
}

// notify wakes those who wait for a change. It is called with mu held.
func (c *Conn) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// awaitLocked waits until done returns true. It is called, and calls done, with mu held.
func (c *Conn) awaitLocked(ctx context.Context, done func() bool) error {
	for !done() {
		changed := c.changed
		c.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-c.c.Done():
			err = c.Err()
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		c.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.c.Done() }

// Err is why the connection has ended; nil while it lasts.
func (c *Conn) Err() error {
	err := c.c.Err()
	if err == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return c.ended
	}
	return c.ending(err)
}

// Close ends the connection in order, within ctx: what was written before is read by the
// broker first. It returns why the connection had ended before, or nil.
func (c *Conn) Close(ctx context.Context) error {
	before := c.Err()
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil && before == nil {
		// The links go first. The end of the session alone would count a failed delivery for each
		// message that is on its way.
		before = s.DetachAll(ctx)
		if before == nil {
			before = s.End(ctx)
		}
	}
	err := c.c.Close(ctx)
	if before == nil && err != nil {
		before = c.ending(err)
	}
	return before
}
