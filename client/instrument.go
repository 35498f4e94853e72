package client

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
)

// Instrument follows what a Conn sends and handles, for traces and metrics. Package
// hopbackotel has one for OpenTelemetry. Set it as Config.Instrument.
//
// Its methods, and those of what they return, are called for every message, by the
// goroutines that carry it. They must be quick, must not block, must not call the Conn
// and must not end their goroutine (runtime.Goexit). They are called concurrently for
// different messages. A panic is logged and has no effect on the message.
//
// An Instrument should embed NoInstrument. Later versions may add methods.
type Instrument interface {
	// Connect is called once, by the function Connect, when the Conn is made. stats
	// returns its numbers at any time, and may be called from any goroutine, but not during
	// a call of the Instrument. The result, unless it is nil, is called when the Conn is
	// closed.
	Connect(stats func() Stats) (closed func())
	// Publish is called for a message of Publisher.Publish before it is checked and sent.
	// ctx is the caller's. The result may be nil.
	Publish(ctx context.Context, s Sending) Publication
	// PublishAll is called for a call of Publisher.PublishAll with n messages. to is the
	// publisher's address, or the zero Address if each message names its own. The result
	// may be nil.
	PublishAll(ctx context.Context, to address.Address, n int) Batch
	// Handle is called before a delivery's handler. The handler gets the ctx that is
	// returned, which must be made of ctx; a nil one counts as ctx. The Handling may be
	// nil.
	Handle(ctx context.Context, d *Delivery) (context.Context, Handling)
	// SettledRange is called for each settlement frame that is written, with the number of
	// deliveries that it settles. Settlements of neighbours with the same outcome are one
	// frame.
	SettledRange(n int)
}

// NoInstrument is an Instrument that does nothing. Embed it in your own, to leave methods
// out.
type NoInstrument struct{}

// Connect does nothing.
func (NoInstrument) Connect(func() Stats) func() { return nil }

// Publish does nothing.
func (NoInstrument) Publish(context.Context, Sending) Publication { return nil }

// PublishAll does nothing.
func (NoInstrument) PublishAll(context.Context, address.Address, int) Batch { return nil }

// Handle does nothing.
func (NoInstrument) Handle(ctx context.Context, _ *Delivery) (context.Context, Handling) {
	return ctx, nil
}

// SettledRange does nothing.
func (NoInstrument) SettledRange(int) {}

// Stats are the numbers of a Conn at one moment. See also Conn.State.
type Stats struct {
	// Connections is how many AMQP connections are up, and Sessions how many sessions of
	// consumers, publishers and forwards are open on them.
	Connections, Sessions int
	// Lost counts the AMQP connections that were lost, and Rebuilt those that were made
	// again, since Connect.
	Lost, Rebuilt uint64
	// Blocked is for how long the broker has accepted no messages since Connect, because of
	// alarms: the sum over all connections. BlockedNow is how many are blocked now.
	Blocked    time.Duration
	BlockedNow int
	// Consumers, Publishers and Requesters are those that live, ordered by queue and by
	// address.
	Consumers  []ConsumerStats
	Publishers []PublisherStats
	Requesters []RequesterStats
}

// ConsumerStats are the numbers of a call of Consume, or of stream.Consume, at one moment.
type ConsumerStats struct {
	Queue string
	// Up reports whether the consumer has a link to its queue, and Since when that last
	// changed. A link that is moved to another session stays up.
	Up    bool
	Since time.Time
	// Err is why there is no link: first the error that ended it, then that of the last
	// attempt to open it again. ErrNotFound means that the queue is gone. It is nil while
	// Up is true, and while the first link is being opened.
	Err error
	// Handling is how many handlers run, of Concurrency at most. Oldest is when the first of
	// these began, and Newest when the last did. Both are zero if none runs.
	Handling, Concurrency int
	Oldest, Newest        time.Time
	// Window is the most deliveries that the consumer holds now: Prefetch, or less, if it is
	// slowed down.
	Window int
	// Unsettled is how many deliveries it holds. Ready is how many of them wait for a
	// handler.
	Unsettled, Ready int
	// Forwarding is how many copies wait for the broker's confirmation. Stalled is how many
	// of them wait because their address accepts nothing.
	Forwarding, Stalled int
	// StalledSince is since when such an address has accepted nothing, the longest of
	// several, and StalledErr why. It is zero if there is none.
	StalledSince time.Time
	StalledErr   error
	// Delivered is when the last delivery came. It is zero if none has come on this link.
	Delivered time.Time
}

// PublisherStats are the numbers of a Publisher at one moment.
type PublisherStats struct {
	// To is the publisher's address, or the zero Address if each message names its own.
	To address.Address
	// Queued is how many messages wait to be sent, and Unconfirmed how many were sent and
	// have no answer.
	Queued, Unconfirmed int
}

// RequesterStats are the numbers of an rpc.Requester at one moment. Its publisher is among
// Stats.Publishers.
type RequesterStats struct {
	// To is where it sends its requests to.
	To address.Address
	// Up reports whether it can receive replies, and Since when that last changed. Err is why
	// it can't.
	Up    bool
	Since time.Time
	Err   error
	// Waiting is how many calls wait for their replies.
	Waiting int
}

// hooks calls an Instrument. A nil *hooks calls nothing. Callers on the way of a message
// ask for nil themselves, so that it costs a comparison.
type hooks struct {
	in     Instrument
	log    *slog.Logger
	server atomic.Pointer[string] // see Sending.Server
}

// connected notes the endpoint that the Conn has connected to.
func (h *hooks) connected(server string) {
	if h != nil {
		h.server.Store(&server)
	}
}

func newHooks(in Instrument, log *slog.Logger) *hooks {
	if in == nil {
		return nil
	}
	return &hooks{in: in, log: log}
}

func (h *hooks) connect(stats func() Stats) (closed func()) {
	if h == nil {
		return nil
	}
	defer caught(h.log, "Connect")
	return h.in.Connect(stats)
}

func (h *hooks) closed(closed func()) {
	if closed != nil {
		defer caught(h.log, "Connect's result")
		closed()
	}
}

func (h *hooks) publish(ctx context.Context, s Sending) Publication {
	defer caught(h.log, "Publish")
	return h.in.Publish(ctx, s)
}

func (h *hooks) published(p Publication, err error) {
	if p != nil {
		defer caught(h.log, "Publication.Published")
		p.Published(err)
	}
}

func (h *hooks) publishAll(ctx context.Context, to address.Address, n int) Batch {
	if h == nil {
		return nil
	}
	defer caught(h.log, "PublishAll")
	return h.in.PublishAll(ctx, to, n)
}

func (h *hooks) publishOf(b Batch, s Sending) Publication {
	defer caught(h.log, "Batch.Publish")
	return b.Publish(s)
}

func (h *hooks) publishedAll(b Batch, err error) {
	if b != nil {
		defer caught(h.log, "Batch.Published")
		b.Published(err)
	}
}

// settledRange is nil where nobody is told.
func (h *hooks) settledRange() func(n int) {
	if h == nil {
		return nil
	}
	return func(n int) {
		defer caught(h.log, "SettledRange")
		h.in.SettledRange(n)
	}
}

// handle returns the ctx for d's handler.
func (h *hooks) handle(ctx context.Context, d *Delivery) (with context.Context) {
	with = ctx
	d.server = h.server.Load()
	defer caught(h.log, "Handle")
	inner, handling := h.in.Handle(ctx, d)
	if inner != nil {
		with = inner
	}
	if handling != nil {
		d.observed.Store(&observed{handling, h.log, with, d.server})
	}
	return with
}
