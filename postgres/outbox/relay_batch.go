package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// record is a row of the outbox.
type record struct {
	id      int64
	message []byte // nil once it is decoded, or if the row is only parked
	address string
	key     *string
	// failedFor is the time since the first failed attempt, by the database's clock; nil: none
	// has failed.
	failedFor *float64
	parked    bool

	decoded *client.Message
}

// scanRecord reads a row of bounded.
func scanRecord(row pgx.CollectableRow) (*record, error) {
	rec := &record{}
	return rec, row.Scan(&rec.id, &rec.message, &rec.address, &rec.key, &rec.failedFor, &rec.parked)
}

// bounded returns the statement that reads the rows of a query, up to limit bytes of
// messages, and at least one message. The query has the columns of hopback_outbox, and
// parked, which says that the message itself isn't read.
func bounded(query, limit string) string {
	return `SELECT id, CASE WHEN parked THEN NULL ELSE message END, address, key,
	extract(epoch FROM clock_timestamp() - failed_since)::float8, parked
FROM (SELECT *, sum(size) OVER (ORDER BY id) - size AS ahead
	FROM (SELECT *, CASE WHEN parked THEN 0 ELSE octet_length(message) END AS size FROM (` + query + `) found) sized) counted
WHERE ahead < ` + limit + ` ORDER BY id`
}

// notAmong is a condition on a column: an array doesn't contain its value. PostgreSQL makes a
// hash table of a query's rows, but compares with a parameter's values one by one.
func notAmong(array string) string { return "NOT IN (SELECT unnest(" + array + "))" }

// decode decodes what Publish has encoded.
func (rec *record) decode() error {
	m := &client.Message{}
	if err := m.UnmarshalBinary(rec.message); err != nil {
		return argument.New("message", rec.id, "isn't an AMQP message", "write messages with outbox.Publish").Because(err)
	}
	rec.message = nil
	if m.Properties == nil || m.Properties.To == nil {
		return argument.New("message Properties.To", nil, "is missing", "write messages with outbox.Publish")
	}
	if _, err := address.Parse(*m.Properties.To); err != nil {
		return err // RabbitMQ would end the session
	}
	rec.decoded = m
	return nil
}

// outcome is the result of a batch.
type outcome struct {
	accepted []*record
	failed   []*failure
	// link is why the broker refuses the relay's link, or nil.
	link error
}

// err returns why the relay should pause, or nil.
func (o *outcome) err() error {
	if o.link == nil {
		return nil
	}
	return fmt.Errorf("outbox: the broker refuses the relay's link: %w", o.link)
}

// failure is a message that the broker didn't accept.
type failure struct {
	rec   *record
	err   error
	is    verdict
	final bool // there is no other attempt
	// alone reports that the next attempt uses a separate link.
	alone bool
}

// verdict is what the result of publishing a message means for it.
type verdict int

const (
	verdictAccepted verdict = iota
	// unfit: it can never be published.
	verdictUnfit
	// untaken: the broker doesn't accept it now.
	verdictUntaken
	// forbidden: the broker has closed the session because of it.
	verdictForbidden
	// missigned: its user-id is another user's. That says nothing about its address.
	verdictMissigned
	// unknown: the result says nothing about the message. It stays, and is published again.
	verdictUnknown
)

// judge returns what a result means. A message's own faults are final. Missing resources or
// refusals of the broker may be temporary.
func judge(err error) verdict {
	var bad *argument.Error
	var of *client.Error
	switch {
	case err == nil:
		return verdictAccepted
	case errors.As(err, &bad), errors.Is(err, client.ErrTooLarge):
		return verdictUnfit
	case errors.Is(err, client.ErrUserID) && client.SafeToRetry(err):
		return verdictMissigned
	case errors.Is(err, client.ErrUnroutable), errors.Is(err, client.ErrNotFound),
		errors.Is(err, client.ErrRefused) && !client.SafeToRetry(err):
		return verdictUntaken
	case errors.Is(err, client.ErrUnauthorized):
		// The relay's link has no address, so this is about the message's.
		return verdictForbidden
	case errors.Is(err, client.ErrOutcomeUnknown) && errors.As(err, &of) && of.Condition != "" && !errors.As(of.Err, new(*client.Error)):
		// The broker has closed the link three times after it got this message, and didn't just
		// refuse another link.
		return verdictForbidden
	}
	return verdictUnknown
}

// note files the result of a record.
func (o *outcome) note(rec *record, err error) verdict {
	is := judge(err)
	switch is {
	case verdictAccepted:
		o.accepted = append(o.accepted, rec)
	case verdictUnknown:
		// An error of the relay's link is no message's fault.
		if errors.Is(err, client.ErrRefused) || errors.Is(err, client.ErrSessionLimit) {
			o.link = err
		}
	default:
		o.failed = append(o.failed, &failure{rec: rec, err: err, is: is, final: is == verdictUnfit, alone: is == verdictForbidden})
	}
	return is
}

