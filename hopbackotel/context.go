package hopbackotel

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
)

// annotationAttempt is the annotation that leads from an attempt to the next one. Each
// failed attempt overwrites it, in the copy of StrategyRepublish and in the modified
// outcome of the other strategies, and so in a dead letter. It is a string:
//
//	traceparent;time;delay;strategy
//
// traceparent is that of the attempt's span (W3C). time is when the message went to wait
// or was dead-lettered, and delay is how long it was to wait, in milliseconds, the former since
// 1970. strategy is the Reason of the instrument.Decision.
const annotationAttempt = "x-opt-hopback-attempt"

// fieldBaggage is W3C's. It says nothing about a trace.
const fieldBaggage = "baggage"

// carrier writes and reads the context of a message's creation.
type carrier struct {
	by     propagation.TextMapPropagator // nil: propagation.TraceContext, without what that allocates
	fields []string
}

func carrierOf(by propagation.TextMapPropagator) carrier {
	if _, ok := by.(propagation.TraceContext); ok || by == nil {
		return carrier{fields: propagation.TraceContext{}.Fields()}
	}
	return carrier{by: by, fields: by.Fields()}
}

// marked says whether a message has anything that the propagator reads.
func (c carrier) marked(m *client.Message) bool {
	return slices.ContainsFunc(c.fields, func(field string) bool { return text(m, field) != "" })
}

// inject writes the context into a message. A valid one that the message has stays, and
// the span is linked to it. So does baggage that the message has.
func (c carrier) inject(ctx context.Context, span trace.Span, s instrument.Sending) {
	if c.marked(s.Message()) {
		if _, creation := c.creation(ctx, s.Message()); creation.IsValid() {
			if span.IsRecording() {
				span.AddLink(link(creation, linkCreation))
			}
			return
		}
		for _, f := range c.fields { // nothing of an invalid one, such as its tracestate, is for ours
			if _, there := s.Message().ApplicationProperties[f]; there && f != fieldBaggage {
				s.SetProperty(f, "")
			}
		}
	}
	if c.by != nil {
		c.by.Inject(ctx, sending{s, s.Message()})
		return
	}
	sc := span.SpanContext()
	if !sc.IsValid() {
		return
	}
	s.SetProperty("traceparent", traceparent(sc))
	if sc.TraceState().Len() > 0 {
		s.SetProperty("tracestate", sc.TraceState().String())
	}
}

// creation is the context of a message's creation. with is ctx with all that the
// propagator has read.
func (c carrier) creation(ctx context.Context, m *client.Message) (with context.Context, creation trace.SpanContext) {
	if c.by == nil {
		if header := text(m, "traceparent"); header != "" {
			creation = parse(header)
		}
		if state := text(m, "tracestate"); state != "" && creation.IsValid() {
			if s, err := trace.ParseTraceState(state); err == nil {
				creation = creation.WithTraceState(s)
			}
		}
		return ctx, creation
	}
	// Of ctx only the values that the propagator adds are wanted, and not a span.
	with = c.by.Extract(trace.ContextWithSpanContext(ctx, trace.SpanContext{}), sending{m: m})
	return with, trace.SpanContextFromContext(with)
}

// text finds a field where RabbitMQ's Java client looks: in the annotation first. An
// annotation that is no traceparent hides no property.
func text(m *client.Message, field string) string {
	if len(m.Annotations) > 0 {
		var key any = "x-opt-" + field
		if s, ok := m.Annotations[key].(string); ok && s != "" && (field != "traceparent" || parse(s).IsValid()) {
			return s
		}
	}
	s, _ := m.ApplicationProperties[field].(string)
	return s
}

