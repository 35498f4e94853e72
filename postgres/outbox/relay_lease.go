package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// lease is the right to keep the order of keys. Each leader has an epoch. It settles a batch only
// while that is the current one, and locks it until then: so a relay that was stopped or
// disconnected can't change the table once another has taken over.
//
// A leader also holds an advisory lock of its epoch. A standby that gets it knows that the
// leader's session is gone, and takes over at once. Otherwise the others wait until the leader
// hasn't renewed its lease for long enough, by their own clocks.
type lease struct {
	s       *session
	epoch   int64
	renewed atomic.Pointer[time.Time] // when the last renewal was sent
}

// lockEpoch is the advisory lock of a leader.
func lockEpoch(epoch string) string {
	return "hashtextextended('hopback_outbox ' || 'hopback_outbox'::regclass::oid || ' ' || " + epoch + ", 0)"
}

var errLease = errors.New("another relay has taken over")

// awaitLease waits until this relay leads.
func (r *Relay) awaitLease(ctx context.Context, s *session) (*lease, error) {
	var epoch, beat int64
	var since time.Time
	for {
		asked := time.Now()
		var e, b int64
		var gone bool
		err := s.one(ctx, []any{&e, &b, &gone}, "SELECT epoch, beat, pg_try_advisory_xact_lock_shared("+lockEpoch("epoch")+") FROM hopback_outbox_lease")
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			_, err = s.exec(ctx, "INSERT INTO hopback_outbox_lease (epoch) VALUES (0) ON CONFLICT DO NOTHING")
			if err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, err
		case e != epoch || b != beat || since.IsZero():
			epoch, beat, since = e, b, time.Now()
		}
		silent := asked.Sub(since)
		// The relay's previous term is over, even if the server still holds its session.
		gone = gone || e == r.epoch
		if gone || silent >= r.limits.lease*3/2 {
			l := &lease{s: s}
			l.renewed.Store(new(time.Now()))
			var locked bool
			err := s.one(ctx, []any{&l.epoch, &locked}, `WITH taken AS (UPDATE hopback_outbox_lease SET epoch = epoch + 1, beat = 0 WHERE epoch = $1 AND beat = $2 RETURNING epoch)
SELECT epoch, pg_try_advisory_lock(`+lockEpoch("epoch")+`) FROM taken`, e, b)
			if err == nil {
				if !gone {
					r.log.Warn("outbox: the leader hasn't renewed its lease; taking over", "for", silent, "epoch", l.epoch)
				}
				r.epoch = l.epoch
				return l, nil
			}
			if !errors.Is(err, pgx.ErrNoRows) {
				return nil, err
			}
			continue // another was first
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(min(r.cfg.PollInterval, time.Second, r.limits.lease/4)):
		}
	}
}

// valid reports whether nobody can have taken over yet.
func (l *lease) valid() bool {
	return time.Since(*l.renewed.Load()) < l.s.limits.lease
}

// keep renews the lease until that fails.
func (l *lease) keep(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(l.s.limits.lease / 5):
		}
		at := time.Now()
		within, cancel := context.WithTimeoutCause(ctx, l.s.limits.lease-at.Sub(*l.renewed.Load()), errSilent)
		n, err := l.s.exec(within, "UPDATE hopback_outbox_lease SET beat = beat + 1 WHERE epoch = $1", l.epoch)
		late := errors.Is(context.Cause(within), errSilent)
		cancel()
		switch {
		case err != nil && late:
			return fmt.Errorf("the lease couldn't be renewed for %v: %w", l.s.limits.lease, err)
		case err != nil:
			return err
		case n == 0:
			return errLease
		}
		l.renewed.Store(&at)
	}
}

// hold locks the epoch for a transaction. It is an error if another relay leads.
func (l *lease) hold(ctx context.Context, t *transaction) error {
	n, err := t.exec(ctx, "SELECT FROM hopback_outbox_lease WHERE epoch = $1 FOR KEY SHARE", l.epoch)
	if err == nil && n == 0 {
		return errLease
	}
	return err
}
