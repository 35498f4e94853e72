package hopbackotel

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/retry"
)

// Attributes of this package, in addition to those of the conventions. Delays are in seconds.
const (
	// attributeAttempt is the number of the attempt that a process span is, from 1.
	attributeAttempt = attribute.Key("hopback.attempt")
	// attributeAsked and attributeHad are the delay that the message was to wait before
	// this attempt, and the one that it waited, by the workers' clocks. attributeCameBy is
	// the strategy of that retry.
	attributeAsked  = attribute.Key("hopback.attempt.delay.asked")
	attributeHad    = attribute.Key("hopback.attempt.delay.had")
	attributeCameBy = attribute.Key("hopback.attempt.strategy")
	// attributeDecision is what follows on the attempt, an instrument.DecisionKind.
	// attributeStrategy or attributeReason, attributeDelay, and attributeWait are the decision's
	// fields: see decided.
	attributeDecision = attribute.Key("hopback.decision")
	attributeStrategy = attribute.Key("hopback.strategy")
	attributeReason   = attribute.Key("hopback.reason")
	attributeDelay    = attribute.Key("hopback.delay.asked")
	attributeWait     = attribute.Key("hopback.delay.granted")
	// attributeOutcome is a settle span's AMQP outcome, an instrument.SettlementKind.
	attributeOutcome = attribute.Key("hopback.outcome")
	// attributeUp says of consumers whether they have a link to their queue, and of requesters
	// whether they can receive replies.
	attributeUp = attribute.Key("hopback.up")
	// attributeLink says what a link leads to: "creation" or "attempt", the one before.
	attributeLink = attribute.Key("hopback.link")
)

const (
	linkCreation = "creation"
	linkAttempt  = "attempt"
)

func link(to trace.SpanContext, what string) trace.Link {
	return trace.Link{SpanContext: to, Attributes: []attribute.KeyValue{attributeLink.String(what)}}
}

// handling is one attempt: a delivery from its handler to its settlement.
type handling struct {
	in       *follower
	queue    *queue
	delivery instrument.Delivery
	ctx      context.Context // with the span, for what belongs to it
	span     trace.Span
	recorded bool
	began    time.Time

	decision instrument.Decision
	forward  forwarding
	settling time.Time
	settled  instrument.Settlement
}

// forwarding is a copy in flight.
type forwarding struct {
	target *target
	began  time.Time
	what   []attribute.KeyValue // nil unless the span is recorded
}

func (in *follower) Handle(ctx context.Context, d instrument.Delivery) (context.Context, instrument.Handling) {
	q := in.queues.get(d.Queue())
	h := &handling{in: in, queue: q, delivery: d, began: time.Now()}
	with, creation := in.carrier().creation(ctx, d.Message())
	last, again := beforeOf(d.Message())
	h.ctx, h.span = in.startProcess(with, q, creation, last)
	had := max(h.began.Sub(last.at), 0)
	if h.recorded = h.span.IsRecording(); h.recorded {
		h.describe(last, again, had)
	}
	q.measured.consumed.count("")
	if again && last.delay > 0 {
		q.measured.late(h.ctx, last.reason, had-last.delay)
	}
	return h.ctx, h
}

// startProcess begins the span of an attempt, with its links or its parent.
func (in *follower) startProcess(ctx context.Context, q *queue, creation trace.SpanContext, last before) (context.Context, trace.Span) {
	parent := trace.SpanContext{}
	if !in.oneway {
		if parent = creation; !parent.IsValid() {
			parent = last.sc
		}
	}
	if parent.IsValid() || trace.SpanContextFromContext(ctx).IsValid() {
		// Consume's own ctx says nothing about the message.
		ctx = trace.ContextWithRemoteSpanContext(ctx, parent)
	}
	opts := q.processOptions
	if creation.IsSampled() || last.sc.IsSampled() {
		// A sampler may read them. Others are only added where they are recorded, as they
		// would cost most of what an attempt costs that isn't sampled.
		opts = append(opts[:len(opts):len(opts)], trace.WithLinks(links(creation, last.sc)...))
		return in.tracer.Start(ctx, q.process, opts...)
	}
	ctx, span := in.tracer.Start(ctx, q.process, opts...)
	if span.IsRecording() {
		for _, l := range links(creation, last.sc) {
			span.AddLink(l)
		}
	}
	return ctx, span
}

func links(creation, last trace.SpanContext) []trace.Link {
	all := make([]trace.Link, 0, 2)
	if creation.IsValid() {
		all = append(all, link(creation, linkCreation))
	}
	if last.IsValid() {
		all = append(all, link(last, linkAttempt))
	}
	return all
}

func (h *handling) describe(last before, again bool, had time.Duration) {
	d := h.delivery
	name, key := received(d)
	all := append(make([]attribute.KeyValue, 0, 14), semconv.MessagingDestinationName(name), attributeAttempt.Int(attemptOf(h.ctx, d)))
	if key != "" {
		all = append(all, semconv.MessagingRabbitMQDestinationRoutingKey(key))
	}
	all = ofMessage(all, d.Message())
	if again {
		all = append(all, attributeAsked.Float64(last.delay.Seconds()), attributeHad.Float64(had.Seconds()), attributeCameBy.String(last.reason))
	}
	h.span.SetAttributes(append(all, h.server()...)...)
}

// attemptOf is the number of an attempt as its handler gets it.
func attemptOf(ctx context.Context, d instrument.Delivery) int {
	if d, ok := d.(*client.Delivery); ok {
		return retry.Attempt(client.WithDelivery(ctx, d))
	}
	return retry.Count(d.Message()) + 1
}

func (h *handling) server() []attribute.KeyValue {
	return h.in.servers.get(h.delivery.Server()).attributes
}

