package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Replies is how replies reach a requester. See [RequesterConfig.Replies]. The zero value means
// RepliesAuto.
type Replies string

const (
	// RepliesAuto is RepliesDirect if the broker supports it, and RepliesByQueue otherwise. It is
	// decided at each new connection.
	RepliesAuto Replies = "auto"
	// RepliesDirect is RabbitMQ's direct reply-to (4.2 and later). There is no queue: the broker
	// passes a reply from the responder's session to the requester's. If the requester's
	// connection is lost, so are its replies.
	RepliesDirect Replies = "direct"
	// RepliesByQueue is a classic queue for this requester, with a random name that starts with
	// "hopback-replies-". Close deletes it, and so does the broker after 5 minutes without the
	// requester. Calls continue after a lost connection: their replies wait in the queue. The
	// user needs permission to configure, write, and read such queues.
	RepliesByQueue Replies = "queue"
)

// RequesterConfig configures a [Requester]. The zero value is ready to use.
type RequesterConfig struct {
	// Codec encodes requests and decodes replies. A request of type *client.Message is sent
	// unchanged, and a Resp of that type is the reply's message. Default: client.JSONCodec.
	Codec client.Codec
	// Timeout limits a call whose ctx has no deadline. Default: 30 s.
	Timeout time.Duration
	// Replies is how replies reach the requester. Default: RepliesAuto.
	Replies Replies
	// InFlight is how many calls may wait for their replies at once, at most 2,048, or 65,536
	// with RepliesByQueue. Further calls wait within their ctx. There is a limit because RabbitMQ
	// drops direct replies without credit. Default: 1,024.
	InFlight int
	// NoResend makes Call return ErrNoReply when its connection is lost before the reply. By
	// default Call sends the request again, with the same correlation-id and message-id, until
	// its ctx is done. The handler may then run twice. See client.PublisherConfig.NoResend.
	// Default: false.
	NoResend bool
}

const (
	defaultTimeout  = 30 * time.Second
	defaultInFlight = 1024
	maxDirect       = 2048
	maxByQueue      = 65536
	// maxTTL is the longest expiry of a request. RabbitMQ allows 49 days.
	maxTTL = 24 * 24 * time.Hour
)

