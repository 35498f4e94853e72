package rpc

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/outcome"
)

// ResponderConfig configures a Responder. The zero value is ready to use.
type ResponderConfig struct {
	// Codec decodes requests and encodes replies. A Req that is a *client.Message is the
	// request as it came, and a reply of that type is sent as it is. Default:
	// client.JSONCodec.
	Codec client.Codec
	// ReplyTimeout is how long a reply may take until the broker has it. After that the
	// request isn't accepted, and handled again. Default: 30 s.
	ReplyTimeout time.Duration
	// Allow, if not nil, reports whether a reply may go to an address. The sender of a
	// request chooses the address, and the reply is sent with this connection's permissions:
	// without Allow, anyone who may send a request could write to any queue. A reply to
	// another address is dropped, counted as Unclaimed, and logged. So is a reply to the
	// queue that the request came from, even if Allow allows it: it would be the next request.
	// Default: IsReplyQueue.
	Allow func(to address.Address) bool
}

// lastWords is how long the error reply of a request that is given up may take. It is sent
// even if the handler's ctx has ended.
const lastWords = 5 * time.Second

// ResponderStats are the numbers of a Responder since it was made.
type ResponderStats struct {
	// Replied counts the replies that the broker has accepted, Errors those of them that are
	// an Error, and GivenUp those that are a GivenUpError. The broker accepts every direct
	// reply, whether its requester is there or not.
	Replied, Errors, GivenUp uint64
	// Unclaimed counts replies that could go nowhere: the reply queue is gone, full or
	// refused, or the reply-to isn't an address or isn't allowed. Their requests are accepted all the same.
	Unclaimed uint64
	// Unwanted counts requests without a reply-to. They were handled.
	Unwanted uint64
	// Expired counts requests that weren't handled, since they had expired while they waited
	// for a retry.
	Expired uint64
}

// Responder sends the replies of handlers made by Respond. It is safe for concurrent use, by
// any number of handlers, and survives the loss of its connection. It takes one session of
// the Conn.
type Responder struct {
	codec    client.Codec
	timeout  time.Duration
	allow    func(address.Address) bool
	log      atomic.Pointer[slog.Logger] // of the first consumer; nil: none has started
	notified atomic.Int64                // when a forbidden reply was logged last, in Unix nanoseconds
	publish  *client.Publisher[any]

	replied, errors, givenUp, unclaimed, unwanted, expired atomic.Uint64
}

// NewResponder opens a responder. The errors are those of client.NewPublisher, and an
// *argument.Error if cfg can't be used.
func NewResponder(ctx context.Context, conn *client.Conn, cfg ResponderConfig) (*Responder, error) {
	if conn == nil {
		return nil, argument.New("conn", nil, "is a nil *Conn", "use the result of client.Connect")
	}
	if cfg.ReplyTimeout < 0 {
		return nil, argument.At(argument.Root("ResponderConfig").Field("ReplyTimeout"), argument.CodeOutOfRange, cfg.ReplyTimeout, "is negative", "use a positive duration, or 0 for the default")
	}
	r := &Responder{codec: cfg.Codec, timeout: cfg.ReplyTimeout, allow: cfg.Allow}
	if r.codec == nil {
		r.codec = client.JSONCodec{}
	}
	if r.timeout == 0 {
		r.timeout = 30 * time.Second
	}
	if r.allow == nil {
		r.allow = IsReplyQueue
	}
	var err error
	if r.publish, err = client.NewPublisher[any](ctx, conn, address.Address{}, client.PublisherConfig{Codec: r.codec, Copies: true}); err != nil {
		return nil, err
	}
	return r, nil
}

// replyQueues begin the names of queues that are made for replies.
var replyQueues = []string{
	queuePrefix,
	"amq.",        // RabbitMQ's own names: direct reply-to, and queues that it has named
	"client.gen-", // the official AMQP 1.0 clients'
}

// IsReplyQueue reports whether an address is that of a queue that was made for replies: of
// direct reply-to, of a Requester, of the official AMQP 1.0 clients, or a queue that the
// broker has named, as AMQP 0-9-1 clients have them. Callers whose reply queues have other
// names need ResponderConfig.Allow:
//
//	Allow: func(to address.Address) bool { return rpc.IsReplyQueue(to) || to == address.Queue("answers") },
func IsReplyQueue(to address.Address) bool {
	return to.IsQueue() && slices.ContainsFunc(replyQueues, func(prefix string) bool { return strings.HasPrefix(to.QueueName(), prefix) })
}

