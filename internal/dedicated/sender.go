package dedicated

import (
	"context"
	"fmt"
	"time"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// TooLarge is the condition of a message that is larger than the broker takes.
const TooLarge = "amqp:link:message-size-exceeded"

const (
	// maxSenders is how many addresses a Conn keeps links to.
	maxSenders = 100
	// maxQueued is how many messages wait for a link's credit before Send waits.
	maxQueued = 8
)

// sender is a link to one address.
type sender struct {
	*amqp.Sender
	used time.Time
}

// copySent is a message that awaits its answer.
type copySent struct {
	amqp.Sending
	c      *Conn
	notify func(error)
}

// Send sends an encoded message to target, an address. It waits while messages before it wait for
// the broker's credit, and returns when the message is on its way. notify is called with nil once
// the broker has accepted it, and with the broker's answer or a [LostError] otherwise. It is
// called exactly once if Send returns nil, and never if not. It must not block, and may be called
// before Send returns.
//
// An error is a *RefusedError if the broker refuses the address alone, and the connection
// has ended then on RabbitMQ 4.0. With the condition [TooLarge] it says that the message is
// larger than the broker takes, and nothing was sent. Send is for one goroutine at a time.
//
// A user-id that isn't the connection's own user becomes an annotation; see
// client.AnnotationUserID.
func (c *Conn) Send(ctx context.Context, target string, payload []byte, notify func(error)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	payload, err := signed(c.login, payload)
	if err != nil {
		return err
	}
	l, err := c.sender(ctx, target)
	if err != nil {
		return err
	}
	if most := l.Attached().MaxMessageSize; most > 0 && uint64(len(payload)) > most {
		return &RefusedError{TooLarge, fmt.Sprintf("the message has %d bytes, and the broker takes at most %d bytes", len(payload), most)}
	}
	c.mu.Lock()
	err = c.awaitLocked(ctx, func() bool {
		_, queued := l.Unanswered()
		return l.Err() != nil || queued < maxQueued
	})
	c.mu.Unlock()
	if err != nil {
		return err
	}
	x := &copySent{c: c, notify: notify}
	x.Payload, x.To = payload, x
	if err := l.Send(&x.Sending); err != nil {
		if lost := c.Err(); lost != nil {
			return lost
		}
		return c.ending(err)
	}
	return nil
}

// Answered is called by the connection with the broker's answer.
func (x *copySent) Answered(_ *amqp.Sending, a amqp.Answer) {
	var err error
	switch s := a.State.(type) {
	case *frames.Accepted:
	case *frames.Released:
		err = ErrReleased
	case *frames.Modified:
		err = ErrModified
	case *frames.Rejected:
		err = &RefusedError{Text: "rejected"}
		if s.Error != nil {
			err = refusal(s.Error)
		}
	default:
		err = &LostError{ErrClosed}
		if a.Err != nil {
			err = &LostError{x.c.ending(a.Err)}
		}
	}
	x.notify(err)
	x.c.mu.Lock()
	x.c.notify()
	x.c.mu.Unlock()
}

// sender returns the link to target.
func (c *Conn) sender(ctx context.Context, target string) (*sender, error) {
	s, err := c.begin(ctx, maxBytes)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	if l := c.senders[target]; l != nil && l.Err() == nil {
		l.used = time.Now()
		c.mu.Unlock()
		return l, nil
	}
	delete(c.senders, target)
	if len(c.senders) >= maxSenders {
		var idle *sender
		if err := c.awaitLocked(ctx, func() bool { idle = c.takeIdle(); return idle != nil }); err != nil {
			c.mu.Unlock()
			return nil, err
		}
		c.mu.Unlock()
		if err := idle.Detach(ctx); err != nil {
			return nil, err
		}
		c.mu.Lock()
	}
	c.mu.Unlock()
	l, err := s.Sender(ctx, amqp.SenderConfig{Target: &frames.Target{Address: target}})
	if err != nil {
		if lost := c.Err(); lost != nil && ctx.Err() == nil {
			return nil, lost
		}
		return nil, c.ending(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.senders[target] = &sender{l, time.Now()}
	return c.senders[target], nil
}

// takeIdle removes the link that was used longest ago, of those without unanswered messages. It
// is called with mu held.
func (c *Conn) takeIdle() (oldest *sender) {
	target := ""
	for t, l := range c.senders {
		if all, _ := l.Unanswered(); all == 0 && (oldest == nil || l.used.Before(oldest.used)) {
			oldest, target = l, t
		}
	}
	if oldest != nil {
		delete(c.senders, target)
	}
	return oldest
}