func (c RequesterConfig) withDefaults() (RequesterConfig, error) {
	at := argument.Root("RequesterConfig")
	most := maxDirect
	switch c.Replies {
	case "":
		c.Replies = RepliesAuto
	case RepliesAuto, RepliesDirect:
	case RepliesByQueue:
		most = maxByQueue
	default:
		return c, argument.At(at.Field("Replies"), argument.CodeUnknown, string(c.Replies), "is unknown", "use rpc.RepliesAuto, rpc.RepliesDirect, or rpc.RepliesByQueue")
	}
	switch {
	case c.Timeout < 0:
		return c, argument.At(at.Field("Timeout"), argument.CodeOutOfRange, c.Timeout, "is negative", "use a positive duration, or 0 for the default")
	case c.InFlight < 0 || c.InFlight > most:
		return c, argument.At(at.Field("InFlight"), argument.CodeOutOfRange, c.InFlight, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default", most))
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.InFlight == 0 {
		c.InFlight = defaultInFlight
	}
	if c.Codec == nil {
		c.Codec = client.JSONCodec{}
	}
	return c, nil
}

// Stats are the counts of a [Requester] since it was made.
type Stats struct {
	// Calls counts the calls whose request was passed to the publisher, Replies those that got a
	// reply, including error replies.
	Calls, Replies uint64
	// Waiting is how many calls are waiting for their reply now.
	Waiting int
	// Resent counts requests that were sent again.
	Resent uint64
	// Late counts replies to calls that had returned without one. If the requester is closed or
	// its connection lost, the broker drops a direct reply, and it isn't counted.
	Late uint64
	// Duplicates counts further replies to calls that had one: the handler has run twice, or its
	// reply was sent twice.
	Duplicates uint64
	// Strays counts messages that aren't a reply to any of the last 4,096 calls.
	Strays uint64
}

// Requester sends requests of type Req to one address and returns replies of type Resp. It is
// safe for concurrent use, with the requests of many callers in flight at once. It survives the
// loss of its connection. It uses two sessions of the Conn: one to send, and one to receive.
type Requester[Req, Resp any] struct {
	to      string
	cfg     RequesterConfig
	publish *client.Publisher[Req]
	calls   *calls
	line    *replyReceiver

	mu     sync.Mutex
	active int           // calls in flight
	closed bool          // no new call starts
	idle   chan struct{} // closed when closed is set and active is 0
}

// NewRequester opens a requester. The address to, a queue or an exchange, is where requests go.
//
// The errors are those of client.NewPublisher, and an *argument.Error if cfg or the types are
// invalid. Without permission for a reply queue it is client.ErrUnauthorized.
func NewRequester[Req, Resp any](ctx context.Context, conn *client.Conn, to address.Address, cfg RequesterConfig) (*Requester[Req, Resp], error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if conn == nil {
		return nil, argument.New("conn", nil, "is a nil *Conn", "use the result of client.Connect")
	}
	target, err := to.Build()
	if err != nil {
		return nil, err
	}
	if t := reflect.TypeFor[Resp](); t != reflect.TypeFor[*client.Message]() {
		if c, ok := cfg.Codec.(client.TypeChecker); ok {
			if err := c.CheckDecode(t); err != nil {
				return nil, argument.New("Resp", t.String(), "can't be decoded", "use another type, or another Codec").Because(err)
			}
		}
	}
	r := &Requester[Req, Resp]{to: target, cfg: cfg, calls: newCalls(), idle: make(chan struct{})}
	// A request contains the reply address of one session, so Call resends by itself.
	r.publish, err = client.NewPublisher[Req](ctx, conn, to, client.PublisherConfig{Codec: cfg.Codec, NoResend: true})
	if err != nil {
		return nil, err
	}
	if r.line, err = newReplyReceiver(replyReceiverConfig{replies: cfg.Replies, inFlight: cfg.InFlight, conn: conn, calls: r.calls, to: to}); err == nil {
		go r.line.run()
		if err = r.line.first(ctx); err != nil {
			r.line.stop(ctx)
		}
	}
	if err != nil {
		_ = r.publish.Close(ctx)
		return nil, r.named(err)
	}
	return r, nil
}

// named adds the address to an error of this package.
func (r *Requester[Req, Resp]) named(err error) error {
	if e, ok := err.(*client.Error); ok && e.Target == "" && e.Op == "call" {
		named := *e
		named.Target = r.to
		return &named
	}
	return err
}

// Call sends req and waits for its reply until ctx is done, or for [RequesterConfig.Timeout] if
// ctx has no deadline. The request expires at the same time: if no responder has it by then, the
// broker drops it or dead-letters it.
//
// Each edit is called on the request before it is sent, and before each time it is sent again. It
// can set everything except the reply-to, the correlation-id, and the expiry. If you set a
// message-id, the responder should use this package: others may send it back as the
// correlation-id.
//
// The errors, by what is certain afterwards:
//
//	*Error               the handler has answered: it refuses the request
//	*GivenUpError        the handler has failed, and the request isn't retried any more
//	ErrUndecodable       the handler has answered, and the reply can't be decoded, or is larger
//	                     than client.Config.MaxMessageSize
//	*argument.Error      nothing was sent
//	client.ErrNotSent    nothing was sent: ctx was done first, or the requester is closed
//	client.ErrNotFound, client.ErrUnroutable, client.ErrTooLarge, client.ErrUnauthorized
//	                     no queue has the request
//	client.ErrRefused    at least one queue has refused the request
//	ErrNoReply           the request was sent, and ctx was done before the reply. Or its
//	                     connection was lost, and NoResend is set. Or the requester was
//	                     closed. Its handler may have run, or may still run until it expires
//
// client.SafeToRetry reports whether it is certain that the handler hasn't run. If a lost
// connection or a redelivery duplicates a request, the first of its replies counts.
func (r *Requester[Req, Resp]) Call(ctx context.Context, req Req, edit ...func(*client.Message)) (Resp, error) {
	var resp Resp
	if err := r.enter(); err != nil {
		return resp, err
	}
	defer r.exit()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.cfg.Timeout)
		defer cancel()
	}
	m, err := r.exchange(ctx, req, edit)
	if err != nil {
		return resp, r.named(err)
	}
	if err := errorOf(m); err != nil {
		return resp, err
	}
	if raw, ok := any(&resp).(**client.Message); ok {
		*raw = m
		return resp, nil
	}
	if err := decode(r.cfg.Codec, m, &resp); err != nil {
		var zero Resp
		return zero, fmt.Errorf("hopback: call %s: %w: %w", r.to, ErrUndecodable, err)
	}
	return resp, nil
}

// exchange sends a request, repeatedly if necessary, until it has a reply.
func (r *Requester[Req, Resp]) exchange(ctx context.Context, req Req, edit []func(*client.Message)) (*client.Message, error) {
	deadline, _ := ctx.Deadline()
	c := &call{id: rand.Text(), events: make(chan event, 2)}
	defer r.calls.leave(c)
	var before error // why the attempt before may have had an effect
	for attempt := 0; ; attempt++ {
		m, again, err := r.attempt(ctx, deadline, c, req, edit)
		switch {
		case m != nil:
			return m, r.calls.complete(c, r.to)
		case !client.SafeToRetry(err):
			before = err
		case before != nil:
			// This attempt had no effect. An earlier one may have.
			why := context.Cause(ctx)
			if why == nil {
				if why = err; errors.Is(err, client.ErrNotSent) {
					why = client.ErrConnectionLost
				}
			}
			if errors.Is(err, client.ErrClosed) {
				why = client.ErrClosed
			}
			err = r.unanswered(why)
		}
		if !again || ctx.Err() != nil {
			return nil, err
		}
		if before != nil {
			if r.cfg.NoResend {
				return nil, err
			}
			r.calls.count(func(s *Stats) { s.Resent++ })
		}
	}
}

