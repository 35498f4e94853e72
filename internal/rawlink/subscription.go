package rawlink

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// Subscription receives from a stream for as long as its link lives. Deliveries are
// settled by the broker as it sends them: a stream keeps its messages anyway. It is for
// one goroutine.
type Subscription struct {
	c      *Conn
	l      *link
	credit uint32 // how many messages may be on their way, or wait
	filter frames.Map
	wake   chan struct{} // something has come

	// Guarded by c.mu.
	filling batch
	partial []byte // of a message in several frames
	amid    bool   // partial is one
	parts   uint32 // its frames
	allowed uint32 // credit that is left at the broker

	count uint32 // the delivery-count behind what was received

	taken batch // the user's
}

// maxWindow bounds the frames of a subscription that are on their way.
const maxWindow = 2048

// batch is messages that wait, and the memory that they are in.
type batch struct {
	payloads [][]byte
	room     []byte // what is left of the newest chunk is behind its length
	frames   uint32
}

// chunkSize is the memory that messages are copied into. Messages larger than an eighth
// of it have memory of their own.
const chunkSize = 64 << 10

func (b *batch) add(payload []byte) {
	if len(payload) > chunkSize/8 {
		b.payloads = append(b.payloads, slices.Clone(payload))
		return
	}
	if cap(b.room)-len(b.room) < len(payload) {
		b.room = make([]byte, 0, chunkSize)
	}
	at := len(b.room)
	b.room = append(b.room, payload...)
	b.payloads = append(b.payloads, b.room[at:len(b.room):len(b.room)])
}

func (b *batch) reset() {
	clear(b.payloads)
	b.payloads, b.room, b.frames = b.payloads[:0], b.room[:0], 0
}

// Subscribe attaches to source, an address, with a filter set. A Conn has at most one
// Receiver or Subscription. Up to credit messages wait in memory, at least 1.
func (c *Conn) Subscribe(ctx context.Context, source string, filter frames.Map, credit uint32) (*Subscription, error) {
	s := &Subscription{c: c, l: &link{}, credit: max(credit, 1), wake: make(chan struct{}, 1)}
	s.l.sub = s
	c.mu.Lock()
	c.window = max(c.window, min(s.credit, maxWindow))
	c.mu.Unlock()
	c.subscribed.Store(true)
	err := c.attach(ctx, s.l, &frames.Attach{
		Role: frames.RoleReceiver, SenderSettleMode: frames.Some(uint8(1)), ReceiverSettleMode: frames.Some(uint8(0)),
		Source: &frames.Source{Address: source, Filter: filter},
		Target: &frames.Target{},
	})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.count, s.filter = s.l.deliveryCount, s.l.filter
	s.grant()
	return s, c.err
}

// Filter is the filter set that the broker says it applies.
func (s *Subscription) Filter() frames.Map { return s.filter }

// room is how many messages may be on their way. It is called with c.mu held.
func (s *Subscription) room() uint32 {
	return s.credit - min(s.credit, uint32(len(s.filling.payloads)))
}

// grant asks for as many messages as there is room for. It is called with c.mu held.
func (s *Subscription) grant() {
	s.allowed = s.room()
	s.c.flow(&frames.Flow{Handle: frames.Some(s.l.handle), DeliveryCount: frames.Some(s.count), LinkCredit: frames.Some(s.allowed)})
}

// Next returns the messages that have come, at least one, in order. They are valid until
// the next call. It waits for the first.
func (s *Subscription) Next(ctx context.Context) ([][]byte, error) {
	c := s.c
	for {
		c.mu.Lock()
		if len(s.taken.payloads) > 0 {
			c.untaken -= s.taken.frames
			s.taken.reset()
			// Credit and window are granted again when half of them is used up.
			switch {
			case s.l.gone != nil || c.err != nil:
			case s.room()-min(s.allowed, s.room()) >= (s.credit+1)/2:
				s.grant()
			case c.granted < c.window/2 && c.window-c.untaken > c.granted+c.window/4:
				c.flow(nil)
			}
		}
		if len(s.filling.payloads) > 0 {
			s.taken, s.filling = s.filling, s.taken
			c.mu.Unlock()
			return s.taken.payloads, nil
		}
		gone, err := s.l.gone, c.err
		c.mu.Unlock()
		switch {
		case gone != nil:
			return nil, gone
		case err != nil:
			return nil, err
		}
		select {
		case <-s.wake:
		case <-c.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *Subscription) awaken() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// transfer takes one frame. It is called with c.mu held, and payload is valid until it
// returns.
func (s *Subscription) transfer(t *frames.Transfer, payload []byte) error {
	if s.amid || t.More {
		s.amid = true
		s.partial = append(s.partial, payload...)
		s.parts++
		if t.More && !t.Aborted {
			// A message may be larger than the window. What was assembled of it is taken.
			s.c.untaken -= s.parts
			s.parts = 0
			if s.c.granted < s.c.window/2 {
				s.c.flow(nil)
			}
			return nil
		}
		payload = s.partial
		s.amid, s.partial = false, nil
		parts := s.parts
		s.parts = 0
		if t.Aborted {
			s.c.untaken -= parts
			return nil
		}
		s.filling.frames += parts
	} else {
		if t.Aborted {
			s.c.untaken--
			return nil
		}
		s.filling.frames++
	}
	if s.allowed == 0 {
		return errors.New("the broker sends more messages than it may")
	}
	s.allowed--
	s.count++
	first := len(s.filling.payloads) == 0
	s.filling.add(payload)
	if first {
		s.awaken()
	}
	return nil
}

// transfers reads as many transfers of a Subscription as have come. It reads nothing, and
// returns nil, if what comes next is another frame.
func (c *Conn) transfers(codec *frames.Codec, t *frames.Transfer) (n int, err error) {
	for ; n == 0 || c.r.Whole(); n++ {
		head, err := c.r.Start()
		if err != nil {
			return n, err
		}
		h, ok := frames.ReadHeader(head)
		if !ok || h.Size > peekable || h.Size < minTransfer {
			return n, nil
		}
		frame, err := c.r.Peek(int(h.Size))
		if err != nil {
			return n, err
		}
		if kind, _ := frames.Kind(frame); kind != frames.KindTransfer {
			return n, nil
		}
		payload, err := codec.Decode(frame, t)
		if err != nil {
			return n, err
		}
		c.mu.Lock()
		err = c.transferred(t, payload)
		c.mu.Unlock()
		if err != nil {
			return n, err
		}
		if err := c.r.Discard(len(frame)); err != nil {
			return n, err
		}
	}
	return n, nil
}

const (
	// minTransfer is less than any transfer's frame has.
	minTransfer = frames.HeaderSize + 4
	// peekable is how large a frame may be that is decoded where it was read.
	peekable = 32 << 10
)

// transferred is called with mu held.
func (c *Conn) transferred(t *frames.Transfer, payload []byte) error {
	c.nextIn++
	c.untaken++
	if c.granted == 0 {
		return errors.New("the broker sends more than it may")
	}
	c.granted--
	l := c.peers[t.Handle]
	if l == nil || l.sub == nil {
		return fmt.Errorf("a transfer on the unknown handle %d", t.Handle)
	}
	return l.sub.transfer(t, payload)
}
