package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/replylink"

	"github.com/hopback/hopback/internal/failure"
)

// ReserveReplies reserves a session for the links on which package rpc receives replies.
func (in internal) ReserveReplies(closed func(ctx context.Context), count func(*instrument.Stats)) (replylink.Place, error) {
	c := in.conn
	p := &replyPlace{conn: c, reserved: c.pool.Reserve(1), closed: closed, add: count}
	if err := c.join(p); err != nil {
		p.reserved.Release()
		return nil, failure.MarkUnsent(&failure.Error{Op: "call", Kind: failure.ErrClosed})
	}
	return p, nil
}

// replyPlace has one session at a time, with the links for replies.
type replyPlace struct {
	conn     *Conn
	reserved *link.Reservation
	closed   func(ctx context.Context)
	add      func(*instrument.Stats)
}

func (p *replyPlace) Count(s *instrument.Stats) { p.add(s) }

func (p *replyPlace) Shut(ctx context.Context) error {
	p.closed(ctx)
	return nil
}

func (p *replyPlace) Pause(failures int) time.Duration {
	return p.conn.cfg.Reconnect.Pause(failures)
}

func (p *replyPlace) Leave() {
	p.reserved.Release()
	p.conn.leave(p)
}

func (p *replyPlace) Open(ctx context.Context, source func(oldbroker.Quirks) (replylink.Source, error)) (replylink.Session, error) {
	sess, err := p.reserved.OpenWire(ctx)
	if err != nil {
		return nil, link.ReplyError(ctx, err)
	}
	return link.OpenReplies(ctx, sess, source)
}
