package outbox

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// wake puts a token into a channel of one, unless it has one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// idle waits until a worker has something to do. One worker sleeps in the database's
// sight: while it holds the lock, whoever writes a message notifies. The others wait for
// it to find a whole batch. look is called once the lock is held, since a message may
// have been written before, and then whenever the sleeper is notified, or polls.
//
// A transaction that writes before the lock is held and commits after look doesn't
// notify. So the sleeper polls, first often and then ever more rarely.
func (r *Relay) idle(ctx context.Context, conn *pgxpool.Conn, look func() (int, error)) error {
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
			r.unlock(conn, "pg_advisory_unlock("+lockSleep+")")
		}
	}()
	const least = 2 * time.Millisecond
	for pause := least; ; pause = min(2*pause, r.cfg.PollInterval) {
		if !locked {
			if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock("+lockSleep+")").Scan(&locked); err != nil {
				return err
			}
		}
		if n, err := look(); err != nil || n > 0 {
			if n >= r.cfg.Batch {
				wake(r.more)
			}
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
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	// A connection that listens must not go back to the pool.
	raw := conn.Hijack()
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = raw.Close(closing)
	}()
	var own uint32
	if err := raw.QueryRow(ctx, "SELECT 'hopback_outbox'::regclass::oid").Scan(&own); err != nil {
		return err
	}
	if _, err := raw.Exec(ctx, "LISTEN hopback_outbox"); err != nil {
		return err
	}
	for {
		n, err := raw.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		// Another schema may have an outbox of its own.
		switch name := strconv.FormatUint(uint64(own), 10); n.Payload {
		case name:
			wake(r.notified)
		case name + " scheduled":
			wake(r.scheduled)
		}
	}
}

// awaitLock waits for an advisory lock of the session.
func (r *Relay) awaitLock(ctx context.Context, conn *pgxpool.Conn, try string) error {
	for {
		var got bool
		if err := conn.QueryRow(ctx, "SELECT "+try).Scan(&got); err != nil || got {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(r.cfg.PollInterval, time.Second)):
		}
	}
}

// unlock releases an advisory lock of the session. If that fails the connection is closed,
// which releases it, too.
func (r *Relay) unlock(conn *pgxpool.Conn, how string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if conn.Conn().IsClosed() {
		return
	}
	if _, err := conn.Exec(ctx, "SELECT "+how); err != nil {
		_ = conn.Conn().Close(ctx)
	}
}
