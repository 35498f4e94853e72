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

// Store remembers which messages were canceled. Pass the same one to [Cancel] and to [With] or
// [Dispatch]. [OnDedupe] makes one from a dedupe.Store, such as dedupe.NewMemory for a single
// process, or package redisstore for several. Its methods must be safe for concurrent use.
type Store interface {
	// Cancel marks id as canceled until the time until, or for longer.
	Cancel(ctx context.Context, id string, until time.Time) error
	// Canceled reports whether id is marked. It must see each Cancel that has returned.
	Canceled(ctx context.Context, id string) (bool, error)
}

// keep is how long a mark is kept after the message's due time, for messages that are late
// because of an outage or retries.
const keep = 30 * 24 * time.Hour

// certain is how far this host's clock may be behind the broker's while Cancel is still right
// about a due message.
const certain = time.Second

// Cancel cancels a scheduled message: it marks the message in store, and [With] and [Dispatch]
// drop a marked message when it is due. So the message must reach one of them, with the same
// store. The message itself stays in the ladder until then.
//
// s is what Publish returned. Only ID and Due count, so you can load both from a database. inTime
// reports whether the mark was set before the message was due. If it is true, no handler behind
// With is called for the message. If it is false, the message may have been handled, or its
// handler may be running; a handler that hasn't started isn't called any more, also not for a
// retry.
//
// After an error the mark may or may not be set; call Cancel again. After an *argument.Error it
// isn't set.
//
//   - Cancel also marks an id that was never scheduled: nobody can ask the broker for it.
//   - Don't schedule another message with the id of a canceled one: it is dropped for 30 days
//     after s.Due.
func Cancel(ctx context.Context, store Store, s Scheduled) (inTime bool, err error) {
	switch {
	case isNil(store):
		return false, argument.New("store", nil, "is nil", "pass the Store that schedule.With uses")
	case s.ID == "" || len(s.ID) > maxID:
		return false, argument.New("Scheduled.ID", s.ID, "isn't an id of 1 to 512 bytes", "use the value that Publish returned")
	case s.Due.IsZero():
		return false, argument.New("Scheduled.Due", nil, "is the zero time", "use the value that Publish returned")
	case time.Until(s.Due) > maxDelay+certain:
		return false, argument.New("Scheduled.Due", s.Due.UTC().Format(time.RFC3339), "is more than 366 days ahead", "use the value that Publish returned")
	}
	until := s.Due
	if now := time.Now(); until.Before(now) {
		until = now
	}
	if err := store.Cancel(ctx, s.ID, until.Add(keep)); err != nil {
		return false, fmt.Errorf("schedule: canceling %q: %w", s.ID, err)
	}
	return time.Until(s.Due) > certain, nil
}

// Config configures [With]. Store is required.
type Config struct {
	// Store knows which messages were canceled. Required.
	Store Store
	// OnCanceled is called for each message that is dropped. Default: nil.
	OnCanceled func(*client.Delivery)
}

// With returns a middleware that acknowledges canceled messages without calling the handler. Put
// it inside retry.With, so that an error of the Store leads to a retry, and so that the retries
// of a canceled message stop.
//
// If cfg is invalid, no consumer starts, and the error is an *argument.Error.
//
//   - Messages that weren't scheduled pass without a query to the Store.
//   - If the Store returns an error, so does the handler, without handling the message.
func With(cfg Config) client.Middleware {
	return func(h client.Handler) client.Handler { return &handler{inner: h, cfg: cfg} }
}

type handler struct {
	inner client.Handler
	cfg   Config
}

// Prepare checks the Config, and calls the handler's Prepare.
func (h *handler) Prepare(ctx context.Context, s client.Start) error {
	if err := h.check(); err != nil {
		return err
	}
	return client.Prepare(ctx, h.inner, s)
}

func (h *handler) check() error {
	switch {
	case h.inner == nil:
		return argument.New("handler", nil, "is nil", "pass a handler to the middleware of schedule.With")
	case isNil(h.cfg.Store):
		return argument.New("schedule.Config.Store", nil, "is nil", "set the Store that you pass to schedule.Cancel, such as schedule.OnDedupe(dedupe.NewMemory(0))")
	}
	return nil
}

// Handle calls the handler unless d was canceled.
func (h *handler) Handle(ctx context.Context, d *client.Delivery) error {
	if err := h.check(); err != nil {
		return client.Requeue{Failed: true, Err: err}
	}
	gone, err := canceled(ctx, h.cfg.Store, d)
	if err != nil {
		return err
	}
	if !gone {
		return h.inner.Handle(ctx, d)
	}
	if h.cfg.OnCanceled != nil {
		h.cfg.OnCanceled(d)
	}
	return nil
}

// storeTimeout limits each query to a Store.
const storeTimeout = 5 * time.Second

// canceled asks the store about a message, if it was scheduled.
func canceled(ctx context.Context, store Store, d *client.Delivery) (bool, error) {
	if d.Annotation(annotation.Due) == nil || d.Message().Properties == nil {
		return false, nil
	}
	id, ok := d.Message().Properties.MessageID.(string)
	if !ok {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	gone, err := store.Canceled(ctx, id)
	if err != nil {
		return false, fmt.Errorf("schedule: checking whether the message was canceled: %w", err)
	}
	return gone, nil
}

// OnDedupe returns a Store that keeps its marks in s. s may also be the store of
// middleware/dedupe: package redisstore has one on Redis, for workers in several processes. A
// query takes two round trips. A dedupe.Memory drops the oldest marks when it is full.
func OnDedupe(s dedupe.Store) Store { return onDedupe{s} }

type onDedupe struct{ s dedupe.Store }

// owner is the owner of all claims in queries. A claim is granted to every query, and has no
// effect.
const owner = "schedule"

func dedupeKey(id string) string { return "cancelled/" + id }

var errNoStore = errors.New("the dedupe.Store is nil")

func (o onDedupe) Cancel(ctx context.Context, id string, until time.Time) error {
	if o.s == nil {
		return errNoStore
	}
	return o.s.Done(ctx, dedupeKey(id), owner, time.Until(until))
}

func (o onDedupe) Canceled(ctx context.Context, id string) (bool, error) {
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
