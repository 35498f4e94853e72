package link

import (
	"context"
	"errors"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/replylink"

	"github.com/hopback/hopback/internal/failure"
)

// OpenReplies attaches the links for replies that source asks for. After an error it has
// closed the session.
func OpenReplies(ctx context.Context, sess *WireSession, source func(oldbroker.Quirks) (replylink.Source, error)) (replylink.Session, error) {
	from, err := source(sess.Quirks())
	if err != nil {
		CloseSession(sess)
		return nil, err
	}
	s := &replySession{of: sess, credit: from.Credit, settled: from.Queue == ""}
	for range from.Links {
		r, err := sess.replies(ctx, from)
		if err != nil {
			CloseSession(sess)
			return nil, ReplyError(ctx, err)
		}
		s.links = append(s.links, &replyLink{r: r})
	}
	return s, nil
}

// ReplyError is the error for links that couldn't be opened.
func ReplyError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil, errors.Is(err, failure.ErrClosed):
		return failure.MarkUnsent(&failure.Error{Op: "call", Kind: failure.ErrClosed, Text: "the replies can't be received"})
	case errors.Is(err, failure.ErrSessionLimit):
		return failure.NewError("call", "", failure.ErrSessionLimit, err)
	}
	return failure.MarkUnsent(failure.NewError("call", "", AttachKind(err), err))
}

// replies attaches a link and grants its first credit. Until then a direct reply would be
// dropped.
func (s *WireSession) replies(ctx context.Context, from replylink.Source) (*wireReceiver, error) {
	cfg := engine.ReceiverConfig{Source: &frames.Source{Address: from.Queue}}
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

type replySession struct {
	of      *WireSession
	credit  uint32
	settled bool
	links   []*replyLink
}

type replyLink struct {
	r    *wireReceiver
	used uint32 // credit since the last was granted
	held int    // bytes of the reply that was received last
}

func (s *replySession) Address(link int) string {
	address, _ := s.links[link].r.r.Attached().Source.Address.(string)
	return address
}

func (s *replySession) Receive(ctx context.Context, link int) (reply replylink.Reply, err error) {
	l := s.links[link]
	if s.of.Exhaust() >= 1 {
		return reply, &failure.Error{Op: "call", Kind: failure.ErrConnectionLost, Text: "the session is replaced, since its delivery-ids run out"}
	}
	l.r.Release(l.held) // its call has it
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

func (s *replySession) Accept(link int, id uint32) error {
	if s.settled {
		return nil
	}
	return s.links[link].r.Settle(id, Disposition{Kind: DispositionAccepted})
}

func (s *replySession) Close() { CloseSession(s.of) }
