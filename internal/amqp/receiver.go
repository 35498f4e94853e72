package amqp

import (
	"context"
	"slices"

	"github.com/hopback/hopback/internal/frames"
)

// ReceiverConfig is how a receiver attaches.
type ReceiverConfig struct {
	// Name is the link's name. Default: one that is unique in this process.
	Name string
	// Source is where messages come from.
	Source *frames.Source
	Target *frames.Target // default: an empty one
	// Settled asks the peer to settle deliveries as it sends them.
	Settled    bool
	Desired    []frames.Symbol
	Properties frames.Map
	// MaxMessageSize bounds a delivery in bytes. The link is detached over a larger one.
	// Default 512 MiB, the most that RabbitMQ can be configured for.
	MaxMessageSize uint64
	// MaxKept bounds the bytes of a delivery that are kept. Of a larger one only the first
	// transfer's are, and [Delivery.Size] says how large it was. The peer isn't told this limit: it
	// would end the link over a larger message, and deliver the message again on the next one,
	// without end. Default: MaxMessageSize.
	MaxKept uint64
	// Events hears what happens on the link.
	Events ReceiverEvents
}

// ReceiverEvents hears what happens on a receiver's link. See the package comment for how its methods are
// called.
type ReceiverEvents interface {
	// Delivered is called with each delivery.
	Delivered(d *Delivery)
	// Drained is called when a drain is over: all that the peer had for the link's credit has
	// come, and no credit is left. count is what Drain returned.
	Drained(count uint32)
	// Flowed is called with the properties of each flow of the link that has some.
	Flowed(properties frames.Map)
	// StateChanged is called when the peer changes the state of deliveries from first to last,
	// which may be of other links of the session. RabbitMQ 4.3 takes deliveries back in this way
	// when the consumer timeout has passed.
	StateChanged(first, last uint32)
	// Ended is called once, with an *[Error], when the link ends without [Receiver.Detach].
	Ended(err error)
}

// NoReceiverEvents has the methods of ReceiverEvents that not everybody needs, and they do nothing.
type NoReceiverEvents struct{}

func (NoReceiverEvents) Drained(uint32)           {}
func (NoReceiverEvents) Flowed(frames.Map)        {}
func (NoReceiverEvents) StateChanged(_, _ uint32) {}

const defaultMaxMessage = 512 << 20

// Delivery is a message that has come.
type Delivery struct {
	ID      uint32
	Tag     []byte // valid until Delivered returns
	Settled bool   // by the peer
	// Payload is the encoded message. It is valid until Delivered returns, unless Owned is
	// set: then it is the callback's.
	Payload []byte
	Owned   bool
	// Size is how many bytes the message has. If it is more than len(Payload), the message is
	// larger than [ReceiverConfig.MaxKept], and Payload is the beginning of it.
	Size uint64
}

// Receiver receives messages on a link. Its methods are safe for concurrent use.
type Receiver struct {
	link
	cfg      ReceiverConfig
	credit   uint32 // that the peer has left
	count    uint32 // the delivery-count
	draining bool
	begun    bool     // current has begun to come
	current  Delivery // its tag and payload aren't parts of the read buffer
	untaken  int64    // its part of Session.untaken
}

// Receiver attaches a receiver without credit, and waits for the peer's answer within ctx. If
// ctx ends before, the link is detached when the answer comes. RabbitMQ may wait for a queue's
// leader before it answers; other frames of the same session wait behind.
func (s *Session) Receiver(ctx context.Context, cfg ReceiverConfig) (*Receiver, error) {
	if cfg.MaxMessageSize == 0 {
		cfg.MaxMessageSize = defaultMaxMessage
	}
	if cfg.MaxKept == 0 {
		cfg.MaxKept = cfg.MaxMessageSize
	}
	r := &Receiver{link: link{s: s, role: frames.RoleReceiver, name: cfg.Name, onEnd: cfg.Events.Ended}, cfg: cfg}
	r.of = r
	a := &frames.Attach{
		SenderSettleMode: settleMode(cfg.Settled), Source: cfg.Source, Target: target(cfg.Target),
		DesiredCapabilities: cfg.Desired, Properties: cfg.Properties, MaxMessageSize: frames.Some(cfg.MaxMessageSize),
	}
	if err := r.link.attach(ctx, a); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Receiver) attach(a *frames.Attach) (refused bool) {
	r.count = a.InitialDeliveryCount.Or(0)
	return a.Source == nil
}

// AddCredit lets the peer send n more messages.
func (r *Receiver) AddCredit(n uint32) error {
	return r.update(func() { r.credit += n }, frames.Flow{})
}

// Drain adds n to the link's credit, and asks the peer to send what it has for that at once, and
// to drop the rest. Drained is called with the returned count when that is done. A later drain
// takes the place of one that isn't over.
func (r *Receiver) Drain(n uint32) (count uint32, err error) { return r.drain(n, nil) }

