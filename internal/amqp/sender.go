package amqp

import (
	"context"
	"encoding/binary"
	"slices"

	"github.com/hopback/hopback/internal/fifo"
	"github.com/hopback/hopback/internal/frames"
)

// SenderConfig is how a sender attaches.
type SenderConfig struct {
	// Name is the link's name. Default: one that is unique in this process.
	Name   string
	Source *frames.Source // default: an empty one
	Target *frames.Target // nil attaches to no node: RabbitMQ then routes by each message's "to"
	// Settled has messages settled as they are sent. Then a message gets an answer only if the
	// link ends before all of it was sent.
	Settled    bool
	Desired    []frames.Symbol
	Properties frames.Map
}

// Sending is a message on its way out. It isn't changed, and isn't sent again, before its
// answer.
type Sending struct {
	// Payload is the encoded message.
	Payload []byte
	// To gets the answer.
	To Answerer

	by    *Sender
	id    uint32
	at    int  // how much of the payload was encoded into the buffer
	begun bool // it has an id
}

// Answerer gets the answer to a message.
type Answerer interface {
	// Answered is called exactly once for each message that Send has taken, unless it was
	// withdrawn, on the goroutine that reads from the connection. It must not block.
	Answered(x *Sending, a Answer)
}

// Answer is what became of a message.
type Answer struct {
	// State is the peer's outcome: *frames.Accepted, *frames.Rejected, *frames.Released,
	// *frames.Modified, or any other delivery state that the peer settled it with, also nil.
	State any
	// Err is an *[Error] if the link ended without an answer.
	Err error
	// Sent says that the peer may have the message, or a part of it.
	Sent bool
}

// Sender sends messages on a link. Its methods are safe for concurrent use.
type Sender struct {
	link
	queue  fifo.Queue[*Sending] // that haven't been encoded to their end
	credit uint32
	count  uint32 // the delivery-count
	open   int    // messages without an answer
	settle bool   // messages are sent settled
	waits  bool   // it is in output.waiting
	stalls bool   // it is in Session.stalled
}

// Sender attaches a sender, and waits for the peer's answer within ctx. If ctx ends before, the
// link is detached when the answer comes.
func (s *Session) Sender(ctx context.Context, cfg SenderConfig) (*Sender, error) {
	l := &Sender{link: link{s: s, role: frames.RoleSender, name: cfg.Name}, settle: cfg.Settled}
	l.of = l
	a := &frames.Attach{
		SenderSettleMode: settleMode(cfg.Settled), Source: cfg.Source, Target: target(cfg.Target),
		InitialDeliveryCount: frames.Some(uint32(0)), DesiredCapabilities: cfg.Desired, Properties: cfg.Properties,
	}
	if err := l.link.attach(ctx, a); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *Sender) attach(a *frames.Attach) (refused bool) { return a.Target == nil }

// Send takes a message, and returns at once. It is sent when the peer has given credit and
// window for it, in the order of the calls. An error means that it wasn't taken, and won't be
// answered.
func (l *Sender) Send(x *Sending) error {
	c := l.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := l.gone(); err != nil {
		return err
	}
	x.by, x.at, x.begun = l, 0, false
	l.queue.Push(x)
	l.open++
	if l.queue.Len() == 1 {
		direct := !l.settle && c.direct()
		l.pump()
		if direct {
			c.writeNow()
		}
	}
	return nil
}

// Withdraw takes back a message if no part of it was sent. unsent reports whether no part was sent,
// nor ever will be. withdrawn reports that the message gets no answer any more. It is false for a
// message that its link has left unsent when it ended, as that answer is already on its way.
func (l *Sender) Withdraw(x *Sending) (unsent, withdrawn bool) {
	c := l.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if x.by != l || x.begun {
		return false, false
	}
	i := slices.Index(l.queue.All(), x)
	if i < 0 {
		return true, false
	}
	l.queue.Remove(i)
	l.open--
	x.by = nil
	return true, true
}

