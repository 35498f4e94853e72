package dedicated

import (
	"context"
	"slices"
	"sync"

	"github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
)

// Subscription receives from a stream for as long as its link lives. Deliveries are
// settled by the broker as it sends them: a stream keeps its messages anyway. It is for
// one goroutine.
type Subscription struct {
	amqp.NoReceiverEvents
	c      *Conn
	r      *amqp.Receiver
	credit uint32        // how many messages may be on their way, or wait
	wake   chan struct{} // something has come

	mu      sync.Mutex
	filling batch
	ended   bool

	taken batch // the user's
}

// Message is a message of a Subscription.
type Message struct {
	Payload []byte
	// Size is how many bytes the encoded message has. If that is more than Payload has, the message is
	// larger than link.Dialed.MaxMessageSize, and Payload is its beginning.
	Size uint64
}

// Cut reports whether Payload isn't the whole message.
func (m Message) Cut() bool { return m.Size > uint64(len(m.Payload)) }

// batch is messages that wait, and the memory that they are in.
type batch struct {
	messages []Message
	room     []byte // what is left of the newest chunk is behind its length
	bytes    int    // of messages
}

// chunkSize is the memory that messages are copied into. Messages larger than an eighth
// of it have memory of their own.
const chunkSize = 64 << 10

func (b *batch) add(d *amqp.Delivery) {
	payload := d.Payload
	b.bytes += len(payload)
	switch {
	case d.Owned:
	case len(payload) > chunkSize/8:
		payload = slices.Clone(payload)
	default:
		if cap(b.room)-len(b.room) < len(payload) {
			b.room = make([]byte, 0, chunkSize)
		}
		at := len(b.room)
		b.room = append(b.room, payload...)
		payload = b.room[at:len(b.room):len(b.room)]
	}
	b.messages = append(b.messages, Message{payload, d.Size})
}

func (b *batch) reset() {
	clear(b.messages)
	b.messages, b.room, b.bytes = b.messages[:0], b.room[:0], 0
}

// Subscribe attaches to source, an address, with a filter set. A Conn has at most one
// Receiver or Subscription. Up to credit messages wait in memory, at least 1. They have at most
// maxBytes, or it is a single one.
func (c *Conn) Subscribe(ctx context.Context, source string, filter frames.Map, credit uint32, maxBytes int64) (*Subscription, error) {
	s := &Subscription{c: c, credit: max(credit, 1), wake: make(chan struct{}, 1)}
	session, err := c.begin(ctx, maxBytes)
	if err != nil {
		return nil, err
	}
	session.Limit(maxBytes) // a Receiver may have begun it
	s.r, err = session.Receiver(ctx, amqp.ReceiverConfig{
		Source: &frames.Source{Address: source, Filter: filter}, Settled: true, MaxKept: c.maxMessage,
		Events: s,
	})
	if err != nil {
		return nil, c.ending(err)
	}
	return s, s.r.AddCredit(s.credit)
}

// Filter is the filter set that the broker says it applies.
func (s *Subscription) Filter() frames.Map {
	if source := s.r.Attached().Source; source != nil {
		return source.Filter
	}
	return nil
}

// Ended is called by the engine, as is Delivered.
func (s *Subscription) Ended(error) {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.awaken()
}

func (s *Subscription) Delivered(d *amqp.Delivery) {
	s.mu.Lock()
	s.filling.add(d)
	first := len(s.filling.messages) == 1
	s.mu.Unlock()
	if first {
		s.awaken()
	}
}

func (s *Subscription) awaken() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Next returns the messages that have come, at least one, in order. They are valid until
// the next call. It waits for the first.
func (s *Subscription) Next(ctx context.Context) ([]Message, error) {
	for {
		if n := s.taken.bytes; n > 0 {
			s.taken.reset()
			s.r.Taken(n)
		}
		credit := s.r.Credit() // before the swap: what comes in between counts twice, and never not at all
		s.mu.Lock()
		s.taken, s.filling = s.filling, s.taken
		waiting, ended := uint32(len(s.taken.messages)), s.ended
		s.mu.Unlock()
		// Credit is granted again when half of it is used up. What waits counts.
		if left := credit + waiting; !ended && left < s.credit && s.credit-left >= (s.credit+1)/2 {
			_ = s.r.AddCredit(s.credit - left) // an end is reported below
		}
		if waiting > 0 {
			return s.taken.messages, nil
		}
		if err := s.c.Err(); err != nil {
			return nil, err
		}
		if ended {
			return nil, s.c.ending(s.r.Err())
		}
		select {
		case <-s.wake:
		case <-s.c.Done():
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
