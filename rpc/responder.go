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
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
)

// ResponderConfig configures a [Responder]. The zero value is ready to use.
type ResponderConfig struct {
	// Codec decodes requests and encodes replies. A Req of type *client.Message is the request's
	// message, and a reply of that type is sent unchanged. Default: client.JSONCodec.
	Codec client.Codec
	// ReplyTimeout is how long the broker may take to accept a reply. After that the request
	// returns to its queue and is handled again, which is no failed attempt. Default: 30 s.
	ReplyTimeout time.Duration
	// Allow reports whether a reply may go to an address. The sender of a request chooses the
	// address, and the reply is sent with this connection's permissions. So without Allow, anyone
	// who may send a request could write to any queue. A reply to another address is dropped,
	// counted as Unclaimed, and logged. Default: [IsReplyQueue].
	//
	// A reply to the queue that the request came from is always dropped, because it would be the
	// next request.
	Allow func(to address.Address) bool
}

// lastWords limits the time for the error reply of a dead-lettered request. It is sent even if
// the handler's ctx is done.
const lastWords = 5 * time.Second

// ResponderStats are the counts of a [Responder] since it was made.
type ResponderStats struct {
	// Replied counts the replies that the broker has accepted, Errors those of them that are an
	// Error, and GivenUp those that are a GivenUpError. The broker accepts every direct reply,
	// even if its requester is gone.
	Replied, Errors, GivenUp uint64
	// Unclaimed counts replies that couldn't be delivered: the reply queue is gone, full, or
	// refused, or the reply-to isn't a valid or allowed address. Their requests are acknowledged
	// anyway.
	Unclaimed uint64
	// Unwanted counts requests without a reply-to. They were handled.
	Unwanted uint64
	// Expired counts requests that weren't handled, because they had expired while they waited
	// for a retry.
	Expired uint64
}

// Responder sends the replies of handlers made by [Respond]. It is safe for concurrent use by any
// number of handlers, and survives the loss of its connection. It uses one session of the Conn.
type Responder struct {
	codec   client.Codec
	timeout time.Duration
	allow   func(address.Address) bool
	log     atomic.Pointer[slog.Logger] // of the first consumer; nil: none has started
	publish *client.Publisher[any]

	replied, errors, givenUp, unclaimed, unwanted, expired atomic.Uint64
}

// NewResponder opens a responder. The errors are those of client.NewPublisher, and an
// *argument.Error if cfg is invalid.
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

// replyQueues start the names of queues that are made for replies.
var replyQueues = []string{
	queuePrefix,
	"amq.",        // RabbitMQ's own names: direct reply-to, and queues that it has named
	"client.gen-", // the official AMQP 1.0 clients'
}

// IsReplyQueue reports whether an address is that of a queue for replies: RabbitMQ's direct
// reply-to, the queue of a [Requester] or of an official AMQP 1.0 client, or a queue that the
// broker has named, as AMQP 0-9-1 clients use. If your callers' reply queues have other names,
// set [ResponderConfig.Allow]:
//
//	Allow: func(to address.Address) bool { return rpc.IsReplyQueue(to) || to == address.Queue("answers") },
func IsReplyQueue(to address.Address) bool {
	return to.IsQueue() && slices.ContainsFunc(replyQueues, func(prefix string) bool { return strings.HasPrefix(to.QueueName(), prefix) })
}

// Stats returns the counts of the responder.
func (r *Responder) Stats() ResponderStats {
	return ResponderStats{
		Replied: r.replied.Load(), Errors: r.errors.Load(), GivenUp: r.givenUp.Load(),
		Unclaimed: r.unclaimed.Load(), Unwanted: r.unwanted.Load(), Expired: r.expired.Load(),
	}
}

// Close waits until the replies in flight are confirmed, or until ctx is done, and closes the
// responder: see client.Publisher.Close. Stop the consumers with its handlers first.
func (r *Responder) Close(ctx context.Context) error { return r.publish.Close(ctx) }