func (r *Receiver) drain(n uint32, properties frames.Map) (count uint32, err error) {
	err = r.update(func() {
		r.credit += n
		r.draining = true
		count = r.count + r.credit
	}, frames.Flow{Properties: properties})
	return count, err
}

// The capability of links to queues whose parked messages can be claimed, and the property of the
// flow that claims them. MaxClaims is how many tokens one flow may have; for more, RabbitMQ ends
// the session.
const (
	capabilityClaims = frames.Symbol("rabbitmq:deferral-tokens")
	MaxClaims        = 256
)

// Claims reports whether the queue gives out parked messages by token: see [Receiver.Claim].
// RabbitMQ 4.4 does, for quorum queues.
func (r *Receiver) Claims() bool {
	return slices.Contains(r.Attached().Capabilities, capabilityClaims)
}

// Claim is Drain, and claims the messages that are parked under tokens, at most MaxClaims. The
// peer delivers those before all others, as far as the credit reaches, and the rest for later
// credit. It ignores unknown tokens.
func (r *Receiver) Claim(n uint32, tokens []string) (count uint32, err error) {
	if len(tokens) == 0 {
		return r.drain(n, nil)
	}
	all := frames.Array{Type: frames.CodeString32, Elements: make([]any, len(tokens))}
	for i, t := range tokens {
		all.Elements[i] = t
	}
	return r.drain(n, frames.Map{{Key: capabilityClaims, Value: all}})
}

// Flow sends the link's current credit, with properties.
func (r *Receiver) Flow(properties frames.Map) error {
	return r.update(func() {}, frames.Flow{Properties: properties})
}

func (r *Receiver) update(change func(), f frames.Flow) error {
	c := r.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := r.gone(); err != nil {
		return err
	}
	credit, draining := r.credit, r.draining
	change()
	f.Handle, f.DeliveryCount, f.LinkCredit = frames.Some(r.handle), frames.Some(r.count), frames.Some(r.credit)
	f.Drain = r.draining
	err := r.s.put(r.s.windows(&f))
	if err != nil {
		r.credit, r.draining = credit, draining
	}
	return err
}

// Credit is how many messages the peer may still send.
func (r *Receiver) Credit() uint32 {
	r.s.c.mu.Lock()
	defer r.s.c.mu.Unlock()
	return r.credit
}

// Outcome is how a delivery is settled.
type Outcome struct {
	kind  outcomeKind
	state frames.Modified // of modified with annotations

	rejected bool
	error    *frames.Error
}

type outcomeKind uint8

const (
	kindAccepted outcomeKind = iota
	kindReleased
	kindModified // and three more, by its two flags
	kindModifiedFailed
	kindModifiedUndeliverable
	kindModifiedFailedUndeliverable
	kindAlone // can't be joined with others
)

// The outcomes without content.
var (
	Accepted = Outcome{kind: kindAccepted}
	Released = Outcome{kind: kindReleased}
)

// Modified is the outcome of that name. With annotations it isn't joined with others.
func Modified(deliveryFailed, undeliverableHere bool, annotations frames.Map) Outcome {
	o := Outcome{kind: kindModified, state: frames.Modified{DeliveryFailed: deliveryFailed, UndeliverableHere: undeliverableHere, Annotations: annotations}}
	if deliveryFailed {
		o.kind++
	}
	if undeliverableHere {
		o.kind += 2
	}
	if len(annotations) > 0 {
		o.kind = kindAlone
	}
	return o
}

// Rejected is the outcome of that name; e may be nil.
func Rejected(e *frames.Error) Outcome { return Outcome{kind: kindAlone, rejected: true, error: e} }

// performative is the delivery state to send.
func (o *Outcome) performative() any {
	switch {
	case o.rejected:
		return &frames.Rejected{Error: o.error}
	case o.kind == kindAlone:
		return &o.state
	}
	return o.kind.state()
}

// state is the delivery state of a kind that can be joined.
func (k outcomeKind) state() any {
	switch k {
	case kindAccepted:
		return &frames.Accepted{}
	case kindReleased:
		return &frames.Released{}
	}
	flags := k - kindModified
	return &frames.Modified{DeliveryFailed: flags&1 != 0, UndeliverableHere: flags&2 != 0}
}

// Settle settles the deliveries from first to last. It returns when that is in the buffer:
// the peer confirms nothing. Those among them that are settled stay so. It returns an *[Error]
// if the link has ended: then the peer delivers them again; and [ErrTooLarge] for an outcome that
// doesn't fit into a frame.
func (r *Receiver) Settle(first, last uint32, o Outcome) error {
	s, c := r.s, r.s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := r.gone(); err != nil {
		return err
	}
	if o.kind == kindAlone {
		err := s.put(&frames.Disposition{Role: frames.RoleReceiver, First: first, Last: frames.Some(last), Settled: frames.Some(true), State: o.performative()})
		if err == nil {
			c.note(first, last)
		}
		return err
	}
	if s.settled.add(first, last, o.kind) {
		s.writeSettled()
	}
	if !s.marked {
		s.marked = true
		c.out.settling = append(c.out.settling, s)
	}
	c.out.kick()
	return nil
}

