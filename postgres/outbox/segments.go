package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	segmentBits = 17 // as in ../migrations/001_outbox.sql
	segmentRing = 16
	// rotateEvery is how often segments are checked. A message of a transaction that writes into
	// an empty segment is found that late.
	rotateEvery = 250 * time.Millisecond
)

// segments is the part of the ring that may hold messages.
type segments struct {
	mu   sync.Mutex
	list string // "3,4", for a statement
	// empty are past segments without messages that couldn't be truncated yet. A relay that
	// doesn't keep the order leaves them out of its reads, which would skip their deleted rows,
	// and whose locks would block the truncation.
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

// now returns the segments to read, or "" before the first check.
func (s *segments) now() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list
}

// read returns the segments to read.
func (s *segments) read(ctx context.Context, db *session) (string, error) {
	if list := s.now(); list != "" {
		return list, nil
	}
	_, _, err := s.peek(ctx, db)
	return s.now(), err
}

func (s *segments) set(list string) {
	s.mu.Lock()
	s.list = list
	s.mu.Unlock()
}

// peek finds the segments that take up space, the one that new messages are written to, and the
// next one.
func (s *segments) peek(ctx context.Context, db *session) (current int, used []int, err error) {
	var last int64
	var sizes []int64
	if err := db.one(ctx, []any{&last, &sizes}, `SELECT (SELECT last_value FROM hopback_outbox_id), array(
SELECT pg_relation_size(('hopback_outbox_' || n)::regclass) FROM generate_series(0, 15) n ORDER BY n)`); err != nil {
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
	s, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	busy := map[int]backoff{}
	for {
		current, used, err := r.segments.peek(ctx, s)
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
			filled, err := isFilled(ctx, s, n)
			if err != nil {
				return err
			}
			// An open transaction may have written here. Its messages are found at one of the
			// next attempts. With OrderByKey they could then be too late.
			r.segments.markEmpty(n, !filled && r.cfg.Order != OrderByKey)
			done := false
			if !filled {
				if done, err = truncate(ctx, s, n); err != nil {
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

// truncate empties a segment whose messages are all published. It reports false if the segment
// has messages, or if somebody uses it.
//
// The check and the truncation happen under one exclusive lock, which isn't granted while a
// transaction that has written into the segment is open. So no message is lost. truncate doesn't
// wait for the lock: all readers and writers of the segment would wait behind it, for as long as
// pg_dump, for example, holds its own. And it is one statement, so that the lock is released even
// if the relay is stopped in between.
func truncate(ctx context.Context, s *session, n int) (done bool, err error) {
	if _, err := s.exec(ctx, fmt.Sprintf(`DO $hopback$ BEGIN
	LOCK TABLE hopback_outbox_%[1]d IN ACCESS EXCLUSIVE MODE NOWAIT;
	IF current_setting('transaction_isolation') = 'read committed' AND NOT EXISTS (SELECT FROM hopback_outbox_%[1]d) THEN
		TRUNCATE hopback_outbox_%[1]d;
	END IF;
END $hopback$`, n)); err != nil {
		return false, unlessBusy(err)
	}
	filled, err := isFilled(ctx, s, n)
	return !filled, err
}

func isFilled(ctx context.Context, s *session, n int) (filled bool, err error) {
	err = s.one(ctx, []any{&filled}, fmt.Sprintf("SELECT EXISTS (SELECT FROM hopback_outbox_%d)", n))
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
