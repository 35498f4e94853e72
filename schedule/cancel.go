package schedule

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/middleware/dedupe"
)

// Store remembers which messages were cancelled. Its methods must be safe for concurrent
// use. OnDedupe makes one of a dedupe.Store, such as dedupe.NewMemory for a single process, or
// that of package redisstore.
type Store interface {
	// Cancel marks id as cancelled until the time until, or for longer.
	Cancel(ctx context.Context, id string, until time.Time) error
	// Cancelled reports whether id is marked. It sees each Cancel that has returned.
	Cancelled(ctx context.Context, id string) (bool, error)
}

// keep is how long a mark outlives the time when its message is due. That is for messages
// that are late, because of an outage or retries.
const keep = 30 * 24 * time.Hour

// certain is how far this host's clock may be behind the broker's for Cancel to be right
// about a message that is due.
const certain = time.Second

// Cancel marks a message that is scheduled as cancelled. The message itself stays in the
// ladder; when it is due, With and Dispatch drop it. So it must be them that the message
// comes to, with the same store.
//
// inTime reports whether the mark was set before the message was due: then no handler behind
// With is called for it. If it is false, the message may have been handled, and a handler may
// run. A handler that hasn't started isn't called, nor is one for a retry.
//
// s is what Publish has returned. ID and Due alone count, so both may come from a database.
// An id that isn't scheduled is marked just as well: nobody can ask the broker for it. Don't
// schedule another message with the id of a cancelled one: it is dropped for 30 days after
// s.Due.
//
// After an error the mark may or may not be set; call Cancel again. An *argument.Error says that
// nothing was marked.
func Cancel(ctx context.Context, store Store, s Scheduled) (inTime bool, err error) {
	switch {
	case isNil(store):
		return false, argument.New("store", nil, "is nil", "give the Store that schedule.With has")
	case s.ID == "" || len(s.ID) > maxID:
		return false, argument.New("Scheduled.ID", s.ID, "isn't an id of 1 to 512 bytes", "use what Publish has returned")
	case s.Due.IsZero():
		return false, argument.New("Scheduled.Due", nil, "is the zero time", "use what Publish has returned")
	case time.Until(s.Due) > maxDelay+certain:
		return false, argument.New("Scheduled.Due", s.Due.UTC().Format(time.RFC3339), "is more than 366 days ahead", "use what Publish has returned")
	}
	until := s.Due
	if now := time.Now(); until.Before(now) {
		until = now
	}
	if err := store.Cancel(ctx, s.ID, until.Add(keep)); err != nil {
		return false, fmt.Errorf("schedule: cancelling %q: %w", s.ID, err)
	}
	return time.Until(s.Due) > certain, nil
}

// Config configures With.
type Config struct {
	// Store says which messages were cancelled. It is required.
	Store Store
	// OnCancelled, if not nil, is called for each message that is dropped.
	OnCancelled func(*client.Delivery)
}

// With returns a middleware that accepts cancelled messages without calling the handler.
// Messages that weren't scheduled pass it without a question to the Store. If the Store
// fails the message fails with its error, and isn't handled. Put it inside of retry.With, so
// that a message is retried then, and the retries of a cancelled one end.
//
// With a bad Config no consumer starts; the error is an *argument.Error.
func With(cfg Config) client.Middleware {
	return func(h client.Handler) client.Handler { return &handler{inner: h, cfg: cfg} }
}

type handler struct {
	inner client.Handler
	cfg   Config
}

// Prepare checks the Config, and calls the handler's own.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := h.check(); err != nil {
		return err
	}
	return client.Prepare(ctx, h.inner, s)
}

func (h *handler) check() error {
	switch {
	case h.inner == nil:
		return argument.New("handler", nil, "is nil", "pass a Handler to schedule's Middleware")
	case isNil(h.cfg.Store):
		return argument.New("schedule.Config.Store", nil, "is nil", "give the Store that schedule.Cancel marks messages in, such as schedule.OnDedupe(dedupe.NewMemory(0))")
	}
	return nil
}

// Handle calls the handler unless d was cancelled.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if err := h.check(); err != nil {
		return client.Requeue{Failed: true, Err: err}
	}
	gone, err := cancelled(ctx, h.cfg.Store, d)
	if err != nil {
		return err
	}
	if !gone {
		return h.inner.Handle(ctx, d)
	}
	if h.cfg.OnCancelled != nil {
		h.cfg.OnCancelled(d)
	}
	return nil
}

// storeTimeout is how long a Store has for an answer.
const storeTimeout = 5 * time.Second

// cancelled asks the store about a message, if it was scheduled.
func cancelled(ctx context.Context, store Store, d *client.Delivery) (bool, error) {
	if d.Annotation(annotation.Due) == nil || d.Message().Properties == nil {
		return false, nil
	}
	id, ok := d.Message().Properties.MessageID.(string)
	if !ok {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	gone, err := store.Cancelled(ctx, id)
	if err != nil {
		return false, fmt.Errorf("schedule: asking whether the message was cancelled: %w", err)
	}
	return gone, nil
}

// OnDedupe returns a Store that keeps its marks in s, beside those of middleware/dedupe, if
// that has the same: package redisstore has one on Redis, for workers in several processes.
// A question is two round trips. A dedupe.Memory forgets the oldest marks beyond its size.
func OnDedupe(s dedupe.Store) Store { return onDedupe{s} }

type onDedupe struct{ s dedupe.Store }

// owner is who asks. A claim is taken by all who ask, and means nothing.
const owner = "schedule"

func dedupeKey(id string) string { return "cancelled/" + id }

var errNoStore = errors.New("the dedupe.Store is nil")

func (o onDedupe) Cancel(ctx context.Context, id string, until time.Time) error {
	if o.s == nil {
		return errNoStore
	}
	return o.s.Done(ctx, dedupeKey(id), owner, time.Until(until))
}

func (o onDedupe) Cancelled(ctx context.Context, id string) (bool, error) {
	if o.s == nil {
		return false, errNoStore
	}
	state, err := o.s.Claim(ctx, dedupeKey(id), owner, time.Second)
	if err != nil || state != dedupe.StateClaimed {
		return state == dedupe.StateDone, err
	}
	return false, o.s.Release(ctx, dedupeKey(id), owner)
}

// isNil reports whether s is nil, or holds a nil pointer.
func isNil(s Store) bool {
	v := reflect.ValueOf(s)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}
