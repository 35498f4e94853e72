// Package typemux hands the messages of a queue that carries several types to a handler
// for each type.
//
//	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{
//		"order.placed":   client.JSON(placed),
//		"order.canceled": client.JSON(canceled),
//	}})
//	err := conn.Consume(ctx, "orders", retry.With(policy)(mux), client.ConsumerConfig{})
//
// The type is the message's property subject, unless Config.Type says otherwise. A message
// of an unknown type goes to Config.Fallback. Without one it is dead-lettered with
// ReasonUnknownType: it would fail each time, so it isn't retried.
package typemux

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// ReasonUnknownType is the reason of a message that is dead-lettered because no handler is
// registered for its type.
const ReasonUnknownType client.Reason = "unknown-type"

// Config configures a mux.
type Config struct {
	// Handlers has a handler for each type. "" is the type of messages without one.
	Handlers map[string]client.Handler
	// Type returns a delivery's type. It is called by many goroutines at once. Default:
	// subject. See Property.
	Type func(*client.Delivery) string
	// Fallback, if not nil, handles messages of all other types.
	Fallback client.Handler
}

// subject is the default Config.Type: the property subject, or "".
func subject(d *client.Delivery) string {
	if p := d.Message().Properties; p != nil && p.Subject != nil {
		return *p.Subject
	}
	return ""
}

// Property returns a Config.Type that reads the application property key. Its result is ""
// for a message without it, and for one where it isn't a string.
func Property(key string) func(*client.Delivery) string {
	return func(d *client.Delivery) string {
		s, _ := d.Property(key).(string)
		return s
	}
}

// New returns the handler. It keeps a copy of cfg.Handlers. Without any handler, or with
// one that is nil, no consumer starts; the error is an *argument.Error. When the consumer
// starts, all handlers are prepared, in the order of their types.
func New(cfg Config) client.Handler {
	m := &mux{Config: cfg}
	m.Handlers = maps.Clone(cfg.Handlers)
	if m.Type == nil {
		m.Type = subject
	}
	at := argument.Root("typemux.Config").Field("Handlers")
	if len(m.Handlers) == 0 {
		m.invalid = argument.At(at, argument.CodeMissing, nil, "has no handlers", "register a handler for each type")
	}
	for _, name := range m.types() {
		if m.Handlers[name] == nil {
			m.invalid = argument.At(at, argument.CodeMissing, name, "has a nil handler", "register a handler, or leave the type out")
		}
	}
	return m
}

type mux struct {
	Config
	invalid error
}

func (m *mux) types() []string { return slices.Sorted(maps.Keys(m.Handlers)) }

// Prepare prepares all handlers.
func (m *mux) Prepare(ctx context.Context, s client.Start) error {
	if m.invalid != nil {
		return m.invalid
	}
	for _, name := range m.types() {
		if err := client.Prepare(ctx, m.Handlers[name], s); err != nil {
			return fmt.Errorf("handler of type %q: %w", name, err)
		}
	}
	if m.Fallback != nil {
		return client.Prepare(ctx, m.Fallback, s)
	}
	return nil
}

// Handle calls the handler of d's type.
func (m *mux) Handle(ctx context.Context, d *client.Delivery) error {
	if m.invalid != nil {
		return client.Requeue{Failed: true, Err: m.invalid} // the message isn't at fault
	}
	name := m.Type(d)
	if h, ok := m.Handlers[name]; ok {
		return h.Handle(ctx, d)
	}
	if m.Fallback != nil {
		return m.Fallback.Handle(ctx, d)
	}
	return client.DeadLetter{Reason: ReasonUnknownType, Err: fmt.Errorf("no handler is registered for the type %.100q", name)}
}
