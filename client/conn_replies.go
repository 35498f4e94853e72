package client

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/replylink"
)

// Package rpc receives replies on links that it opens here.
func init() {
	replylink.Reserve = func(conn any, closed func(ctx context.Context), count func(stats any)) (replylink.Place, error) {
		c := conn.(*Conn)
		if c == nil {
			return nil, argument.New("conn", nil, "is a nil *Conn", "use the result of Connect")
		}
		p := &replyPlace{conn: c, booking: c.book(1), closed: closed, add: count}
		if err := c.join(p); err != nil {
			p.booking.release()
			return nil, &Error{Op: "call", Kind: ErrClosed, unsent: true}
		}
		return p, nil
	}
}

// replyPlace has one session at a time, with the links for replies.
type replyPlace struct {
	conn    *Conn
	booking *booking
	closed  func(ctx context.Context)
	add     func(stats any)
}

func (p *replyPlace) count(s *Stats) { p.add(s) }

func (p *replyPlace) shut(ctx context.Context) error {
	p.closed(ctx)
	return nil
}

func (p *replyPlace) Pause(ctx context.Context, n int) bool {
	return pause(ctx, p.conn.cfg.Reconnect.pause(n))
}

func (p *replyPlace) Leave() {
	p.booking.release()
	p.conn.leave(p)
}

func (p *replyPlace) Open(ctx context.Context, source func(atLeast func(major, minor int) bool) (replylink.Source, error)) (replylink.Session, error) {
	sess, err := p.booking.open(ctx)
	if err != nil {
		return nil, replyError(ctx, err)
	}
	from, err := source(sess.broker().AtLeast)
	if err != nil {
		closeSession(sess)
		return nil, err
	}
	as := sess.(*amqpSession)
	s := &replySession{of: as, heard: &as.w.heard, credit: from.Credit, settled: from.Queue == ""}
	for range from.Links {
		r, err := as.replies(ctx, from)
		if err != nil {
			closeSession(sess)
			return nil, replyError(ctx, err)
		}
		s.links = append(s.links, &replyLink{r: r})
	}
	return s, nil
}

// replyError is the error for links that couldn't be opened.
func replyError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil, errors.Is(err, ErrClosed):
		return &Error{Op: "call", Kind: ErrClosed, Text: "the replies can't be received", unsent: true}
	case errors.Is(err, ErrSessionLimit):
		return newError("call", "", ErrSessionLimit, err)
	}
	e := newError("call", "", attachKind(err), err)
	e.unsent = true
	return e
}

// replies attaches a link and grants its first credit. Until then a direct reply would be
// dropped.
func (s *amqpSession) replies(ctx context.Context, from replylink.Source) (*amqp.Receiver, error) {
	options := &amqp.ReceiverOptions{Credit: -1, SettlementMode: amqp.ReceiverSettleModeFirst.Ptr()}
	attach := bounded[*amqp.Receiver]
	if from.Queue == "" {
		options.DynamicAddress = true
		options.SourceCapabilities = []string{"rabbitmq:volatile-queue"}
		options.SourceExpiryPolicy = amqp.ExpiryPolicyLinkDetach
		options.RequestedSenderSettleMode = amqp.SenderSettleModeSettled.Ptr()
	} else {
		options.RequestedSenderSettleMode = amqp.SenderSettleModeUnsettled.Ptr()
		attach = patient[*amqp.Receiver]
		s.attaching.Store(true)
		defer s.attaching.Store(false)
	}
	return attach(ctx, s.w, func(ctx context.Context) (*amqp.Receiver, error) {
		r, err := s.s.NewReceiver(ctx, from.Queue, options)
		if err != nil {
			return nil, err
		}
		return r, r.IssueCredit(from.Credit)
	}, func(*amqp.Receiver) {}) // the end of the session ends it
}

type replySession struct {
	of      *amqpSession
	heard   *atomic.Uint64
	credit  uint32
	settled bool
	links   []*replyLink
}

type replyLink struct {
	r    *amqp.Receiver
	used uint32 // credit since the last was granted
}

func (s *replySession) Address(link int) string { return s.links[link].r.Address() }

func (s *replySession) Receive(ctx context.Context, link int) (*amqp.Message, error) {
	l := s.links[link]
	if s.of.wear() >= 1 {
		return nil, &Error{Op: "call", Kind: ErrConnectionLost, Text: "the session is replaced, since its delivery-ids run out"}
	}
	m, err := l.r.Receive(ctx, nil)
	if err != nil {
		return nil, newError("call", "", ErrConnectionLost, err)
	}
	s.of.used.Add(1)
	s.heard.Add(1)
	if l.used++; l.used >= max(s.credit/4, 1) {
		if err := l.r.IssueCredit(l.used); err == nil {
			l.used = 0
		}
	}
	return m, nil
}

func (s *replySession) Accept(link int, m *amqp.Message) error {
	if s.settled {
		return nil
	}
	// Without a deadline: see amqpReceiver.settle.
	return s.links[link].r.AcceptMessage(context.Background(), m)
}

func (s *replySession) Close() { closeSession(s.of) }
