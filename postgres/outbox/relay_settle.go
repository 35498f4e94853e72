package outbox

import (
	"context"
	"errors"
)

// settle deletes accepted messages, moves those that failed for good, and marks the others that
// failed. segs are the segments that the batch was read from. If the database refuses one of the
// last two, those messages stay unchanged, and the deletion isn't undone: accepted messages would
// be published again.
func (r *Relay) settle(ctx context.Context, t *transaction, segs string, o *outcome) error {
	if len(o.accepted) > 0 {
		if _, err := t.exec(ctx, "DELETE FROM hopback_outbox WHERE segment IN ("+segs+") AND id = ANY($1)", idsOf(o.accepted)); err != nil {
			return err
		}
	}
	var final []*failure
	for _, f := range o.failed {
		if f.final {
			final = append(final, f)
		}
	}
	if len(final) > 0 {
		err := t.attempt(ctx, func() error { return setAside(ctx, t, segs, final) })
		if refused := (&refusedError{}); errors.As(err, &refused) {
			for _, f := range final {
				f.final = false
			}
			r.log.Error("outbox: messages couldn't be set aside and stay in hopback_outbox; trying again", "messages", len(final), "first", final[0].err, "error", err)
		} else if err != nil {
			return err
		}
	}
	ids, reasons := []int64{}, []string{}
	for _, f := range o.failed {
		if !f.final && f.rec.failedFor == nil {
			ids, reasons = append(ids, f.rec.id), append(reasons, clean(f.err.Error()))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	err := t.attempt(ctx, func() error {
		_, err := t.exec(ctx, "UPDATE hopback_outbox o SET failed_since = clock_timestamp(), failure = f.reason FROM unnest($1::bigint[], $2::text[]) AS f (id, reason) WHERE o.segment IN ("+segs+") AND o.id = ANY($1) AND o.id = f.id", ids, reasons)
		return err
	})
	if refused := (&refusedError{}); errors.As(err, &refused) {
		r.log.Error("outbox: messages that the broker doesn't accept couldn't be marked; trying again", "messages", len(ids), "error", err)
		return nil
	}
	return err
}

// setAside moves messages to hopback_outbox_set_aside.
func setAside(ctx context.Context, t *transaction, segs string, final []*failure) error {
	ids, reasons := make([]int64, len(final)), make([]string, len(final))
	for i, f := range final {
		ids[i], reasons[i] = f.rec.id, clean(f.err.Error())
	}
	_, err := t.exec(ctx, `WITH gone AS (DELETE FROM hopback_outbox WHERE segment IN (`+segs+`) AND id = ANY($1::bigint[]) RETURNING *)
INSERT INTO hopback_outbox_set_aside (id, message, message_id, address, key, created_at, failed_since, reason)
SELECT g.id, message, message_id, address, key, created_at, coalesce(failed_since, clock_timestamp()), f.reason
FROM gone g JOIN unnest($1::bigint[], $2::text[]) AS f (id, reason) ON f.id = g.id`, ids, reasons)
	return err
}

// setAsideRest moves the untried messages that have waited as long as one that is set aside,
// since the broker refuses all to their address.
func (r *Relay) setAsideRest(ctx context.Context, s *session, segs string, o *outcome) error {
	done := map[string]bool{}
	for _, f := range o.failed {
		if !f.final || f.is != verdictForbidden || done[f.rec.address] || !r.gates.blames(f.rec.address) {
			continue
		}
		done[f.rec.address] = true
		for {
			n, err := s.exec(ctx, `WITH old AS MATERIALIZED (
	SELECT id FROM (SELECT id, sum(size) OVER (ORDER BY id) - size AS ahead FROM (
		SELECT id, octet_length(message) AS size FROM hopback_outbox WHERE segment IN (`+segs+`) AND address = $1
		AND created_at < clock_timestamp() - make_interval(secs => $2) ORDER BY id LIMIT $4 FOR UPDATE SKIP LOCKED) l) o
	WHERE ahead < $3::bigint
), gone AS (DELETE FROM hopback_outbox WHERE segment IN (`+segs+`) AND id IN (SELECT id FROM old) RETURNING *)
INSERT INTO hopback_outbox_set_aside (id, message, message_id, address, key, created_at, failed_since, reason)
SELECT id, message, message_id, address, key, created_at, coalesce(failed_since, clock_timestamp()), $5 FROM gone`,
				f.rec.address, r.cfg.SetAsideAfter.Seconds(), r.limits.bytes, r.cfg.Batch, clean(f.err.Error()))
			if err != nil {
				return err
			}
			if n == 0 {
				break
			}
			r.setAside.Add(n)
			r.log.Error("outbox: the broker refuses messages to an address; they were moved to hopback_outbox_set_aside. Fix the cause, then return them as docs/outbox.md describes", "messages", n, "address", f.rec.address, "error", f.err)
		}
	}
	return nil
}

// settled counts the work of settle, once it is committed.
func (r *Relay) settled(o *outcome) {
	waits, first := 0, error(nil)
	for _, f := range o.failed {
		if f.final {
			r.setAside.Add(1)
			r.waits.forget(f.rec.id)
			r.log.Error("outbox: a message can't be published and was moved to hopback_outbox_set_aside. Fix the cause, then return it as docs/outbox.md describes", "id", f.rec.id, "error", f.err)
			continue
		}
		if f.rec.failedFor == nil {
			if waits++; first == nil {
				first = f.err
			}
		}
		f.alone = f.alone && !r.gates.blames(f.rec.address)
		r.waits.later(f, r.cfg.Retry)
	}
	if waits > 0 {
		r.log.Warn("outbox: the broker doesn't accept messages; they wait, and the relay tries again", "messages", waits, "for", r.cfg.SetAsideAfter, "first", first)
	}
	r.waits.forget(idsOf(o.accepted)...)
	r.gates.learn(o)
	r.published.Add(int64(len(o.accepted)))
}

func idsOf(recs []*record) []int64 {
	ids := make([]int64, len(recs))
	for i, rec := range recs {
		ids[i] = rec.id
	}
	return ids
}