func (h *handling) Decided(d instrument.Decision) { h.decision = d }

func (h *handling) Handled(err error) {
	cause := h.cause(err)
	kind := h.in.numbers.errorType(cause)
	h.queue.measured.processed.record(h.ctx, kind, time.Since(h.began))
	if h.decision.Kind == instrument.DecisionRetry {
		h.queue.measured.retried(h.ctx, h.decision.Reason, kind)
	}
	if h.span.IsRecording() {
		if d := h.decision; d.Kind != "" {
			h.span.SetAttributes(attributeDecision.String(string(d.Kind)), decided(d))
			if d.Attempt > 0 { // retry.Central's is that of the work queue
				h.span.SetAttributes(attributeAttempt.Int(d.Attempt))
			}
			if d.Wait > 0 {
				h.span.SetAttributes(attributeDelay.Float64(d.Delay.Seconds()), attributeWait.Float64(d.Wait.Seconds()))
			}
		}
		failed(h.span, kind, cause)
	}
	h.span.End()
}

// decided is the strategy that a message waits by, or the reason why it doesn't come back.
func decided(d instrument.Decision) attribute.KeyValue {
	switch d.Kind {
	case instrument.DecisionRetry, instrument.DecisionWait:
		return attributeStrategy.String(valid(d.Reason))
	default:
		return attributeReason.String(valid(d.Reason))
	}
}

// cause is what has failed; nil if nothing has.
func (h *handling) cause(err error) error {
	switch h.decision.Kind {
	case instrument.DecisionDiscard, instrument.DecisionWait:
		return nil
	case instrument.DecisionRetry:
		return h.decision.Err
	}
	switch o := client.OutcomeOf(err).(type) {
	case client.DeadLetter:
		if o.Err == nil {
			return errReason(o.Reason)
		}
		return o.Err
	case client.Requeue:
		return o.Err
	case client.Modify:
		return o.Err
	case client.Forward:
		return o.Err
	}
	return nil
}

// errReason is the error of a dead letter without one.
type errReason client.Reason

func (r errReason) Error() string     { return "dead-lettered: " + string(r) }
func (r errReason) ErrorType() string { return string(r) }

func (h *handling) Forwarding(s instrument.Sending) {
	t := h.in.targets.get(targetKey{s.To(), false})
	h.forward = forwarding{target: t, began: time.Now()}
	if h.decision.Kind == "" { // a message of the handler's own; a retry has none to begin with
		h.in.carrier().inject(h.ctx, h.span, s)
	}
	s.SetAnnotation(annotationAttempt, h.before())
	if h.recorded {
		h.forward.what = append(ofMessage(make([]attribute.KeyValue, 0, 6), s.Message()), h.server()...)
		if t.key != "" {
			h.forward.what = append(h.forward.what, semconv.MessagingRabbitMQDestinationRoutingKey(t.key))
		}
	}
}

// before is what the next attempt is to know of this one.
func (h *handling) before() string {
	d := h.decision
	b := before{sc: h.span.SpanContext(), at: time.Now(), delay: d.Wait, reason: valid(d.Reason)}
	return b.String()
}

func (h *handling) Forwarded(err error) {
	f := h.forward
	kind := h.in.numbers.errorType(err)
	f.target.sent.count(kind)
	f.target.took.record(h.ctx, kind, time.Since(f.began))
	if f.what == nil {
		return
	}
	// It begins only now, since nobody says so if a copy is given up with its link.
	_, span := h.in.tracer.Start(h.ctx, f.target.publish, append(f.target.sendOptions[:len(f.target.sendOptions):len(f.target.sendOptions)], trace.WithTimestamp(f.began), trace.WithAttributes(f.what...))...)
	failed(span, kind, err)
	span.End()
}

func (h *handling) Settling(s instrument.Settlement) map[string]string {
	h.settling, h.settled = time.Now(), s
	if s.Kind != instrument.SettlementModified {
		return nil // the handler may still run: see instrument.Handling
	}
	waits := h.decision.Kind == instrument.DecisionRetry || h.decision.Kind == instrument.DecisionWait
	if s.DeadLetter && !(waits && h.decision.Reason == string(retry.StrategyDeadLetter)) {
		h.queue.measured.died(h.ctx, h.reason(s))
	}
	if !h.span.SpanContext().IsValid() {
		return nil
	}
	return map[string]string{annotationAttempt: h.before()}
}

// reason is that of a dead letter.
func (h *handling) reason(s instrument.Settlement) string {
	switch {
	case s.Reason != "":
		return s.Reason
	case h.decision.Kind == instrument.DecisionDeadLetter && h.decision.Reason != "":
		return h.decision.Reason
	}
	return string(retry.ReasonRejected)
}

func (h *handling) Settled(err error) {
	kind := h.in.numbers.errorType(err)
	h.queue.measured.settled.record(h.ctx, kind, time.Since(h.settling))
	if !h.recorded {
		return // nor is a child of it
	}
	opts := h.queue.settleOptions
	_, span := h.in.tracer.Start(h.ctx, h.queue.settle, append(opts[:len(opts):len(opts)], trace.WithTimestamp(h.settling))...)
	if span.IsRecording() {
		span.SetAttributes(attributeOutcome.String(string(h.settled.Kind)))
		span.SetAttributes(h.server()...)
		if id := messageID(h.delivery.Message()); id != "" {
			span.SetAttributes(semconv.MessagingMessageID(id))
		}
		failed(span, kind, err)
	}
	span.End()
}

// failed gives a span the status of err, if that isn't nil.
func failed(span trace.Span, kind string, err error) {
	if err == nil || !span.IsRecording() {
		return
	}
	span.SetStatus(codes.Error, client.ErrorText(err))
	span.SetAttributes(semconv.ErrorTypeKey.String(kind))
}