// parse reads a traceparent that anybody may have written.
func parse(header string) (sc trace.SpanContext) {
	if len(header) < 55 || len(header) > 55 && header[55] != '-' || header[2] != '-' || header[35] != '-' || header[52] != '-' {
		return sc
	}
	var version, flags [1]byte
	var c trace.SpanContextConfig
	for _, part := range []struct {
		to   []byte
		from string
	}{{version[:], header[:2]}, {c.TraceID[:], header[3:35]}, {c.SpanID[:], header[36:52]}, {flags[:], header[53:55]}} {
		for i := range len(part.from) {
			if part.from[i] >= 'A' && part.from[i] <= 'F' {
				return sc
			}
		}
		for i := range part.to {
			hi, lo := nibble(part.from[2*i]), nibble(part.from[2*i+1])
			if hi > 15 || lo > 15 {
				return sc
			}
			part.to[i] = hi<<4 | lo
		}
	}
	if version[0] == 0xff || version[0] == 0 && len(header) != 55 {
		return sc
	}
	c.TraceFlags = trace.TraceFlags(flags[0]) & (trace.FlagsSampled | trace.FlagsRandom)
	c.Remote = true
	return trace.NewSpanContext(c)
}

func nibble(c byte) byte {
	switch {
	case c >= '0' && c <= '9':
		return c - '0'
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10
	}
	return 0xff
}

// traceparent is sc as the W3C wants it.
func traceparent(sc trace.SpanContext) string {
	var b [55]byte
	copy(b[:], "00-")
	traceID, spanID := sc.TraceID(), sc.SpanID()
	hex.Encode(b[3:], traceID[:])
	b[35] = '-'
	hex.Encode(b[36:], spanID[:])
	b[52] = '-'
	hex.Encode(b[53:], []byte{byte(sc.TraceFlags() & (trace.FlagsSampled | trace.FlagsRandom))})
	return string(b[:])
}

// before is the attempt before.
type before struct {
	sc     trace.SpanContext
	at     time.Time
	delay  time.Duration
	reason string
}

func (b before) String() string {
	return fmt.Sprintf("%s;%d;%d;%s", traceparent(b.sc), b.at.UnixMilli(), b.delay.Milliseconds(), b.reason)
}

// beforeOf reads an annotation that anybody may have written. It returns false if there
// was no attempt before.
func beforeOf(m *client.Message) (b before, ok bool) {
	s, _ := m.Annotations[annotationAttempt].(string)
	if s == "" || len(s) > 1024 {
		return b, false
	}
	parts := strings.SplitN(s, ";", 4)
	if len(parts) != 4 {
		return b, false
	}
	at, err := strconv.ParseInt(parts[1], 10, 64)
	delay, err2 := strconv.ParseInt(parts[2], 10, 64)
	const century = 100 * 365 * 24 * time.Hour
	if err != nil || err2 != nil || delay < 0 || delay > century.Milliseconds() {
		return b, false
	}
	b = before{sc: parse(parts[0]), at: time.UnixMilli(at), delay: time.Duration(delay) * time.Millisecond, reason: valid(parts[3])}
	return b, true // without a valid context, too: metrics may be on, and traces off
}

// sending is a message as a propagator's carrier: to write to, or to read from.
type sending struct {
	instrument.Sending
	m *client.Message
}

func (s sending) Get(key string) string { return text(s.m, key) }

// Set leaves baggage that the message's sender has given it.
func (s sending) Set(key, value string) {
	if key == fieldBaggage && text(s.m, key) != "" {
		return
	}
	s.SetProperty(key, value)
}

func (s sending) Keys() []string {
	keys := make([]string, 0, len(s.m.ApplicationProperties))
	for k := range s.m.ApplicationProperties {
		keys = append(keys, k)
	}
	return keys
}

func messageID(m *client.Message) string {
	if m.Properties == nil || m.Properties.MessageID == nil {
		return ""
	}
	if s, ok := m.Properties.MessageID.(string); ok {
		return valid(s)
	}
	return valid(fmt.Sprint(m.Properties.MessageID))
}

// valid makes a string fit for an attribute.
func valid(s string) string {
	if len(s) > 1024 {
		s = s[:1024]
	}
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "?")
}
