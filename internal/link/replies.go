package link

import (
	"context"
	"errors"
	"time"

	"github.com/Azure/go-amqp"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/oldbroker"

	"github.com/hopback/hopback/internal/failure"
)

// Package rpc needs links that no consumer has: without a handler, and with an address that the broker chooses.

// ReplySource is where the links of a ReplySession receive from.
type ReplySource struct {
	// Queue is a queue's address. "" stands for direct reply-to: each link gets a separate
	// address from the broker, and its messages come settled.
	Queue string
	// Links is how many links there are.
	Links int
	// Credit is how many messages the broker may send ahead on each link.
	Credit uint32
	// Settled has the broker settle what it sends, so that nobody has to. What is on the way when the link ends is lost.
	Settled bool
}

// ReplyPlace is the right to one session at a time on the connections of a client.Conn.
type ReplyPlace interface {
	// Open opens a session with its links, and waits while the connection is being
	// rebuilt. source is called with the broker's quirks.
	Open(ctx context.Context, source func(oldbroker.Quirks) (ReplySource, error)) (ReplySession, error)
	// Pause is how long to wait before a session is opened again: see package backoff.
	Pause(failures int) time.Duration
	// Leave ends the right. Close the session before.
	Leave()
}

// Reply is a received message.
type Reply struct {
	*amqp.Message
	ID uint32 // of the delivery
	// TooLarge is the size of a reply that is larger than Config.MaxMessageSize: Message has no
	// body then. Otherwise it is 0.
	TooLarge uint64
}

// ReplySession is a session with links for replies. It isn't rebuilt when it is lost.
type ReplySession interface {
	// Address returns the address of a link, by its index: the broker's choice, or the queue's.
	Address(link int) string
	// Receive waits for the next reply on a link. Only one goroutine may call it for each link. It
	// returns an error when the session or ctx has ended.
	Receive(ctx context.Context, link int) (Reply, error)
	// Accept settles a delivery of a link, unless the broker has settled it.
	Accept(link int, id uint32) error
	Close()
}

// OpenReplies attaches the links for replies that source describes. If it fails, it closes the session.
func OpenReplies(ctx context.Context, sess *WireSession, source func(oldbroker.Quirks) (ReplySource, error)) (ReplySession, error) {
	from, err := source(sess.Quirks())
	if err != nil {
		CloseSession(sess)
		return nil, err
	}
	s := &wireReplies{of: sess, credit: from.Credit, settled: from.Queue == "" || from.Settled}
	for range from.Links {
		r, err := sess.replies(ctx, from)
		if err != nil {
			CloseSession(sess)
			return nil, ReplyError(ctx, err)
		}
		s.links = append(s.links, &wireReplyLink{r: r})
	}
	return s, nil
}

// ReplyError returns the error of a call whose links couldn't be opened.
func ReplyError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil, errors.Is(err, failure.ErrClosed):
		return failure.MarkUnsent(&failure.Error{Op: "call", Kind: failure.ErrClosed, Text: "the replies can't be received"})
	case errors.Is(err, failure.ErrSessionLimit):
		return failure.NewError("call", "", failure.ErrSessionLimit, err)
	}
	return failure.MarkUnsent(failure.NewError("call", "", AttachKind(err), err))
}

// replies attaches a link and grants its first credit. Before that the broker drops direct replies.
func (s *WireSession) replies(ctx context.Context, from ReplySource) (*wireReceiver, error) {
	cfg := engine.ReceiverConfig{Source: &frames.Source{Address: from.Queue}, Settled: from.Settled}
	limit := attachTimeout
	if from.Queue == "" {
		limit = LinkTimeout
		cfg.Settled = true
		cfg.Source = &frames.Source{Dynamic: true, Capabilities: []frames.Symbol{"rabbitmq:volatile-queue"}, ExpiryPolicy: "link-detach"}
	}
	cfg.MaxKept = s.w.maxMessage
	s.s.Limit(PrefetchBytes)
	r := newWireReceiver(s, &s.w.heard)
	if err := r.attach(ctx, limit, cfg); err != nil {
		return nil, err
	}
	return r, r.IssueCredit(from.Credit)
}

type wireReplies struct {
	of      *WireSession
	credit  uint32
	settled bool
	links   []*wireReplyLink
}

// wireReplyLink has the state of one link. used and held are for the goroutine that calls Receive for it.
type wireReplyLink struct {
	r    *wireReceiver
	used uint32 // replies since credit was granted last
	held int    // bytes of the reply that was received last
}

func (s *wireReplies) Address(link int) string {
	address, _ := s.links[link].r.r.Attached().Source.Address.(string)
	return address
}

func (s *wireReplies) Receive(ctx context.Context, link int) (reply Reply, err error) {
	l := s.links[link]
	if s.of.Exhaust() >= 1 {
		return reply, &failure.Error{Op: "call", Kind: failure.ErrConnectionLost, Text: "the session is replaced, since its delivery-ids run out"}
	}
	l.r.Release(l.held) // Receive was called again, so the last reply has been passed on
	a, err := l.r.Receive(ctx)
	l.held = a.Kept
	if err != nil {
		return reply, failure.NewError("call", "", failure.ErrConnectionLost, err)
	}
	reply.Message, reply.ID = a.Msg, a.ID
	if a.Size > uint64(a.Kept) {
		reply.TooLarge = a.Size
	}
	if l.used++; l.used >= max(s.credit/4, 1) {
		if err := l.r.IssueCredit(l.used); err == nil {
			l.used = 0
		}
	}
	return reply, nil
}

func (s *wireReplies) Accept(link int, id uint32) error {
	if s.settled {
		return nil
	}
	return s.links[link].r.Settle(id, Disposition{Kind: DispositionAccepted})
}

func (s *wireReplies) Close() { CloseSession(s.of) }
