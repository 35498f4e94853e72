package amqp

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// event is a callback to make, or somebody to wake, once the lock is free.
type event struct {
	kind   eventKind
	at     int // of a delivery in Conn.deliveries
	x      *Sending
	answer Answer
	r      *Receiver
	l      *link
	s      *Session
	state  any
	first  uint32
	last   uint32
}

type eventKind uint8

const (
	eventMessageAnswered eventKind = iota
	eventMessageDelivered
	eventDrained
	eventLinkFlow
	eventStateChanged
	eventLinkEnded
	eventLinkOver
	eventBlockedChanged
	eventSessionBegun
	eventSessionEnded
	eventSessionOver
)

const (
	// grace is how much longer the reader waits where the idle timeout has passed: after the
	// process was suspended, what the peer sent during that time is there.
	grace = time.Second
	// parting is how long this end waits for the peer's close after a violation.
	parting = time.Second
)

// read is the reader: it reads until the connection ends, and makes all callbacks.
func (c *Conn) read() {
	defer c.finish()
	for {
		if err := c.frames(); err != nil { // some may have come with the peer's open
			c.part(err)
			return
		}
		// Once the connection ends or closes, nothing more is put, and what has ended it is read.
		_ = c.AwaitRoom(context.Background(), readLimit)
		if err := c.fill(); err != nil {
			c.Fail(err)
			return
		}
	}
}

// fill reads once.
func (c *Conn) fill() error {
	_ = c.net.SetReadDeadline(time.Now().Add(c.idle))
	err := c.in.Fill()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = c.net.SetReadDeadline(time.Now().Add(grace))
		if err = c.in.Fill(); errors.Is(err, os.ErrDeadlineExceeded) {
			return ErrSilent
		}
	}
	return err
}

// part closes the connection over what the peer did, or did by its close.
func (c *Conn) part(err error) {
	end, ok := errors.AsType[*Error](err)
	if !ok {
		end = &Error{Scope: ScopeConnection, Err: err}
	}
	v, broke := errors.AsType[*violation](err)
	c.mu.Lock()
	switch {
	case c.closing && end.Remote == nil && !broke: // the answer to this end's close
		end.Err = ErrClosed
	case !c.closing && broke:
		c.flushSettled()
		_ = c.put(0, &frames.Close{Error: &frames.Error{Condition: v.condition, Description: v.text}})
		c.closing = true
	case !c.closing:
		c.flushSettled()
		_ = c.put(0, &frames.Close{})
		c.closing = true
	}
	c.mu.Unlock()
	if broke { // the peer reads why once it has been read from
		_ = c.net.SetReadDeadline(time.Now().Add(parting))
		for {
			c.in.Drop()
			if c.in.Fill() != nil {
				break
			}
		}
	} else {
		t := time.NewTimer(parting)
		defer t.Stop()
		select {
		case <-c.out.flushed:
		case <-t.C:
		}
	}
	c.end(end)
}

// flushSettled encodes all settlements that wait. It is called with mu held.
func (c *Conn) flushSettled() {
	for _, s := range c.out.settling {
		s.writeSettled()
	}
}

// finish is the end of the reader: everything that depended on the connection ends.
func (c *Conn) finish() {
	c.mu.Lock()
	why := c.err
	for _, s := range c.sessions {
		if s != nil {
			s.finish(why)
		}
	}
	c.mu.Unlock()
	c.callBack()
	close(c.done)
}

// frames takes the frames that have come, and makes their callbacks.
func (c *Conn) frames() (err error) {
	c.mu.Lock()
	for err == nil {
		var b []byte
		if b, err = c.in.Next(); err != nil {
			err = broken(ScopeConnection, condFraming, "%v", err)
			break
		}
		if b == nil {
			break
		}
		err = c.take(b)
	}
	c.mu.Unlock()
	c.callBack()
	return err
}

// callBack makes the callbacks of the frames that were taken. It is called without the lock.
func (c *Conn) callBack() {
	// Callbacks may add none: only the reader does.
	for i := range c.events {
		c.call(&c.events[i])
		c.events[i] = event{}
	}
	clear(c.deliveries)
	c.events, c.deliveries = c.events[:0], c.deliveries[:0]
}