// Stats returns the responder's numbers.
func (r *Responder) Stats() ResponderStats {
	return ResponderStats{
		Replied: r.replied.Load(), Errors: r.errors.Load(), GivenUp: r.givenUp.Load(),
		Unclaimed: r.unclaimed.Load(), Unwanted: r.unwanted.Load(), Expired: r.expired.Load(),
	}
}

// Close waits within ctx until the replies under way are answered, and closes the responder:
// see client.Publisher.Close. Consumers with its handlers should have ended before.
func (r *Responder) Close(ctx context.Context) error { return r.publish.Close(ctx) }

// Respond returns a Handler that decodes a request, calls handle, and sends the result to the
// request's reply-to. The request is accepted after the broker has accepted the reply. So a
// request may be handled twice, and never not at all.
//
// The result of handle decides:
//
//	a value, nil           the reply
//	an *Error              an error reply; the request is accepted
//	a client.Outcome       carried out unchanged. A dead letter is told to the caller before
//	any other error        left to the middleware around: retry.With retries it, and if it
//	                       gives the request up, the caller is told before
//
// A body that can't be decoded is a dead letter with client.ReasonUndecodable. The caller
// learns of deaths that middleware reports with Delivery.Report, as retry.With does. It
// doesn't learn of others: without retry.With, a panic, or a request that goes back to its
// queue until the delivery limit. Its call then ends with its ctx.
//
// A request without a reply-to is handled, and its reply dropped. A reply that can't be
// encoded, or is too large, would fail again: its request is a dead letter with
// ReasonUnsendable, and the caller gets an error.
//
// A request that expired while it waited for a retry isn't handled, by the clock of this
// host. Its caller is told, and it is accepted.
func Respond[Req, Resp any](r *Responder, handle func(ctx context.Context, req Req) (Resp, error)) client.Handler {
	h := &responding{responder: r}
	switch {
	case r == nil:
		h.invalid = argument.New("responder", nil, "is nil", "use the result of NewResponder")
		return h
	case handle == nil:
		h.invalid = argument.New("handle", nil, "is nil", "give the handler a function")
		return h
	}
	if c, ok := r.codec.(client.TypeChecker); ok {
		if t := reflect.TypeFor[Resp](); t != reflect.TypeFor[*client.Message]() && t.Kind() != reflect.Interface {
			if err := c.CheckEncode(t); err != nil {
				h.invalid = argument.New("Resp", t.String(), "can't be encoded", "use another type, or another Codec").Because(err)
			}
		}
	}
	answer := func(ctx context.Context, req Req) error {
		resp, err := handle(ctx, req)
		d, _ := client.DeliveryFrom(ctx)
		if err == nil {
			return r.reply(ctx, d, resp, nil)
		}
		if e, ok := asError(err); ok {
			return r.reply(ctx, d, errorReply(propertyError, word(e.Code, "error"), e.Text), &r.errors)
		}
		return err
	}
	if reflect.TypeFor[Req]() == reflect.TypeFor[*client.Message]() {
		h.inner = client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			return answer(ctx, any(d.Message()).(Req))
		})
		return h
	}
	h.inner = client.Typed(r.codec, answer)
	return h
}

// asError finds an Error that handle has returned. An Outcome around it counts more.
func asError(err error) (e *Error, ok bool) {
	if _, decided := outcome.Find[client.Outcome](err); decided {
		return nil, false
	}
	e, ok = outcome.Find[*Error](err)
	return e, ok && e != nil
}

type responding struct {
	responder *Responder
	inner     client.Handler
	invalid   error
}

func (h *responding) Prepare(ctx context.Context, s client.Start) error {
	if h.invalid != nil {
		return h.invalid
	}
	h.responder.log.CompareAndSwap(nil, s.Log)
	return client.Prepare(ctx, h.inner, s)
}