// continues reports whether later messages with the same key may be published: this one was
// accepted, or is set aside.
func (is verdict) continues() bool { return is == verdictAccepted || is == verdictUnfit }

// decide sets aside messages that have failed for too long.
func (o *outcome) decide(after time.Duration) {
	for _, f := range o.failed {
		f.final = f.final || f.rec.failedFor != nil && *f.rec.failedFor >= after.Seconds()
	}
}

func (o *outcome) join(other outcome) {
	o.accepted = append(o.accepted, other.accepted...)
	o.failed = append(o.failed, other.failed...)
	if other.link != nil {
		o.link = other.link
	}
}

// lonely is how many messages are tried on separate links at once.
const lonely = 4

// way is how a record is published.
type way int

const (
	wayTogether way = iota
	wayNotNow
	wayAlone     // on a separate link
	wayTryGate   // like alone, for all messages with its address
	wayTrySigner // like alone, for all messages with its user-id
)

// choose returns how a record is published.
func (r *Relay) choose(rec *record) (way, error) {
	if err := rec.decode(); err != nil {
		return wayTogether, err
	}
	if user := rec.decoded.Properties.UserID; len(user) > 0 {
		switch waits, tries, refused := r.signers.ask(string(user)); {
		case refused != nil:
			return wayTogether, refused
		case waits:
			return wayNotNow, nil
		case tries:
			return wayTrySigner, nil
		}
	}
	if r.waits.alone(rec.id) {
		return wayAlone, nil
	}
	switch waits, tries := r.gates.ask(rec.address); {
	case waits:
		return wayNotNow, nil
	case tries:
		return wayTryGate, nil
	}
	return wayTogether, nil
}

// publishAll publishes records in parallel.
func (r *Relay) publishAll(ctx context.Context, p *client.Publisher[*client.Message], recs []*record) outcome {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.PublishTimeout)
	defer cancel()
	var o outcome
	var trying sync.WaitGroup
	var mu sync.Mutex
	note := func(rec *record, err error) {
		mu.Lock()
		defer mu.Unlock()
		r.note(&o, rec, err)
	}
	ms := make([]*client.Message, 0, len(recs))
	sent := make([]*record, 0, len(recs))
	for _, rec := range recs {
		switch way, err := r.choose(rec); {
		case err != nil:
			note(rec, err)
		case way == wayTogether:
			ms, sent = append(ms, rec.decoded), append(sent, rec)
		case way != wayNotNow:
			trying.Go(func() { note(rec, r.try(ctx, rec, way)) })
		}
	}
	err := p.PublishAll(ctx, ms)
	trying.Wait()
	var batch *client.BatchError
	whole := err != nil && !errors.As(err, &batch)
	at := 0
	for i, rec := range sent {
		switch {
		case whole:
			note(rec, err)
		case batch != nil && at < len(batch.Failed) && batch.Failed[at].Index == i:
			note(rec, batch.Failed[at].Err)
			at++
		default:
			note(rec, nil)
		}
	}
	return o
}

// publishOne publishes a record and waits for the confirmation. It reports whether later ones
// with its key may be published.
func (r *Relay) publishOne(ctx context.Context, p *client.Publisher[*client.Message], rec *record, o *outcome) bool {
	way, err := r.choose(rec)
	switch {
	case err != nil:
	case way == wayNotNow:
		return false
	case way == wayTogether:
		err = p.Publish(ctx, rec.decoded)
	default:
		err = r.try(ctx, rec, way)
	}
	return r.note(o, rec, err).continues()
}

// note files the result of a record. If the broker forbids the message, the next similar one
// shows what is to blame.
func (r *Relay) note(o *outcome, rec *record, err error) verdict {
	is := o.note(rec, err)
	switch {
	case is == verdictMissigned:
		if user := string(rec.decoded.Properties.UserID); r.signers.ok(user) {
			r.signers.tried(user, is, err)
		}
	case is == verdictForbidden && !r.waits.alone(rec.id):
		r.gates.refuse(rec.address, rec.id, err)
	}
	return is
}

// try publishes a message on a separate link.
func (r *Relay) try(ctx context.Context, rec *record, way way) (err error) {
	defer func() {
		switch is := judge(err); way {
		case wayTrySigner:
			r.signers.tried(string(rec.decoded.Properties.UserID), is, err)
		case wayTryGate:
			r.gates.tried(rec.address, rec.id, is, err)
		}
	}()
	select {
	case r.lonely <- struct{}{}:
		defer func() { <-r.lonely }()
	case <-ctx.Done():
		return ctx.Err()
	}
	p, err := client.NewPublisher[*client.Message](ctx, r.conn, address.Address{}, client.PublisherConfig{Pending: 1})
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = p.Close(closing)
	}()
	return p.Publish(ctx, rec.decoded)
}
