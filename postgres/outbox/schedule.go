package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/internal/refuse"
)

// PublishAt writes v to the outbox as JSON, in db's transaction, for a [Relay] to publish at the
// time due. It is short for a [Publisher] without Codec and Key: see [Publisher.PublishAt].
func PublishAt[T any](ctx context.Context, db postgres.DB, to address.Address, due time.Time, v T, edit ...func(*client.Message)) (messageID string, err error) {
	return Publisher[T]{To: to}.PublishAt(ctx, db, due, v, edit...)
}

// maxAhead limits due, to find times in a wrong unit.
const maxAhead = 10 * 365 * 24 * time.Hour

// PublishAt writes v to the outbox, in db's transaction, for a [Relay] to publish at the time
// due, by the database's clock. It returns the message-id: pass it to [Cancel] to cancel the
// message. A past time means at once.
//
// The message is never published early, and no later than one from Publish would be: a relay
// wakes up for it. Edits and errors are those of [Publisher.Publish]. In addition, due must not
// be zero or more than ten years ahead: that is an *argument.Error.
//
//   - The message-id is random unless an edit sets one. If another scheduled message has the same
//     id, or had it within the last 7 days, the error is an *argument.Error, and PostgreSQL has
//     aborted the transaction.
//   - With [OrderByKey], a message comes after all those of its key that were written before it
//     was due, and before those written later. Waiting messages of a key are published in order
//     of their due times. A waiting message doesn't delay others.
func (p Publisher[T]) PublishAt(ctx context.Context, db postgres.DB, due time.Time, v T, edit ...func(*client.Message)) (messageID string, err error) {
	switch {
	case due.IsZero():
		return "", argument.New("due", nil, "is the zero time", "set the time; use time.Now() for at once, or Publish")
	case time.Until(due) > maxAhead:
		return "", argument.New("due", due.UTC().Format(time.RFC3339), "is more than ten years ahead", "use a time within ten years")
	}
	// PostgreSQL has no years before 4713 BC. A message that is years late is simply due.
	if least := time.Unix(0, 0); due.Before(least) {
		due = least
	}
	rows, err := p.rows(db, []T{v}, oneByOne[T](edit))
	if err != nil {
		return "", err
	}
	r := rows[0]
	if _, err := db.Exec(ctx, insertScheduled, due, r.message, r.id, r.address, nullable(r.key)); err != nil {
		if pg := new(pgconn.PgError); errors.As(err, &pg) && pg.Code == "23505" { // unique_violation
			return "", argument.New("message Properties.MessageID", r.id, "belongs to another scheduled message, which is waiting or was finished in the last 7 days", "use another id, or leave it out for a random one").Because(err)
		}
		return "", fmt.Errorf("outbox: %w", err)
	}
	return r.id, nil
}

// insertScheduled wakes the relays for a message that is due before their next poll.
const insertScheduled = `WITH written AS (
	INSERT INTO hopback_outbox_scheduled (due_at, message, message_id, address, key)
	VALUES ($1::timestamptz, $2::bytea, $3::text, $4::text, $5::text) RETURNING due_at
)
SELECT pg_notify('hopback_outbox', 'hopback_outbox'::regclass::oid::text || ' scheduled')
FROM written WHERE due_at < clock_timestamp() + interval '10 s'`

// Cancellation is the result of [Cancel].
type Cancellation string

const (
	// Canceled means that the message isn't published, once db's transaction commits. A later
	// Cancel returns it, too.
	Canceled Cancellation = "canceled"
	// CancelPublished means that a relay has published the message, or is publishing it.
	CancelPublished Cancellation = "published"
	// CancelUnknownID means that no message with this id was scheduled, that its transaction
	// hasn't committed or was rolled back, or that it was published or canceled more than 7 days
	// ago.
	CancelUnknownID Cancellation = "unknown-id"
)

// Cancel keeps a message of [PublishAt] from being published, in db's transaction. Until that
// transaction is over, relays skip the message. If it is rolled back, the message is published
// when it is due.
//
// An *argument.Error means that messageID is empty or isn't valid text. Any other error is the
// database's; then the result is certain only after the transaction is over.
//
//   - If a relay is just publishing the message, Cancel waits for it.
//   - Messages of Publish can't be canceled.
func Cancel(ctx context.Context, db postgres.DB, messageID string) (Cancellation, error) {
	if err := refuse.NilDB(db); err != nil {
		return "", err
	}
	if messageID == "" || !text(messageID) {
		return "", argument.New("messageID", messageID, "is empty, or isn't UTF-8 without NUL", "use the id that PublishAt returned")
	}
	// A DB reports only the number of rows of a statement.
	for _, try := range []struct {
		statement string
		result    Cancellation
	}{
		{"UPDATE hopback_outbox_scheduled SET ended = 'cancelled', ended_at = clock_timestamp(), message = '' WHERE message_id = $1 AND ended IS NULL", Canceled},
		{"SELECT FROM hopback_outbox_scheduled WHERE message_id = $1 AND ended = 'cancelled'", Canceled},
		{"SELECT FROM hopback_outbox_scheduled WHERE message_id = $1 AND ended = 'published'", CancelPublished},
	} {
		tag, err := db.Exec(ctx, try.statement, messageID)
		if err != nil {
			return "", fmt.Errorf("outbox: %w", err)
		}
		if tag.RowsAffected() > 0 {
			return try.result, nil
		}
	}
	return CancelUnknownID, nil
}