// attempt sends the request once and waits for its reply. again reports that another attempt can
// help. A result without a reply has an error.
func (r *Requester[Req, Resp]) attempt(ctx context.Context, deadline time.Time, c *call, req Req, edit []func(*client.Message)) (reply *client.Message, again bool, err error) {
	on, link, err := r.line.await(ctx)
	if err != nil {
		return nil, false, err
	}
	defer func() { on.free <- link }()
	sending, cancel := context.WithCancel(ctx)
	defer cancel()
	if reply, ok := r.calls.enroll(c, on, cancel); reply != nil {
		return reply, false, nil
	} else if !ok {
		return nil, true, &client.Error{Op: "call", Kind: client.ErrNotSent, Err: client.ErrConnectionLost}
	}
	edits := make([]func(*client.Message), 0, 8)
	edits = append(edits, func(m *client.Message) { properties(m).MessageID = c.id })
	edits = append(edits, edit...)
	edits = append(edits, func(m *client.Message) { request(m, c.id, on.address[link], deadline) })
	sent := r.publish.Publish(sending, req, edits...)
	select {
	case e := <-c.events:
		return r.after(e, sent)
	default:
	}
	if sent != nil {
		if ctx.Err() == nil && errors.Is(sent, client.ErrOutcomeUnknown) {
			if errors.Is(sent, client.ErrClosed) {
				return nil, false, r.unanswered(client.ErrClosed)
			}
			return nil, true, r.unanswered(fmt.Errorf("%w: %w", client.ErrConnectionLost, sent))
		}
		if !client.SafeToRetry(sent) && !errors.Is(sent, client.ErrRefused) {
			return nil, false, r.unanswered(sent)
		}
		return nil, false, sent
	}
	select {
	case e := <-c.events:
		return r.after(e, nil)
	case <-ctx.Done():
		return nil, false, r.unanswered(context.Cause(ctx))
	}
}

// after is the result of an attempt that was stopped by an event.
func (r *Requester[Req, Resp]) after(e event, sent error) (*client.Message, bool, error) {
	switch {
	case e.reply != nil:
		return e.reply, false, nil
	case sent != nil && client.SafeToRetry(sent):
		return nil, !errors.Is(e.lost, client.ErrClosed), &client.Error{Op: "call", Kind: client.ErrNotSent, Err: e.lost}
	}
	return nil, !errors.Is(e.lost, client.ErrClosed), r.unanswered(e.lost)
}

// unanswered is the error of a request that was sent and has no reply.
func (r *Requester[Req, Resp]) unanswered(why error) error {
	if errors.Is(why, ErrNoReply) {
		return why
	}
	return &client.Error{Op: "call", Target: r.to, Kind: client.ErrOutcomeUnknown, Text: "the request was sent, and its handler may have run", Err: fmt.Errorf("%w: %w", ErrNoReply, why)}
}

// request makes m the request of a call.
func request(m *client.Message, id, replyTo string, deadline time.Time) {
	if m.Header == nil {
		m.Header = &client.Header{Durable: true, Priority: 4}
	}
	m.Header.TTL = min(max(time.Until(deadline), time.Millisecond), maxTTL)
	p := properties(m)
	p.ReplyTo, p.CorrelationID, p.AbsoluteExpiryTime = &replyTo, id, &deadline
}

func properties(m *client.Message) *client.Properties {
	if m.Properties == nil {
		m.Properties = &client.Properties{}
	}
	return m.Properties
}

// enter starts a call, unless the requester is closed.
func (r *Requester[Req, Resp]) enter() error {
	if r == nil {
		return argument.New("requester", nil, "is nil", "use the result of NewRequester")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return &client.Error{Op: "call", Target: r.to, Kind: client.ErrNotSent, Err: client.ErrClosed}
	}
	r.active++
	return nil
}

func (r *Requester[Req, Resp]) exit() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.active--; r.closed && r.active == 0 {
		close(r.idle)
	}
}

// Stats returns the counts of the requester.
func (r *Requester[Req, Resp]) Stats() Stats { return r.calls.snapshot() }

// Close waits until the calls in flight have their replies, or until ctx is done, and closes the
// requester. In the latter case, the errors of those calls match ErrNoReply and client.ErrClosed,
// and Close returns the ctx's error. Later calls return client.ErrNotSent. Closing the Conn stops
// the calls at once.
func (r *Requester[Req, Resp]) Close(ctx context.Context) error {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		if r.active == 0 {
			close(r.idle)
		}
	}
	r.mu.Unlock()
	var err error
	select {
	case <-r.idle:
	case <-r.line.done: // the Conn is closed
	case <-ctx.Done():
		err = &client.Error{Op: "call", Target: r.to, Kind: client.ErrOutcomeUnknown, Text: "calls without a reply were canceled", Err: context.Cause(ctx)}
	}
	r.line.stop(ctx)
	return errors.Join(err, r.publish.Close(ctx))
}

// decode reads a reply. A codec that panics can't read it.
func decode(c client.Codec, m *client.Message, v any) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the codec panicked: %v", p)
		}
	}()
	return c.Decode(m, v)
}