func (h *responding) Handle(ctx context.Context, d *client.Delivery) error {
	if h.invalid != nil {
		return client.Requeue{Failed: true, Err: h.invalid}
	}
	r := h.responder
	if by := expired(d.Message(), time.Now()); by > 0 {
		r.expired.Add(1)
		r.giveUp(ctx, d, ReasonExpired, errors.New("the request expired "+by.Round(time.Millisecond).String()+" ago"))
		return nil
	}
	notified := false
	notify := func(reason client.Reason, err error) {
		if !notified {
			notified = true
			r.giveUp(ctx, d, reason, err)
		}
	}
	// What becomes of an error is decided outside, after Handle has returned.
	d.OnReport(func(x instrument.Decision) {
		switch x.Kind {
		case instrument.DecisionDeadLetter:
			notify(client.Reason(x.Reason), x.Err)
		case instrument.DecisionDiscard:
			notify(ReasonDiscarded, x.Err)
		}
	})
	inner := ctx
	if _, ok := client.DeliveryFrom(ctx); !ok { // a test
		inner = client.WithDelivery(ctx, d)
	}
	err := h.inner.Handle(inner, d)
	switch o := client.OutcomeOf(err).(type) {
	case client.DeadLetter:
		notify(o.Reason, o.Err)
	case client.Modify:
		if o.DeadLetter {
			notify("", o.Err)
		}
	}
	return err
}

// expired returns for how long a request has expired, by this host's clock. The broker sees to
// the expiry of a request that has its ttl. A retry by a copy has none, since it would end in
// a delay queue.
func expired(m *client.Message, now time.Time) time.Duration {
	if m.Header != nil && m.Header.TTL > 0 || m.Properties == nil || m.Properties.AbsoluteExpiryTime == nil {
		return 0
	}
	return now.Sub(*m.Properties.AbsoluteExpiryTime)
}

// errorReply is a reply that is an error.
func errorReply(property, value, text string) *client.Message {
	m := client.NewMessage([]byte(client.ErrorText(errors.New(text))))
	m.Properties.ContentType = new("text/plain; charset=utf-8")
	m.ApplicationProperties = map[string]any{property: value}
	return m
}

// giveUp tells the caller that its request is given up, as far as that can be told.
func (r *Responder) giveUp(ctx context.Context, d *client.Delivery, reason client.Reason, why error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(lastWords, r.timeout))
	defer cancel()
	text := ""
	if why != nil {
		text = client.ErrorText(why)
	}
	_ = r.reply(ctx, d, errorReply(propertyGivenUp, word(string(reason), "rejected"), text), &r.givenUp)
}

// reply sends v to d's reply-to, if it has one. An error means that the broker may not have
// the reply, and that it can come to have it. kind, if not nil, counts it.
func (r *Responder) reply(ctx context.Context, d *client.Delivery, v any, kind *atomic.Uint64) error {
	p := d.Message().Properties
	if p == nil || p.ReplyTo == nil || *p.ReplyTo == "" {
		r.unwanted.Add(1)
		return nil
	}
	to, err := replyAddress(*p.ReplyTo)
	if err != nil {
		r.unclaimed.Add(1)
		return nil
	}
	if to == address.Queue(d.Queue()) || !r.allow(to) {
		r.unclaimed.Add(1)
		r.logForbidden(d, to)
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	id := p.CorrelationID
	if id == nil {
		id = p.MessageID
	}
	err = r.publish.Publish(ctx, v, func(m *client.Message) {
		// A reply needn't outlive a restart: its caller waits for seconds.
		m.Header = &client.Header{Priority: 4}
		properties(m).CorrelationID = id
		client.PublishTo(to)(m)
	})
	switch {
	case err == nil:
		r.replied.Add(1)
		if kind != nil {
			kind.Add(1)
		}
		return nil
	case errors.Is(err, client.ErrUnroutable), errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrRefused), errors.Is(err, client.ErrUnauthorized):
		r.unclaimed.Add(1)
		return nil
	case errors.Is(err, client.ErrTooLarge), errors.As(err, new(*argument.Error)):
		return client.DeadLetter{Reason: ReasonUnsendable, Err: err}
	}
	return err
}

// logForbidden logs a reply that may not be sent, at most once a minute.
func (r *Responder) logForbidden(d *client.Delivery, to address.Address) {
	now := time.Now().UnixNano()
	last := r.notified.Load()
	log := r.log.Load()
	if log == nil || now-last < int64(time.Minute) || !r.notified.CompareAndSwap(last, now) {
		return
	}
	why := "ResponderConfig.Allow doesn't allow the address"
	if to == address.Queue(d.Queue()) {
		why = "the reply would be the next request in this queue"
	}
	log.Warn("hopback: a reply was dropped: "+why, "queue", d.Queue(), "to", to.String())
}

// replyAddress reads a reply-to. RabbitMQ 4.0 hands on that of an AMQP 0-9-1 client as it is: a
// queue's name.
func replyAddress(s string) (address.Address, error) {
	if !strings.HasPrefix(s, "/") {
		to := address.Queue(s)
		return to, to.Validate()
	}
	return address.Parse(s)
}