const (
	// sweepEvery is how often rows of finished messages are deleted, and sweepAtOnce how many at
	// once.
	sweepEvery  = 10 * time.Minute
	sweepAtOnce = 10_000
	// leastPause is the pause between checks of a due message that is locked.
	leastPause = 20 * time.Millisecond
)

// handOver moves due messages to the outbox, where they are published like all others. One relay
// does so at a time; otherwise messages of a key could be reordered.
func (r *Relay) handOver(ctx context.Context) error {
	s, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	var swept time.Time
	for {
		n, next, err := r.due(ctx, s)
		if err != nil {
			return err
		}
		if n > 0 {
			wake(r.notified)
		}
		if n > 0 {
			continue // a batch is bounded by bytes, too
		}
		if time.Since(swept) > sweepEvery {
			deleted, err := s.exec(ctx, sweepScheduled, sweepAtOnce)
			if err != nil {
				return err
			}
			if deleted < sweepAtOnce {
				swept = time.Now()
			}
		}
		select {
		case <-r.scheduled:
		case <-time.After(min(max(next, leastPause), r.cfg.PollInterval)):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// due moves a batch of messages that are due. It returns how many, and when the next is due.
func (r *Relay) due(ctx context.Context, s *session) (n int, next time.Duration, err error) {
	if err := s.one(ctx, []any{&n, nil}, moveDue, r.cfg.Batch, r.limits.bytes); err != nil {
		return 0, 0, err
	}
	var seconds *float64
	if err := s.one(ctx, []any{&seconds}, nextDue); err != nil {
		return 0, 0, err
	}
	if seconds == nil {
		return n, r.cfg.PollInterval, nil
	}
	return n, time.Duration(min(*seconds, 3600) * float64(time.Second)), nil
}

const (
	// The transaction gets its number before the ids are assigned; see insertion.
	moveDue = `WITH turn AS MATERIALIZED (SELECT pg_try_advisory_xact_lock(` + lockDue + `) AS mine),
began AS MATERIALIZED (SELECT pg_current_xact_id() AS xid FROM turn WHERE mine),
locked AS MATERIALIZED (
	SELECT id, due_at, message, message_id, address, key FROM hopback_outbox_scheduled
	WHERE ended IS NULL AND due_at <= now() AND (SELECT mine FROM turn)
	ORDER BY due_at, id LIMIT $1 FOR UPDATE SKIP LOCKED
),
due AS MATERIALIZED (
	SELECT * FROM (SELECT *, sum(octet_length(message)) OVER (ORDER BY due_at, id) - octet_length(message) AS ahead FROM locked) sized
	WHERE ahead < $2::bigint
),
numbered AS MATERIALIZED (
	SELECT nextval('hopback_outbox_id') AS number, xid, d.* FROM began, (SELECT * FROM due ORDER BY due_at, id) d
),
inserted AS (
	INSERT INTO hopback_outbox (id, segment, message, message_id, address, key)
	SELECT number, (number >> 17) & 15, message, message_id, address, key FROM numbered
),
ended AS (
	UPDATE hopback_outbox_scheduled s SET ended = 'published', ended_at = clock_timestamp(), message = ''
	FROM numbered WHERE s.id = numbered.id RETURNING 1
),
moved AS MATERIALIZED (SELECT count(*) AS n FROM ended)
SELECT n, CASE WHEN n = 0 THEN NULL
	WHEN pg_try_advisory_lock_shared(` + lockSleep + `) THEN pg_advisory_unlock_shared(` + lockSleep + `)::text
	ELSE pg_notify('hopback_outbox', 'hopback_outbox'::regclass::oid::text)::text END
FROM moved`
	nextDue = `SELECT (SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM hopback_outbox_scheduled
WHERE ended IS NULL ORDER BY due_at, id LIMIT 1)`
	sweepScheduled = `DELETE FROM hopback_outbox_scheduled WHERE id IN (
	SELECT id FROM hopback_outbox_scheduled WHERE ended IS NOT NULL AND ended_at < now() - interval '7 days' ORDER BY ended_at LIMIT $1
)`
)
