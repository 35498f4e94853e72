package link

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/event"
	"github.com/hopback/hopback/internal/failure"
)

// due is when a token with so much time left should be renewed.
func due(left time.Duration) time.Duration { return max(left/5*4, 0) }

// keepToken renews the token of w ahead of its end, for as long as w lives.
func (p *Pool) keepToken(w *Wire) {
	expires := w.token.Expires
	if expires.IsZero() || w.Old.KeepsToken {
		return
	}
	failures := 0
	wait := due(time.Until(expires))
	for Pause(w.Ctx, wait) {
		next, err := w.endpoint.sasl.next(w.Ctx)
		if err == nil && !next.Expires.IsZero() && !next.Expires.After(expires) {
			// The source keeps its token for longer than four fifths of its time.
			wait = max(due(time.Until(expires)), 50*time.Millisecond)
			continue
		}
		if err == nil {
			err = p.sendToken(w, next)
		}
		if w.Ctx.Err() != nil {
			return
		}
		if err != nil {
			err = &failure.Error{Op: "connection", Target: w.endpoint.Shown, Kind: failure.ErrAuthentication, Err: err}
			p.cfg.Dial.Log.Warn("hopback: the token wasn't renewed; trying again", "endpoint", w.endpoint.Shown, "expires", expires, "error", err)
			p.notify(w, event.StateEvent{Kind: event.EventTokenRefused, Attempt: failures + 1, Err: err})
			wait = p.cfg.Backoff.Pause(failures)
			failures++
			continue
		}
		p.notify(w, event.StateEvent{Kind: event.EventTokenRenewed, Attempt: failures + 1})
		failures = 0
		if next.Expires.IsZero() {
			return
		}
		expires = next.Expires
		wait = due(time.Until(expires))
	}
}

// sendToken gives the broker a new token for the connection w.
func (p *Pool) sendToken(w *Wire, t AccessToken) error {
	ctx, cancel := context.WithTimeout(w.Ctx, LinkTimeout)
	defer cancel()
	return p.cfg.SendToken(ctx, w, t.Value)
}
