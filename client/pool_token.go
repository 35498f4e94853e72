package client

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/link"
)

// due is when a token with so much time left should be renewed.
func due(left time.Duration) time.Duration { return max(left/5*4, 0) }

// keepToken renews the token of w ahead of its end, for as long as w lives.
func (p *pool) keepToken(w *wire) {
	expires := w.token.Expires
	if expires.IsZero() || w.old.KeepsToken {
		return
	}
	failures := 0
	wait := due(time.Until(expires))
	for link.Pause(w.ctx, wait) {
		next, err := w.endpoint.sasl.next(w.ctx)
		if err == nil && !next.Expires.IsZero() && !next.Expires.After(expires) {
			// The source keeps its token for longer than four fifths of its time.
			wait = max(due(time.Until(expires)), 50*time.Millisecond)
			continue
		}
		if err == nil {
			err = p.sendToken(w, next)
		}
		if w.ctx.Err() != nil {
			return
		}
		if err != nil {
			err = &Error{Op: "connection", Target: w.endpoint.shown, Kind: ErrAuthentication, Err: err}
			p.cfg.dial.log.Warn("hopback: the token wasn't renewed; trying again", "endpoint", w.endpoint.shown, "expires", expires, "error", err)
			p.notify(w, stateEvent{Kind: eventTokenRefused, Attempt: failures + 1, Err: err})
			wait = p.cfg.backoff.Pause(failures)
			failures++
			continue
		}
		p.notify(w, stateEvent{Kind: eventTokenRenewed, Attempt: failures + 1})
		failures = 0
		if next.Expires.IsZero() {
			return
		}
		expires = next.Expires
		wait = due(time.Until(expires))
	}
}

// sendToken gives the broker a new token for the connection w.
func (p *pool) sendToken(w *wire, t accessToken) error {
	ctx, cancel := context.WithTimeout(w.ctx, linkTimeout)
	defer cancel()
	return p.cfg.sendToken(ctx, w, t.Value)
}
