package outbox

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// wake puts a token into a channel of one, unless it has one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// idle waits until a worker has something to do. One worker sleeps visibly for the database:
// while it holds the lock, every writer of a message notifies it. The others wait for it to find
// a whole batch. peek is called once the lock is held, since a message may have been written
// before, and then whenever the sleeper is notified, or polls.
//
// A transaction that writes before the lock is held and commits after peek doesn't notify. So the
// sleeper polls, at first often and then less and less often.
func (r *Relay) idle(ctx context.Context, s *session, peek func() (int, error)) error {
	select {
	case r.sleeper <- struct{}{}:
	case <-r.more:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-r.sleeper }()
	locked := false
	defer func() {
		if locked {
			s.unlock("pg_advisory_unlock(" + lockSleep + ")")
		}
	}()
	const least = 2 * time.Millisecond
	for pause := least; ; pause = min(2*pause, r.cfg.PollInterval) {
		if !locked {
			if err := s.one(ctx, []any{&locked}, "SELECT pg_try_advisory_lock("+lockSleep+")"); err != nil {
				return err
			}
		}
		if n, err := peek(); err != nil || n > 0 {
			return err
		}
		select {
		case <-r.notified:
			pause = least
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// listen turns notifications into wake-ups.
func (r *Relay) listen(ctx context.Context) error {
	s, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	var own uint32
	if err := s.one(ctx, []any{&own}, "SELECT 'hopback_outbox'::regclass::oid"); err != nil {
		return err
	}
	if _, err := s.exec(ctx, "LISTEN hopback_outbox"); err != nil {
		return err
	}
	for {
		within, cancel := context.WithTimeout(ctx, s.limits.statement)
		n, err := s.conn.WaitForNotification(within)
		cancel()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return err
		case pgconn.Timeout(err):
			// Nobody writes, or the connection is broken silently.
			if _, err := s.exec(ctx, "SELECT"); err != nil {
				return err
			}
			continue
		default:
			return err
		}
		// Another schema may have a separate outbox.
		switch name := strconv.FormatUint(uint64(own), 10); n.Payload {
		case name:
			wake(r.notified)
		case name + " scheduled":
			wake(r.scheduled)
		}
	}
}

// awaitLock waits until a statement has got an advisory lock of the session.
func (r *Relay) awaitLock(ctx context.Context, s *session, try string) error {
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, r.cfg.PollInterval, time.Second) {
		var got bool
		if err := s.one(ctx, []any{&got}, try); err != nil || got {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// unlock releases an advisory lock of the session. If that fails the connection is closed,
// which releases it, too.
func (s *session) unlock(how string) {
	ctx, cancel := context.WithTimeout(context.Background(), s.limits.grace)
	defer cancel()
	if s.conn.IsClosed() {
		return
	}
	if _, err := s.exec(ctx, "SELECT "+how); err != nil {
		_ = s.conn.Close(ctx)
	}
}
