// Package typemux passes each message of a queue with several message types to the handler for
// its type.
//
//	mux := typemux.New(typemux.Config{Handlers: map[string]client.Handler{
//		"order.placed":   client.JSON(placed),
//		"order.canceled": client.JSON(canceled),
//	}})
//	err := conn.Consume(ctx, "orders", retry.With(policy)(mux), client.ConsumerConfig{})
//
// The type is the message's property subject or, if it has none, the property type of AMQP 0-9-1.
// [Config.Type] can return another one. A message of an
// unknown type goes to [Config.Fallback]. Without a Fallback, it is dead-lettered at once with
// client.ReasonUnknownType, because a retry would fail the same way.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package typemux

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Config configures [New]. Handlers is required.
type Config struct {
	// Handlers has a handler for each type. "" is the type of messages without a type.
	Handlers map[string]client.Handler
	// Type returns a delivery's type. It must be safe for concurrent use. Default: the property
	// subject or, if the message has none, the property type of a message that was published
	// over AMQP 0-9-1. See [Property].
	Type func(*client.Delivery) string
	// Fallback, if not nil, handles messages of all other types. Default: dead-letter them with
	// client.ReasonUnknownType.
	Fallback client.Handler
}

// typeOf091 is the annotation in which RabbitMQ delivers the property type of AMQP 0-9-1.
const typeOf091 = "x-basic-type"

// subjectOrType is the default Config.Type.
func subjectOrType(d *client.Delivery) string {
	if p := d.Message().Properties; p != nil && p.Subject != nil {
		return *p.Subject
	}
	s, _ := d.Annotation(typeOf091).(string)
	return s
}

// Property returns a [Config.Type] that reads the type from the application property with the
// given key. The type is "" if the message has no such property, or if it isn't a string.
func Property(key string) func(*client.Delivery) string {
	return func(d *client.Delivery) string {
		s, _ := d.Property(key).(string)
		return s
	}
}

// New returns the handler. It copies cfg.Handlers. If there is no handler, or one is nil,
// Consume returns an *argument.Error when it starts. When the consumer starts, New's handler
// calls the Prepare of all handlers, in the order of their types.
func New(cfg Config) client.Handler {
	m := &mux{Config: cfg}
	m.Handlers = maps.Clone(cfg.Handlers)
	if m.Type == nil {
		m.Type = subjectOrType
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
	return client.DeadLetter{Reason: client.ReasonUnknownType, Err: fmt.Errorf("no handler is registered for the type %.100q", name)}
}