// Respond returns a handler that decodes a request, calls handle, and sends the result to the
// request's reply-to. It acknowledges the request after the broker has accepted the reply. So a
// request is handled at least once.
//
// The result of handle decides:
//
//	a value, nil           the reply
//	an *Error              an error reply; the request is acknowledged
//	a client.Outcome       carried out unchanged; if it dead-letters the request, the caller
//	                       gets a GivenUpError first
//	any other error        left to the middleware around: retry.With retries the request, and
//	                       if it dead-letters it, the caller gets a GivenUpError first
//
// Edge cases:
//
//   - A request that can't be decoded is dead-lettered with client.ReasonUndecodable.
//   - A request whose reply can't be encoded, or is too large, is dead-lettered with
//     client.ReasonUnsendable, and the caller gets an error: a retry would fail again.
//   - The caller learns only of dead letters that middleware reports with Delivery.Report, as
//     retry.With does. Without retry.With, it doesn't learn of a panic, or of a request that is
//     requeued until its delivery limit. Its call then lasts until its ctx is done.
//   - A request without a reply-to is handled, and its reply dropped.
//   - A request that expired while it waited for a retry isn't handled, by the clock of this
//     host. Its caller gets a GivenUpError, and it is acknowledged.
func Respond[Req, Resp any](r *Responder, handle func(ctx context.Context, req Req) (Resp, error)) client.Handler {
	h := &responding{responder: r}
	switch {
	case r == nil:
		h.invalid = argument.New("responder", nil, "is nil", "use the result of NewResponder")
		return h
	case handle == nil:
		h.invalid = argument.New("handle", nil, "is nil", "pass a function")
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

// asError finds an Error that handle has returned. An Outcome around it takes precedence.
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
	// Middleware decides what happens after an error, after Handle has returned.
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

// expired returns for how long a request has been expired, by this host's clock. The broker
// handles the expiry of a request with its ttl. A copy for a retry has no ttl, since it would
// expire in a delay queue.
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

// giveUp notifies the caller that its request isn't retried any more, if that is possible.
func (r *Responder) giveUp(ctx context.Context, d *client.Delivery, reason client.Reason, why error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(lastWords, r.timeout))
	defer cancel()
	text := ""
	if why != nil {
		text = client.ErrorText(why)
	}
	_ = r.reply(ctx, d, errorReply(propertyGivenUp, word(string(reason), "rejected"), text), &r.givenUp)
}

// reply sends v to d's reply-to, if it has one. An error means that the broker may not have the
// reply, and that another attempt can help. kind, if not nil, counts it.
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
	handling := ctx
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	id := p.CorrelationID
	if id == nil {
		id = p.MessageID
	}
	err = r.publish.Publish(ctx, v, func(m *client.Message) {
		// A reply doesn't have to survive a restart: its caller waits for seconds.
		m.Header = &client.Header{Priority: 4}
		properties(m).CorrelationID = id
		client.PublishTo(to)(m)
	})
	switch {
	case err == nil:
		if kind != nil {
			kind.Add(1)
		}
		r.replied.Add(1)
		return nil
	case errors.Is(err, client.ErrUnroutable), errors.Is(err, client.ErrNotFound), errors.Is(err, client.ErrRefused), errors.Is(err, client.ErrUnauthorized):
		r.unclaimed.Add(1)
		return nil
	case errors.Is(err, client.ErrTooLarge), errors.As(err, new(*argument.Error)):
		return client.DeadLetter{Reason: client.ReasonUnsendable, Err: err}
	case errors.Is(ctx.Err(), context.DeadlineExceeded) && handling.Err() == nil:
		// The handler hasn't failed. In an alarm, retries would end with a dead letter of a request that succeeds each time.
		return client.Requeue{Err: err}
	}
	return err
}

// logForbidden logs a reply that isn't allowed. The consumer's logger limits these lines. The
// address isn't "to", so that a client can't make a line for each by asking for many.
func (r *Responder) logForbidden(d *client.Delivery, to address.Address) {
	log := r.log.Load()
	if log == nil {
		return
	}
	why := "ResponderConfig.Allow refused the address"
	if to == address.Queue(d.Queue()) {
		why = "the reply would be the next request in this queue"
	}
	log.Warn("hopback: a reply was dropped: "+why, "queue", d.Queue(), "message_id", message.ID(d.Message()), "reply_to", to.String())
}

// replyAddress parses a reply-to. RabbitMQ 4.0 passes on that of an AMQP 0-9-1 client unchanged:
// a queue's name.
func replyAddress(s string) (address.Address, error) {
	if !strings.HasPrefix(s, "/") {
		to := address.Queue(s)
		return to, to.Validate()
	}
	return address.Parse(s)
}
