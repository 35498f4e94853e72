package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	segmentBits = 17 // as in migrations/001_outbox.sql
	segmentRing = 16
	// rotateEvery is how often segments are looked at. A message of a transaction that
	// writes into a segment which was empty is found that late.
	rotateEvery = 250 * time.Millisecond
)

// segments is the part of the ring that may hold messages.
type segments struct {
	mu   sync.Mutex
	list string // "3,4", for a statement
	// empty are past segments without messages that couldn't be truncated yet. A relay
	// that doesn't keep the order leaves them out of its reads, which would pass over
	// their deleted rows, and whose locks would stand in the way of the truncation.
	empty map[int]bool
}

// markEmpty notes whether a past segment is empty.
func (s *segments) markEmpty(n int, empty bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.empty == nil {
		s.empty = map[int]bool{}
	}
	s.empty[n] = empty
}

func (s *segments) isEmpty(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.empty[n]
}

// now returns the segments to read, or "" before the first look.
func (s *segments) now() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list
}

func (s *segments) set(list string) {
	s.mu.Lock()
	s.list = list
	s.mu.Unlock()
}

// look finds the segments that take up space, the one that messages are written into,
// and the next one.
func (s *segments) look(ctx context.Context, db execer) (current int, used []int, err error) {
	var last int64
	var sizes []int64
	if err := db.QueryRow(ctx, `SELECT (SELECT last_value FROM hopback_outbox_id), array(
SELECT pg_relation_size(('hopback_outbox_' || n)::regclass) FROM generate_series(0, 15) n ORDER BY n)`).Scan(&last, &sizes); err != nil {
		return 0, nil, err
	}
	current = int(last>>segmentBits) % segmentRing
	var list []string
	for n, size := range sizes {
		if size > 0 {
			used = append(used, n)
		}
		if size > 0 && !s.isEmpty(n) || n == current || n == (current+1)%segmentRing {
			list = append(list, fmt.Sprint(n))
		}
	}
	s.set(strings.Join(list, ","))
	return current, used, nil
}

// rotate keeps the list of segments, and truncates those that are past and empty.
func (r *Relay) rotate(ctx context.Context) error {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	busy := map[int]backoff{}
	for {
		current, used, err := r.segments.look(ctx, conn)
		if err != nil {
			return err
		}
		for _, n := range used {
			if n == current || n == (current+1)%segmentRing {
				r.segments.markEmpty(n, false)
				continue
			}
			if !busy[n].over() {
				continue
			}
			filled, err := isFilled(ctx, conn, n)
			if err != nil {
				return err
			}
			// A transaction that is open may have written here. Its messages are found at one
			// of the next attempts. By key they may come too late then.
			r.segments.markEmpty(n, !filled && r.cfg.Order != ByKey)
			done := false
			if !filled {
				if done, err = truncate(ctx, conn, n); err != nil {
					return err
				}
			}
			if done {
				r.segments.markEmpty(n, false)
				delete(busy, n)
			} else {
				busy[n] = busy[n].longer()
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(rotateEvery):
		}
	}
}

// truncate empties a segment in which all messages are published. It reports false if the
// segment has messages, or if somebody uses it.
//
// The check and the truncation happen under one exclusive lock, which no transaction that
// has written into the segment, and hasn't ended, lets it have. So no message is lost.
func truncate(ctx context.Context, conn *pgxpool.Conn, n int) (done bool, err error) {
	table := fmt.Sprintf("hopback_outbox_%d", n)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	for _, statement := range []string{
		// The lock stops readers of the segment for as long as it is waited for.
		"SET LOCAL lock_timeout = '200ms'",
		"LOCK TABLE " + table + " IN ACCESS EXCLUSIVE MODE",
	} {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return false, unlessBusy(err)
		}
	}
	if filled, err := isFilled(ctx, tx, n); err != nil || filled {
		return false, err
	}
	if _, err := tx.Exec(ctx, "TRUNCATE "+table); err != nil {
		return false, unlessBusy(err)
	}
	return true, tx.Commit(ctx)
}

func isFilled(ctx context.Context, db execer, n int) (filled bool, err error) {
	err = db.QueryRow(ctx, fmt.Sprintf("SELECT EXISTS (SELECT FROM hopback_outbox_%d)", n)).Scan(&filled)
	return filled, err
}

// unlessBusy returns nil for the error of a lock that another transaction holds.
func unlessBusy(err error) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "55P03" || pg.Code == "40P01") { // lock_not_available, deadlock_detected
		return nil
	}
	return err
}

// backoff spaces the attempts to truncate a segment that is in use.
type backoff struct {
	pause time.Duration
	until time.Time
}

func (b backoff) over() bool { return !time.Now().Before(b.until) }

func (b backoff) longer() backoff {
	b.pause = min(max(2*b.pause, 500*time.Millisecond), 5*time.Second)
	b.until = time.Now().Add(b.pause)
	return b
}
