package amqp

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/hopback/hopback/internal/frames"
)

// link is what senders and receivers share. It is guarded by the connection's mu.
type link struct {
	s     *Session
	of    linkEnd
	onEnd func(error)
	ready chan struct{} // closed when the peer has attached the link, or it is over
	over  chan struct{} // closed when it is over at both ends

	name       string
	handle     uint32
	peerHandle uint32
	role       bool   // this end's
	err        *Error // why it has ended, or ends
	asked      bool   // this end's user has detached it
	answered   bool   // the peer has answered the attach
	attached   bool   // and the link is usable
	detaching  bool   // this end's detach was put
	abandoned  bool   // nobody waits for the attach
	isReady    bool   // ready is closed
	reported   bool   // onEnd was called, or will be
	closed     bool   // over is closed
	peer       Attached
}

// linkEnd is the part that a sender and a receiver don't share.
type linkEnd interface {
	// attach takes the peer's attach. refused says that a detach will follow it.
	attach(a *frames.Attach) (refused bool)
	flow(f *frames.Flow)
	// lost is called once, when the link can't be used any more.
	lost(why *Error)
}

// Attached is what the peer says in its attach.
type Attached struct {
	Source         *frames.Source
	Target         any
	MaxMessageSize uint64 // 0: no limit
	Capabilities   []frames.Symbol
	Properties     frames.Map
}

var linkCount atomic.Uint64

// target is what an attach has as its target: an empty one in place of none.
func target(t *frames.Target) any {
	if t == nil {
		return &frames.Target{}
	}
	return t
}

// settleMode is the sender-settle-mode: unsettled, or settled.
func settleMode(settled bool) frames.Optional[uint8] {
	if settled {
		return frames.Some(uint8(1))
	}
	return frames.Some(uint8(0))
}

// attach attaches a link, and waits for the peer's answer within ctx.
func (l *link) attach(ctx context.Context, a *frames.Attach) error {
	s, c := l.s, l.s.c
	l.ready, l.over = make(chan struct{}), make(chan struct{})
	c.mu.Lock()
	if err := s.gone(); err != nil {
		c.mu.Unlock()
		return err
	}
	limit := min(s.peerLinks, maxLinks)
	handle := uint32(0)
	for s.links[handle] != nil {
		handle++
	}
	if handle >= limit {
		c.mu.Unlock()
		return ErrTooManyLinks
	}
	if l.name == "" {
		l.name = fmt.Sprintf("hopback-%d", linkCount.Add(1))
	}
	l.handle = handle
	a.Name, a.Handle, a.Role, a.ReceiverSettleMode = l.name, l.handle, l.role, frames.Some(uint8(0))
	if a.Source == nil {
		a.Source = &frames.Source{}
	}
	if err := s.put(a); err != nil {
		c.mu.Unlock()
		return err
	}
	s.links[handle] = l
	c.mu.Unlock()
	select {
	case <-l.ready:
	case <-ctx.Done():
		c.mu.Lock()
		if !l.isReady {
			l.abandoned = true // it is detached when the peer has attached it
			l.lose(&Error{Scope: ScopeLink, Err: ErrClosed})
			c.mu.Unlock()
			return context.Cause(ctx)
		}
		c.mu.Unlock()
	}
	return l.Err()
}

// Err returns why the link has ended, an *[Error]; nil while it lasts.
func (l *link) Err() error {
	l.s.c.mu.Lock()
	defer l.s.c.mu.Unlock()
	return l.gone()
}

// gone is Err with mu held.
func (l *link) gone() error {
	if l.err != nil {
		return l.err
	}
	return l.s.gone()
}

// Attached returns what the peer said in its attach.
func (l *link) Attached() Attached { return l.peer }

// Done is closed when the link is over at both ends.
func (l *link) Done() <-chan struct{} { return l.over }

// Detach closes the link, and waits within ctx until the peer has closed it, too. What was
// settled before is written before. A peer may answer messages until then; what it hasn't
// answered then gets an error.
func (l *link) Detach(ctx context.Context) error {
	c := l.s.c
	c.mu.Lock()
	l.ask()
	c.mu.Unlock()
	select {
	case <-l.over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ask detaches the link for its user. It is called with mu held.
func (l *link) ask() {
	l.detach(nil)
	l.asked = true
	if l.err == nil {
		l.err = &Error{Scope: ScopeLink, Err: ErrClosed}
	}
}

// detach puts this end's detach. It is called with mu held.
func (l *link) detach(e *frames.Error) {
	if l.detaching || l.closed || l.s.ending || l.s.gone() != nil {
		return
	}
	if !l.answered {
		l.abandoned = true
		return
	}
	_ = l.s.put(&frames.Detach{Handle: l.handle, Closed: true, Error: e})
	l.detaching = true
}

// lose makes the link unusable. It is called with mu held.
func (l *link) lose(why *Error) {
	if l.err == nil {
		l.err = why
	}
	l.of.lost(why)
	if l.isReady && !l.asked && !l.reported && l.onEnd != nil {
		l.reported = true
		l.s.c.events = append(l.s.c.events, event{kind: eventLinkEnded, l: l})
	}
	if l.s.err != nil && !l.closed { // nothing more comes
		l.finish()
	}
	l.makeReady()
}

// finish is the end of the link at both ends. It is called with mu held.
func (l *link) finish() {
	if l.closed {
		return
	}
	l.closed = true
	delete(l.s.links, l.handle)
	if l.answered {
		delete(l.s.peers, l.peerHandle)
	}
	l.s.c.events = append(l.s.c.events, event{kind: eventLinkOver, l: l})
}

func (l *link) makeReady() {
	if !l.isReady {
		l.isReady = true
		close(l.ready)
	}
}

// refuse detaches the link over what the peer did. It is called with mu held.
func (l *link) refuse(v *violation) {
	l.detach(&frames.Error{Condition: v.condition, Description: v.text})
	l.lose(&Error{Scope: ScopeLink, Err: v})
}

// peerAttached takes the peer's answer to the attach.
func (l *link) peerAttached(a *frames.Attach) {
	l.answered = true
	l.peerHandle = a.Handle
	l.s.peers[a.Handle] = l
	l.peer = Attached{Source: a.Source, Target: a.Target, MaxMessageSize: a.MaxMessageSize.Or(0), Capabilities: a.OfferedCapabilities, Properties: a.Properties}
	switch {
	case l.of.attach(a): // refused: a detach with the reason follows
	case l.abandoned:
		l.detach(nil)
	default:
		l.attached = true
		l.makeReady()
	}
}

// peerDetached takes the peer's detach.
func (l *link) peerDetached(d *frames.Detach) {
	why := &Error{Scope: ScopeLink, Remote: d.Error}
	if !l.detaching {
		// Also where the peer only wants to suspend it: links aren't resumed here.
		l.detach(nil)
	} else if l.err != nil {
		why = l.err
	}
	l.lose(why)
	l.finish()
}