// Unanswered is how many messages were taken and have no answer yet. Queued is how many of
// them haven't been sent to their end.
func (l *Sender) Unanswered() (all, queued int) {
	l.s.c.mu.Lock()
	defer l.s.c.mu.Unlock()
	return l.open, l.queue.Len()
}

// transferRoom is more than a transfer takes without its payload.
const transferRoom = 64

// pump sends what credit, window and buffer allow. It is called with mu held.
func (l *Sender) pump() {
	s, c := l.s, l.s.c
	for l.queue.Len() > 0 {
		x := l.queue.All()[0]
		switch {
		case l.gone() != nil || !l.attached || l.detaching:
			return
		case !x.begun && l.credit == 0:
			return // a flow calls again
		case s.window == 0:
			s.stall(l)
			return
		case len(c.out.b) >= bufferLimit:
			if !l.waits {
				l.waits = true
				c.out.waiting = append(c.out.waiting, l)
			}
			return
		}
		l.transfer(x)
		if x.at < len(x.Payload) {
			continue
		}
		l.queue.Pop()
		if l.settle {
			l.open--
		}
	}
}

// transfer encodes the next frame of a message.
func (l *Sender) transfer(x *Sending) {
	s, c := l.s, l.s.c
	t := frames.Transfer{Handle: l.handle}
	if !x.begun {
		x.begun, x.id = true, s.nextID
		s.nextID++
		l.credit--
		l.count++
		if !l.settle {
			s.unanswered[x.id] = x
		}
		var tag [4]byte
		binary.BigEndian.PutUint32(tag[:], x.id)
		c.out.tag = tag
		t.DeliveryID, t.DeliveryTag = frames.Some(x.id), c.out.tag[:]
		t.MessageFormat, t.Settled = frames.Some(uint32(0)), frames.Some(l.settle)
	}
	part := x.Payload[x.at:]
	if room := int(c.peer.MaxFrameSize) - transferRoom; len(part) > room {
		part, t.More = part[:room], true
	}
	c.out.transfer = t
	at := len(c.out.b)
	b, err := c.enc.Begin(c.out.b, s.channel, &c.out.transfer)
	if err != nil { // a transfer of ours can always be encoded
		panic(err)
	}
	b = append(b, part...)
	frames.Complete(b, at)
	c.out.b = b
	c.out.kick()
	x.at += len(part)
	s.nextOut++
	s.window--
}

// flow takes the peer's credit.
func (l *Sender) flow(f *frames.Flow) {
	credit := f.DeliveryCount.Or(0) + f.LinkCredit.Or(0) - l.count
	if int32(credit) < 0 {
		credit = 0
	}
	l.credit = credit
	l.pump()
	if f.Drain && l.credit > 0 {
		l.count += l.credit
		l.credit = 0
	}
	if f.Drain || f.Echo {
		_ = l.s.put(l.s.windows(&frames.Flow{Handle: frames.Some(l.handle), DeliveryCount: frames.Some(l.count), LinkCredit: frames.Some(l.credit), Drain: f.Drain}))
	}
}

// lost answers all messages.
func (l *Sender) lost(why *Error) {
	c := l.s.c
	if l.open == 0 {
		return
	}
	for id, x := range l.s.unanswered {
		if x.by == l {
			delete(l.s.unanswered, id)
			c.answer(x, Answer{Err: why, Sent: true})
		}
	}
	for _, x := range l.queue.All() {
		if !x.begun || l.settle { // else it was among the others
			c.answer(x, Answer{Err: why, Sent: x.begun})
		}
	}
	l.queue = fifo.Queue[*Sending]{}
}

// answer has x get its answer. It is called with mu held.
func (c *Conn) answer(x *Sending, a Answer) {
	x.by.open--
	c.events = append(c.events, event{kind: eventMessageAnswered, x: x, answer: a})
}