func (c *Conn) call(e *event) {
	switch e.kind {
	case eventMessageAnswered:
		e.x.To.Answered(e.x, e.answer)
	case eventMessageDelivered:
		e.r.cfg.Events.Delivered(&c.deliveries[e.at])
	case eventDrained:
		e.r.cfg.Events.Drained(e.first)
	case eventLinkFlow:
		e.r.cfg.Events.Flowed(e.state.(frames.Map))
	case eventStateChanged:
		e.r.cfg.Events.StateChanged(e.first, e.last)
	case eventLinkEnded:
		e.l.onEnd(e.l.Err())
	case eventLinkOver:
		close(e.l.over)
	case eventBlockedChanged:
		e.s.cfg.OnBlocked(e.state.(bool))
	case eventSessionBegun:
		close(e.s.begun)
	case eventSessionEnded:
		e.s.cfg.OnEnd(e.s.Err())
	case eventSessionOver:
		if f := e.s.cfg.OnOver; f != nil {
			f()
		}
		close(e.s.over)
	}
}

// take takes one frame. It is called with mu held.
func (c *Conn) take(b []byte) error {
	kind, channel := frames.Kind(b)
	switch kind {
	case frames.KindTransfer:
		payload, err := c.dec.Decode(b, &c.transfer)
		if err != nil {
			return broken(ScopeConnection, condFraming, "%v", err)
		}
		return c.sessionFrame(channel, &c.transfer, payload)
	case frames.KindDisposition:
		if _, err := c.dec.Decode(b, &c.disposition); err != nil {
			return broken(ScopeConnection, condFraming, "%v", err)
		}
		return c.sessionFrame(channel, &c.disposition, nil)
	case frames.KindFlow:
		if _, err := c.dec.Decode(b, &c.flow); err != nil {
			return broken(ScopeConnection, condFraming, "%v", err)
		}
		return c.sessionFrame(channel, &c.flow, nil)
	}
	f, err := frames.Decode(append([]byte(nil), b...)) // what is in it is kept
	if err != nil {
		return broken(ScopeConnection, condFraming, "%v", err)
	}
	if f.Type != frames.TypeAMQP {
		return broken(ScopeConnection, condFraming, "a frame of type %d", f.Type)
	}
	switch p := f.Body.(type) {
	case nil:
		return nil // a sign of life
	case *frames.Close:
		return &Error{Scope: ScopeConnection, Remote: p.Error}
	case *frames.Begin:
		return c.peerBegan(f.Channel, p)
	case *frames.Open:
		return broken(ScopeConnection, condFraming, "a second open")
	}
	return c.sessionFrame(f.Channel, f.Body, f.Payload)
}

// peerBegan takes the peer's answer to a begin.
func (c *Conn) peerBegan(channel uint16, p *frames.Begin) error {
	own := p.RemoteChannel
	if !own.Set || int(own.Value) >= len(c.sessions) || c.sessions[own.Value] == nil || c.sessions[own.Value].open {
		return broken(ScopeConnection, condFraming, "a begin that answers none")
	}
	if c.byPeer[channel] != nil {
		return broken(ScopeConnection, condFraming, "a second begin on channel %d", channel)
	}
	s := c.sessions[own.Value]
	c.answers.Add(1)
	c.byPeer[channel] = s
	s.open, s.peerChannel = true, channel
	s.nextIn, s.window = p.NextOutgoingID, p.IncomingWindow
	s.peerLinks = uint32(min(uint64(p.HandleMax.Or(1<<32-1))+1, maxLinks))
	if s.abandoned {
		s.end(&frames.End{}, s.err)
		return nil
	}
	s.setBlocked(p.IncomingWindow == 0)
	c.events = append(c.events, event{kind: eventSessionBegun, s: s})
	return nil
}

// setBlocked notes whether the peer accepts transfers. It is called with mu held.
func (s *Session) setBlocked(blocked bool) {
	s.blocked = blocked
	if s.cfg.OnBlocked != nil {
		s.c.events = append(s.c.events, event{kind: eventBlockedChanged, s: s, state: blocked})
	}
}

// sessionFrame takes a frame of a session.
func (c *Conn) sessionFrame(channel uint16, p frames.Performative, payload []byte) error {
	s := c.byPeer[channel]
	if s == nil {
		return broken(ScopeConnection, condFraming, "a %T on channel %d, which has no session", p, channel)
	}
	if e, ok := p.(*frames.End); ok {
		c.answers.Add(1)
		s.peerEnded(e)
		return nil
	}
	var v *violation
	switch p := p.(type) {
	case *frames.Transfer:
		v = s.peerTransfer(p, payload)
	case *frames.Disposition:
		c.answers.Add(1)
		v = s.peerDisposition(p)
	case *frames.Flow:
		v = s.peerFlow(p)
	case *frames.Attach:
		c.answers.Add(1)
		v = s.peerAttach(p)
	case *frames.Detach:
		c.answers.Add(1)
		v = s.peerDetach(p)
	default:
		v = broken(ScopeConnection, condFraming, "a %T on a session", p)
	}
	switch {
	case v == nil:
	case v.scope == ScopeConnection:
		return v
	case !s.ending:
		s.refuse(v)
	}
	return nil
}