// flow takes the end of a drain, and the link's properties.
func (r *Receiver) flow(f *frames.Flow) {
	c := r.s.c
	if r.draining && f.LinkCredit.Or(0) == 0 && f.DeliveryCount.Set && f.DeliveryCount.Value == r.count+r.credit {
		r.draining, r.credit, r.count = false, 0, f.DeliveryCount.Value
		c.events = append(c.events, event{kind: eventDrained, r: r, first: r.count})
	}
	if len(f.Properties) > 0 {
		c.events = append(c.events, event{kind: eventLinkFlow, r: r, state: f.Properties})
	}
	if f.Echo {
		_ = r.s.put(r.s.windows(&frames.Flow{Handle: frames.Some(r.handle), DeliveryCount: frames.Some(r.count), LinkCredit: frames.Some(r.credit), Drain: r.draining}))
	}
}

// Taken makes room for more deliveries: the payloads of so many bytes aren't kept any more. See
// [SessionConfig.MaxBytes].
func (r *Receiver) Taken(bytes int) {
	s := r.s
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	n := min(int64(bytes), r.untaken)
	r.untaken -= n
	s.untaken -= n
	s.grant()
}

func (r *Receiver) lost(*Error) {
	r.forget()
	r.s.untaken -= r.untaken // nobody says that it was taken
	r.untaken = 0
	r.s.grant()
}

// forget drops the delivery that has begun to arrive. It is called with mu held.
func (r *Receiver) forget() {
	if r.begun {
		r.s.partial -= int64(len(r.current.Payload))
		r.begun, r.current = false, Delivery{}
	}
}

// transfer takes one frame of a delivery. It is called with mu held.
func (r *Receiver) transfer(t *frames.Transfer, payload []byte) *violation {
	if r.err != nil || r.detaching { // it was sent before the peer read the detach
		return nil
	}
	if !r.begun {
		switch {
		case !t.DeliveryID.Set:
			return broken(ScopeLink, condInvalid, "a transfer without a delivery-id")
		case r.credit == 0:
			return broken(ScopeLink, condCredit, "more messages than the link's credit")
		}
		r.credit--
		r.count++
		if !t.More && !t.Aborted { // most deliveries have one frame
			if uint64(len(payload)) > r.cfg.MaxMessageSize {
				return broken(ScopeLink, condSize, "a message of %d bytes, above the maximum of %d", len(payload), r.cfg.MaxMessageSize)
			}
			r.delivered(Delivery{ID: t.DeliveryID.Value, Tag: t.DeliveryTag, Settled: t.Settled.Or(false), Payload: payload[:min(len(payload), int(r.cfg.MaxKept))], Size: uint64(len(payload))})
			return nil
		}
		r.begun, r.current = true, Delivery{ID: t.DeliveryID.Value, Tag: append([]byte(nil), t.DeliveryTag...), Owned: true}
	} else if t.DeliveryID.Set && t.DeliveryID.Value != r.current.ID {
		return broken(ScopeLink, condInvalid, "delivery %d begins within delivery %d", t.DeliveryID.Value, r.current.ID)
	}
	d := &r.current
	d.Settled = d.Settled || t.Settled.Or(false)
	if t.Aborted {
		r.forget()
		return nil
	}
	if d.Size+uint64(len(payload)) > r.cfg.MaxMessageSize {
		return broken(ScopeLink, condSize, "a message of more than %d bytes", r.cfg.MaxMessageSize)
	}
	r.keep(payload)
	if !t.More {
		whole := *d
		r.forget()
		r.delivered(whole)
	}
	return nil
}

// keep adds the payload of a transfer to the delivery that arrives, or drops what is above MaxKept.
func (r *Receiver) keep(payload []byte) {
	d := &r.current
	had := len(d.Payload)
	switch {
	case d.Size > uint64(had): // too large already
	case d.Size+uint64(len(payload)) <= r.cfg.MaxKept:
		d.Payload = append(d.Payload, payload...)
	default:
		first := min(uint64(max(had, len(payload))), r.cfg.MaxKept, uint64(r.s.c.maxFrame))
		d.Payload = append([]byte(nil), append(d.Payload, payload...)[:first]...)
	}
	d.Size += uint64(len(payload))
	r.s.partial += int64(len(d.Payload) - had)
}

// delivered has the link's callback called. It is called with mu held.
func (r *Receiver) delivered(d Delivery) {
	if r.s.maxBytes > 0 {
		r.untaken += int64(len(d.Payload))
		r.s.untaken += int64(len(d.Payload))
	}
	c := r.s.c
	c.deliveries = append(c.deliveries, d)
	c.events = append(c.events, event{kind: eventMessageDelivered, r: r, at: len(c.deliveries) - 1})
}
