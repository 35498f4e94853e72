package link

import (
	"context"
	"time"

	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/loglines"
)

// due returns after how long to renew a token that expires after left.
func due(left time.Duration) time.Duration { return max(left/5*4, 0) }

// keepToken renews the token of w before it expires, until w ends.
func (p *Pool) keepToken(w *Wire) {
	expires := w.expires
	if expires.IsZero() || w.Old.KeepsToken {
		return
	}
	failures := 0
	var outage loglines.Outage
	wait := due(time.Until(expires))
	for backoff.Sleep(w.Ctx, wait) {
		token, until, err := w.endpoint.sasl.next(w.Ctx)
		if err == nil && !until.IsZero() && !until.After(expires) {
			// The source caches its token for longer than four fifths of its lifetime.
			wait = max(due(time.Until(expires)), 50*time.Millisecond)
			continue
		}
		if err == nil {
			err = p.sendToken(w, token)
		}
		if w.Ctx.Err() != nil {
			return
		}
		if err != nil {
			err = &failure.Error{Op: "connection", Target: w.endpoint.Shown, Kind: failure.ErrAuthentication, Err: err}
			p.cfg.Dial.Log.Log(w.Ctx, outage.Level(time.Now()), "hopback: the token wasn't renewed; trying again", "endpoint", w.endpoint.Shown, "expires", expires, "error", err)
			p.cfg.Observer.TokenRefused(w.Place(), failures+1, err)
			wait = p.cfg.Backoff.Pause(failures)
			failures++
			continue
		}
		p.cfg.Observer.TokenRenewed(w.Place(), failures+1)
		failures, outage = 0, loglines.Outage{}
		if until.IsZero() {
			return
		}
		expires = until
		wait = due(time.Until(expires))
	}
}

// sendToken gives the broker a new token for the connection w.
func (p *Pool) sendToken(w *Wire, token string) error {
	ctx, cancel := context.WithTimeout(w.Ctx, LinkTimeout)
	defer cancel()
	return p.cfg.Requests.SendToken(ctx, w, token)
}