// peerEnded takes the peer's end.
func (s *Session) peerEnded(e *frames.End) {
	why := &Error{Scope: ScopeSession, Remote: e.Error}
	if !s.ending {
		if s.err == nil {
			s.err = why
		}
		s.settled.all = nil // they would come too late
		_ = s.c.put(s.channel, &frames.End{})
		s.ending = true
	} else if s.err != nil {
		why = s.err
	}
	s.finish(why)
}

func (s *Session) peerTransfer(t *frames.Transfer, payload []byte) *violation {
	if s.ending {
		return nil
	}
	s.nextIn++
	if s.granted == 0 {
		return broken(ScopeSession, condWindow, "more transfers than the window allows")
	}
	s.granted--
	l := s.peers[t.Handle]
	if l == nil {
		return broken(ScopeSession, condHandle, "a transfer on handle %d, which no link has", t.Handle)
	}
	r, ok := l.of.(*Receiver)
	if !ok {
		return broken(ScopeSession, condErrant, "a transfer on a link that sends")
	}
	if v := r.transfer(t, payload); v != nil {
		r.refuse(v)
	}
	s.grant()
	return nil
}

func (s *Session) peerDisposition(d *frames.Disposition) *violation {
	first, last := d.First, d.Last.Or(d.First)
	if d.Role == frames.RoleSender {
		for _, l := range s.links {
			if r, ok := l.of.(*Receiver); ok && r.err == nil {
				s.c.events = append(s.c.events, event{kind: eventStateChanged, r: r, first: first, last: last})
			}
		}
		return nil
	}
	if _, partial := d.State.(*frames.Received); partial && !d.Settled.Or(false) {
		return nil
	}
	if d.State == nil && !d.Settled.Or(false) {
		return nil
	}
	found := false
	for _, id := range s.among(first, last) {
		if x := s.unanswered[id]; x != nil {
			found = true
			delete(s.unanswered, id)
			s.c.answer(x, Answer{State: d.State, Sent: true})
		}
	}
	if found && !d.Settled.Or(false) && s.err == nil { // a peer that settles second
		_ = s.put(&frames.Disposition{Role: frames.RoleSender, First: first, Last: frames.Some(last), Settled: frames.Some(true), State: d.State})
	}
	return nil
}

// among returns the unanswered deliveries from first to last, in order. It doesn't try each of
// a range that a peer has made large.
func (s *Session) among(first, last uint32) []uint32 {
	ids := s.c.ids[:0]
	if n := last - first; uint64(n) < uint64(len(s.unanswered)) {
		for i := uint32(0); ; i++ {
			ids = append(ids, first+i)
			if i == n {
				break
			}
		}
	} else {
		for id := range s.unanswered {
			if id-first <= n {
				ids = append(ids, id)
			}
		}
		slices.SortFunc(ids, func(a, b uint32) int { return cmp.Compare(a-first, b-first) })
	}
	s.c.ids = ids
	return ids
}

func (s *Session) peerFlow(f *frames.Flow) *violation {
	if s.ending {
		return nil
	}
	s.window = f.NextIncomingID.Or(0) + f.IncomingWindow - s.nextOut
	if int32(s.window) < 0 {
		s.window = 0
	}
	if blocked := f.IncomingWindow == 0; blocked != s.blocked {
		s.setBlocked(blocked)
	}
	s.pump()
	if !f.Handle.Set {
		if f.Echo {
			_ = s.put(s.windows(&frames.Flow{}))
		}
		return nil
	}
	l := s.peers[f.Handle.Value]
	if l == nil {
		return broken(ScopeSession, condHandle, "a flow on handle %d, which no link has", f.Handle.Value)
	}
	if l.err == nil && !l.detaching {
		l.of.flow(f)
	}
	return nil
}

func (s *Session) peerAttach(a *frames.Attach) *violation {
	if s.ending {
		return nil
	}
	for _, l := range s.links {
		if l.name != a.Name || l.role == a.Role {
			continue
		}
		switch {
		case l.answered:
			return broken(ScopeSession, condHandleInUse, "the link %q is attached twice", a.Name)
		case s.peers[a.Handle] != nil:
			return broken(ScopeSession, condHandleInUse, "handle %d is attached twice", a.Handle)
		}
		l.peerAttached(a)
		return nil
	}
	return broken(ScopeSession, condErrant, "the peer attaches the link %q, which nobody asked for", a.Name)
}

func (s *Session) peerDetach(d *frames.Detach) *violation {
	l := s.peers[d.Handle]
	if l == nil {
		if s.ending {
			return nil
		}
		return broken(ScopeSession, condHandle, "a detach of handle %d, which no link has", d.Handle)
	}
	l.peerDetached(d)
	return nil
}
