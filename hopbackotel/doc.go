// Package hopbackotel adds OpenTelemetry traces and metrics to a client.Conn. A trace follows a
// message through all its attempts and delays, to the dead-letter queue and back.
//
//	cfg := client.Config{}
//	if err := hopbackotel.Instrument(&cfg, hopbackotel.Config{}); err != nil { ... }
//	conn, err := client.Connect(ctx, url, cfg)
//
// The package follows version 1.43.0 of the semantic conventions for messaging, which are still
// in development. docs/observability.md lists all spans, attributes, and metrics.
//
// It depends only on the OpenTelemetry API. Your program chooses the SDK and the exporters.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package hopbackotel

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
)

// scopeName is the name of the instrumentation scope of all spans and metrics. The
// scope's schema URL names the version of the conventions.
const scopeName = "github.com/hopback/hopback/hopbackotel"

// Config configures [Instrument]. The zero value is ready to use.
type Config struct {
	// TracerProvider creates the spans. Default: the global one.
	TracerProvider trace.TracerProvider
	// MeterProvider creates the metrics. Default: the global one.
	MeterProvider metric.MeterProvider
	// Propagator writes the creation context of a message into its application properties, and
	// reads it from there. Default: the global one at the time of client.Connect, or
	// propagation.TraceContext if none is set.
	Propagator propagation.TextMapPropagator
	// OneTrace puts all attempts of a message into the trace of its creator: each attempt
	// becomes a child of the span that created the message. By default, each attempt is a
	// separate trace, linked to the creation and to the previous attempt.
	OneTrace bool
	// MaxNames limits metric cardinality: it is how many queues, destinations, error types, and
	// reasons metrics distinguish, each. All others are counted together as "_other". Default:
	// 1,000.
	MaxNames int
}

// Instrument sets cfg.Instrument, so that each Conn opened with cfg is traced and measured. Call
// it before [client.Connect]. Several Conns with one cfg share their metrics.
//
// The error is an *argument.Error: cfg is nil or already has an Instrument, or c is invalid.
func Instrument(cfg *client.Config, c Config) error {
	switch {
	case cfg == nil:
		return argument.New("cfg", nil, "is nil", "pass the client.Config for client.Connect")
	case cfg.Instrument != nil:
		return argument.New("cfg.Instrument", nil, "is set already", "use one Instrument per client.Config")
	case c.MaxNames < 0:
		return argument.New("Config.MaxNames", c.MaxNames, "is negative", "use 1 or more, or 0 for the default of 1,000")
	}
	if c.MaxNames == 0 {
		c.MaxNames = 1000
	}
	if c.TracerProvider == nil {
		c.TracerProvider = otel.GetTracerProvider()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	in := &follower{
		tracer:  c.TracerProvider.Tracer(scopeName, trace.WithSchemaURL(semconv.SchemaURL)),
		oneway:  !c.OneTrace,
		numbers: newNumbers(c.MeterProvider.Meter(scopeName, metric.WithSchemaURL(semconv.SchemaURL)), c.MaxNames),
	}
	in.by = c.Propagator
	in.propagate()
	in.queues = places[string, queue]{most: c.MaxNames, make: in.newQueue}
	in.servers = places[string, server]{most: c.MaxNames, make: newServer}
	in.targets = places[targetKey, target]{most: c.MaxNames, make: in.newTarget}
	cfg.Instrument = in
	return nil
}

// follower is the client's Instrument.
type follower struct {
	tracer  trace.Tracer
	oneway  bool                          // attempts are linked to the creation, and not its children
	by      propagation.TextMapPropagator // nil: the global one
	current atomic.Pointer[carrier]
	numbers *numbers
	queues  places[string, queue]
	targets places[targetKey, target]
	servers places[string, server]
}

func (in *follower) Connect(stats func() instrument.Stats) (closed func()) {
	in.propagate() // a program may set the global one behind Instrument
	return in.numbers.watch(stats)
}

// propagate chooses the propagator.
func (in *follower) propagate() {
	by := in.by
	if by == nil {
		// That of a program that has set none has no fields.
		if by = otel.GetTextMapPropagator(); len(by.Fields()) == 0 {
			by = nil
		}
	}
	c := carrierOf(by)
	in.current.Store(&c)
}

// carrier writes and reads the context of a message's creation.
func (in *follower) carrier() *carrier { return in.current.Load() }

func (in *follower) SettledRange(n int) { in.numbers.ranges.Record(context.Background(), int64(n)) }

func (in *follower) Publish(ctx context.Context, s instrument.Sending) instrument.Publication {
	t := in.targets.get(targetKey{s.To(), s.PerMessage()})
	p := publications.Get().(*publication)
	p.in, p.target, p.began = in, t, time.Now()
	p.ctx, p.span = in.tracer.Start(ctx, t.publish, t.sendOptions...)
	in.describe(p.span, t, s)
	in.carrier().inject(p.ctx, p.span, s)
	return p
}

// publications are those that aren't in use: Published is called once, and last.
var publications = sync.Pool{New: func() any { return new(publication) }}

// publication is a message of Publish.
type publication struct {
	in     *follower
	target *target
	ctx    context.Context
	span   trace.Span
	began  time.Time
}

func (p *publication) Published(err error) {
	kind := p.in.numbers.errorType(err)
	p.target.sent.count(kind)
	p.target.took.record(p.ctx, kind, time.Since(p.began))
	failed(p.span, kind, err)
	p.span.End()
	*p = publication{}
	publications.Put(p)
}

func (in *follower) PublishAll(ctx context.Context, to address.Address, n int) instrument.Batch {
	t := in.targets.get(targetKey{to, to.IsZero()})
	b := &batch{in: in, target: t, caller: ctx, began: time.Now()}
	b.ctx, b.span = in.tracer.Start(ctx, t.publish, t.batchOptions...)
	if b.span.IsRecording() {
		b.span.SetAttributes(semconv.MessagingBatchMessageCount(n))
	}
	return b
}

// batch is a PublishAll: a span for the creation of each message, and one for sending all
// of them, which is linked to the others.
type batch struct {
	in     *follower
	target *target
	caller context.Context
	ctx    context.Context
	span   trace.Span
	began  time.Time
}

func (b *batch) Publish(s instrument.Sending) instrument.Publication {
	t := b.target
	if s.PerMessage() {
		t = b.in.targets.get(targetKey{s.To(), true})
	}
	ctx, span := b.in.tracer.Start(b.caller, t.create, t.createOptions...)
	b.in.describe(span, t, s)
	b.in.carrier().inject(ctx, span, s)
	span.End()
	if b.span.IsRecording() {
		b.span.SetAttributes(b.in.servers.get(s.Server()).attributes...)
		b.span.AddLink(trace.Link{SpanContext: span.SpanContext()})
	}
	return member{b, t}
}

// member is a message of a batch.
type member struct {
	batch  *batch
	target *target
}

func (m member) Published(err error) {
	m.target.sent.count(m.batch.in.numbers.errorType(err))
}

func (b *batch) Published(err error) {
	kind := b.in.numbers.errorType(err)
	b.target.took.record(b.ctx, kind, time.Since(b.began))
	failed(b.span, kind, err)
	b.span.End()
}
