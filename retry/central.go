package retry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/brokerclock"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/internal/outcome"
	"github.com/hopback/hopback/internal/refusal"
)

// CentralConfig configures [Central]. Queues is required.
type CentralConfig struct {
	// Queues are the names of the work queues whose failed messages Central retries.
	Queues []string
	// FailedQueue is the name of an existing queue that receives the failed messages. Default:
	// [Names.FailedQueue] of the policy, which [CentralTopology] declares.
	FailedQueue string
	// Counter is the name of a header that counts retries for other systems, in addition to
	// [CountProperty]. Central reads it from application properties and annotations, and writes
	// it as an application property. It treats a value below 1 as 0. Default: none.
	Counter string
	// CounterEnd is the value that Counter gets when a message is dead-lettered. Default: 0,
	// which leaves the counter unchanged.
	CounterEnd int
	// CounterExchange is the name of another system's headers exchange, which delays messages by
	// the value of Counter. Central publishes retries and dead letters there, with the name of
	// the work queue as routing key, and doesn't use the policy's delay queues or dead-letter
	// queues. Default: none.
	CounterExchange string
	// ReasonKey, TextKey, and TypeKey are the names of the headers in which a worker says why it
	// rejected a message. They become [Rejected.Reason], [Rejected.Text], and
	// [Rejected.ErrorType]. A header is either an annotation that the worker adds with the
	// modified outcome, or an application property of a message that the worker publishes to the
	// failed queue itself. A retry removes them. Defaults: "x-reason", "x-error", and
	// "x-error-type".
	ReasonKey, TextKey, TypeKey string
	// HTTP reads RabbitMQ's management HTTP API, so that the topology check includes RabbitMQ
	// policies, which AMQP doesn't show. Create one with package operate/httpapi. Default: nil,
	// and policies aren't taken into account.
	HTTP check.Reader
}

// Central returns a handler that retries the failed messages of other workers. It consumes the
// failed queue: the queue that the work queues dead-letter to. Use it for workers that don't use
// this package, in any language: a worker only rejects a message, and Central does the rest by
// the policy p.
//
//	conn.Consume(ctx, "failed_queue", retry.Central(policy, retry.CentralConfig{Queues: []string{"orders"}}),
//		client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
//
// A message takes this path:
//
//	orders ──rejected──▶ failed_queue ──▶ Central ──▶ failed_exchange ──▶ hold_10s ──expired──▶ failed_exchange ──▶ orders
//	                                         └──given up──▶ failed_exchange ──▶ orders.dead
//
// Declare the queues with [CentralTopology]. All state is in the messages, so you can run any
// number of instances. When the consumer starts, it checks the topology of every work queue: see
// [Guard]. If it starts during a memory or disk alarm, it checks after the alarm, and only discards
// until then. An invalid policy or configuration keeps it from starting, with an *argument.Error.
//
// # What is retried
//
// Rules and [Policy.RetryIf] see a [*Rejected] as the error. Central ignores [Policy.Strategy]
// and [Policy.Immediate].
//
//   - A message that a worker rejected is retried unless the policy says otherwise.
//   - A message that the broker dead-lettered is retried only if a rule says so. Its reason is
//     [ReasonDeliveryLimit], [ReasonExpired], or [ReasonMaxLength].
//   - A message that a worker with [With] dead-lettered after a retry goes to the dead-letter
//     queue unchanged. Before the first retry the message's sender could have written the reason,
//     so Central's rules decide. So both kinds of workers can share a work queue.
//   - The message's work queue is the last queue in which the broker says it was dead-lettered,
//     or else its routing key. If that queue isn't one of [CentralConfig.Queues], the message
//     goes to the dead-letter queue of the failed queue, with [ReasonUnknownQueue].
//
// # Moving and copying
//
// Central moves messages: it settles each one with a single disposition, and the broker
// dead-letters it, at least once, to a delay queue or a dead-letter queue. Nothing is published, so
// Central duplicates nothing, and the message stays exactly what its sender published.
//
// In these cases Central publishes a copy instead, as [StrategyRepublish] does, and acknowledges
// the original once the broker has confirmed the copy:
//
//   - The topology has no failed_exchange for the queue (see [CentralTopology]), or a part of it
//     is missing. The consumer logs the reason when it starts.
//   - The policy has [Policy.AnyDelay], or [CentralConfig.Counter] is set.
//   - The message reached the delivery limit of its queue and a rule retries it. A moved message
//     would keep its delivery count.
//   - A worker published the message to the failed queue with [CentralConfig.ReasonKey], TextKey,
//     or TypeKey as an application property. Only a copy can remove that.
func Central(p Policy, cfg CentralConfig) client.Handler {
	c := &central{}
	p.Strategy = StrategyRepublish
	pl, err := p.plan()
	if err == nil {
		cfg, err = cfg.withDefaults(&pl)
	}
	c.cfg, c.invalid = cfg, err
	c.retries = &decorator{plan: &pl, forgets: []string{cfg.ReasonKey, cfg.TextKey, cfg.TypeKey}, counter: cfg.Counter}
	c.queues = make(map[string]bool, len(cfg.Queues))
	for _, q := range cfg.Queues {
		c.queues[q] = true
	}
	return c
}

// centralPath is where the errors of a CentralConfig begin.
var centralPath = argument.Root("CentralConfig")

// plan is the policy's, with what leads to the failed queue and from there.
func (c *central) plan() centralPlan { return centralPlan{c.retries.plan, c.cfg} }

// withDefaults checks cfg.
func (cfg CentralConfig) withDefaults(pl *plan) (CentralConfig, error) {
	cfg.Queues = slices.Clone(cfg.Queues)
	cfg.FailedQueue = cmp.Or(cfg.FailedQueue, pl.names.FailedQueue)
	cfg.ReasonKey, cfg.TextKey, cfg.TypeKey = cmp.Or(cfg.ReasonKey, "x-reason"), cmp.Or(cfg.TextKey, "x-error"), cmp.Or(cfg.TypeKey, "x-error-type")
	if err := checkQueue(centralPath.Field("FailedQueue"), cfg.FailedQueue); err != nil {
		return cfg, err
	}
	if len(cfg.Queues) == 0 {
		return cfg, argument.At(centralPath.Field("Queues"), argument.CodeMissing, nil, "is empty", "list the work queues whose failed messages are retried")
	}
	for i, q := range cfg.Queues {
		at := centralPath.Field("Queues").Index(i)
		switch st := pl.stateFor(q, StrategyRepublish); {
		case st.unusable != nil:
			return cfg, checkQueue(at, q)
		case st.noKey != nil:
			return cfg, argument.At(at, argument.CodeTooLong, q, "makes a routing key of more than 255 bytes", "use a shorter name")
		case slices.Contains(cfg.Queues[:i], q):
			return cfg, argument.At(at, argument.CodeConflict, q, "is named twice", "list each work queue once")
		case address.Queue(q+pl.names.DeadSuffix).Validate() != nil:
			return cfg, argument.At(at, argument.CodeTooLong, q, "is too long: the name of its dead-letter queue would exceed the limit", "use a shorter name")
		case q == cfg.FailedQueue:
			return cfg, argument.At(at, argument.CodeConflict, q, "is the failed queue itself, so failed messages would come back at once", "list only work queues")
		}
	}
	for _, f := range []struct {
		name string
		key  string
	}{{"Counter", cfg.Counter}, {"CounterExchange", cfg.CounterExchange}, {"ReasonKey", cfg.ReasonKey}, {"TextKey", cfg.TextKey}, {"TypeKey", cfg.TypeKey}} {
		if !utf8.ValidString(f.key) || len(f.key) > maxKey {
			return cfg, argument.At(centralPath.Field(f.name), argument.CodeMalformed, f.key, "is over 255 bytes or not valid UTF-8", "use a short name")
		}
	}
	if cfg.Counter == "" && (cfg.CounterEnd != 0 || cfg.CounterExchange != "") {
		return cfg, argument.At(centralPath.Field("Counter"), argument.CodeMissing, nil, "is empty, but CounterEnd or CounterExchange is set", "name the header that counts")
	}
	return cfg, nil
}

// FailedQueueOf returns the name of the failed queue, which Central consumes: FailedQueue, or the
// default from the policy's names.
func (cfg CentralConfig) FailedQueueOf(p Policy) string {
	n, _ := p.Names.withDefaults(nil)
	return cmp.Or(cfg.FailedQueue, n.FailedQueue)
}

type central struct {
	cfg     CentralConfig
	invalid error
	queues  map[string]bool // the work queues
	// retries carries out retries, as for a handler of the work queue.
	retries *decorator

	// host is what the HTTP API showed last, at hostAt.
	host   check.Snapshot
	hostAt time.Time
	hostMu sync.Mutex
}

func (c *central) Prepare(ctx context.Context, s client.Start) error {
	if c.invalid != nil {
		return c.invalid
	}
	if ctx.Value(nestedKey{}) != nil {
		return errNested
	}
	if s.Queue != c.cfg.FailedQueue {
		return argument.At(argument.Root("queue"), argument.CodeConflict, s.Queue, fmt.Sprintf("isn't the failed queue, which is %.100q", c.cfg.FailedQueue),
			"consume from that, or set CentralConfig.FailedQueue")
	}
	failed, err := c.retries.startChecked(ctx, s, c.newState(ctx, s), func(ctx context.Context) (*queueState, error) { return c.check(ctx, s) })
	if err == nil {
		c.retries.states.put(failed)
	}
	return err
}

// newState returns what Central knows about the failed queue without asking the broker.
func (c *central) newState(ctx context.Context, s client.Start) *queueState {
	failed := c.retries.plan.stateFor(c.cfg.FailedQueue, StrategyRepublish)
	failed.consumer, failed.log, failed.clock.own = refusal.Of(ctx), logOf(s), brokerclock.OwnClock(ctx)
	failed.prepared = true
	return failed
}

// check checks the topology of all queues.
func (c *central) check(ctx context.Context, s client.Start) (*queueState, error) {
	watches, err := c.guards(ctx, s)
	if err != nil {
		return nil, err
	}
	failed := c.newState(ctx, s)
	if c.retries.plan.giveUp > 0 {
		failed.clock.asks(failed, s)
		failed.clock.learn(ctx)
	}
	for _, name := range c.cfg.Queues {
		q := c.retries.plan.stateFor(name, StrategyRepublish)
		q.clock, q.log, q.watch, q.consumer, q.prepared = failed.clock, failed.log, watches[name], failed.consumer, true
		c.retries.states.put(q)
	}
	return failed, nil
}

func (c *central) Handle(ctx context.Context, d *client.Delivery) error {
	if c.invalid != nil {
		return client.Requeue{Failed: true, Err: c.invalid}
	}
	at, err := c.retries.state(ctx, c.cfg.FailedQueue)
	if err != nil {
		return client.Requeue{Failed: true, Err: err}
	}
	if !at.prepared && refusal.Stop(ctx, errHidden) {
		return client.Requeue{Err: errHidden}
	}
	f := c.read(d)
	f.at = at
	return c.carryOut(ctx, d, f)
}

// carryOut returns what becomes of a message, also if a function of the policy panics.
func (c *central) carryOut(ctx context.Context, d *client.Delivery, f arrival) (err error) {
	returned := false
	defer outcome.Catch(&returned, func(value any, stack []byte) { // of a function of the policy
		failed := &client.PanicError{Value: value, Stack: stack}
		err = c.onceChecked(f, func(f arrival) error { return c.giveUp(d, f, client.ReasonPanicked, failed) })
		if value == nil {
			outcome.LeaveLastWord(ctx, err)
		}
	})
	err = c.handle(ctx, d, f)
	returned = true
	return err
}

// onceChecked calls then with f: now, or when the check that waits for the end of an alarm is done.
func (c *central) onceChecked(f arrival, then func(arrival) error) error {
	p := f.at.pending
	if p == nil {
		return then(f)
	}
	if !f.at.waits() {
		f.at = p.Result()
		return then(f)
	}
	return &inside.Later{Ready: p.Done(), Err: f.err, Then: func() error {
		f.at = p.Result()
		return then(f)
	}}
}

// arrival is a message of the failed queue.
type arrival struct {
	message *client.Message // see messageOf
	at      *queueState     // the failed queue's
	known   bool            // the work queue is one of ours
	was     past
	err     *Rejected
	// dead is the reason for dead-lettering the message unless a rule retries it.
	dead client.Reason
	// given is the reason of a worker with With that dead-lettered the message. hint is a reason
	// that the sender could have written.
	given, hint client.Reason
}

func (c *central) handle(ctx context.Context, d *client.Delivery, f arrival) error {
	if f.at.pending != nil {
		discards := f.at.waits() && f.known && f.given == "" && c.decide(&f, f.at.clock.now()).do == decidedDiscard
		if !discards {
			ctx = context.WithoutCancel(ctx) // the handler's ctx has ended by then
			return c.onceChecked(f, func(f arrival) error { return c.carryOut(ctx, d, f) })
		}
	}
	switch {
	case !f.known:
		c.notifyUnknown(d, f)
		return c.giveUp(d, f, ReasonUnknownQueue, f.err)
	case f.given != "":
		return c.passOn(d, f)
	}
	now := f.at.clock.now()
	what := c.decide(&f, now)
	what.attempt = f.was.count + 1
	switch what.do {
	case decidedDiscard:
		report(d, what, instrument.DecisionDiscard, "", 0, f.err)
		return nil
	case decidedDead:
		return c.giveUp(d, f, what.reason, what.err)
	}
	q, err := c.retries.state(ctx, f.err.Queue)
	if err != nil {
		return client.Requeue{Failed: true, Err: err}
	}
	if q.moves() && c.movable(f) {
		return c.move(ctx, d, q, what, f, now)
	}
	waits := c.retries.wait(ctx, d, q, what, f.err, f.was, now)
	switch o := waits.(type) {
	case client.Forward:
		if c.cfg.Counter == "" {
			return waits
		}
		return c.counted(o, what.count, f.err.Queue)
	case client.DeadLetter:
		return c.giveUp(d, f, o.Reason, o.Err)
	default:
		return fmt.Errorf("the retry of a failed message ended as %T", o)
	}
}

// decide applies the policy to a message.
func (c *central) decide(f *arrival, now time.Time) decision {
	f.was = f.was.read()
	return c.retries.plan.decide(failure{
		err: f.err, count: f.was.count, first: f.was.first, now: now,
		strategy: StrategyRepublish, dead: f.dead, u: rand.Float64(),
	})
}

// read finds out which work queue a message failed in, and why.
func (c *central) read(d *client.Delivery) (f arrival) {
	m := messageOf(d)
	var few [4]annotation.DeadLettering // most have one or two
	history := annotation.DeadLetterings(few[:0], m.Annotations)
	queue, died := c.origin(m, history)
	made := &struct {
		Rejected
		failedIn
	}{Rejected: Rejected{Reason: ReasonRejected, Queue: cmp.Or(queue, d.Queue()), delivery: d, forgets: c.retries.forgets}}
	f.message, f.known, f.err = m, c.queues[queue], &made.Rejected
	switch died.Reason {
	case "delivery_limit":
		f.err.Reason = ReasonDeliveryLimit
	case "expired":
		f.err.Reason = ReasonExpired
	case "maxlen":
		f.err.Reason = ReasonMaxLength
	case "rejected":
		own, _ := m.Annotations[client.AnnotationReason].(string)
		switch r := client.Reason(own); {
		case !givenUp(r), r == client.ReasonUnforwardable: // a copy that couldn't be stored gets a chance here
		case slices.ContainsFunc(history, c.retries.plan.names.retried):
			f.given = r
		default:
			// The sender could have written it. A retry removes it, so the reason after a retry
			// is a worker's.
			f.hint = r
		}
	}
	if f.err.Reason != ReasonRejected {
		f.dead = f.err.Reason
	} else {
		// The worker's headers don't explain a dead-lettering by the broker.
		f.err.Reason = client.Reason(cmp.Or(logged(m, c.cfg.ReasonKey), string(ReasonRejected)))
		f.err.Text, f.err.ErrorType = logged(m, c.cfg.TextKey), logged(m, c.cfg.TypeKey)
		if f.hint != "" {
			f.err.Reason = f.hint
			f.err.Text, f.err.ErrorType = cmp.Or(logged(m, client.AnnotationError), f.err.Text), cmp.Or(historyOf(m).Type, f.err.ErrorType)
		}
	}
	f.was = pastOf(m, f.err.Queue)
	f.was.failedIn = &made.failedIn
	f.was.failedIn.queue, f.was.failedIn.first, f.was.failedIn.routed = f.err.Queue, len(history) == 1 && died.Queue != "", routed(m, died)
	f.was = f.was.read()
	if c.cfg.Counter != "" {
		for _, v := range []any{m.ApplicationProperties[c.cfg.Counter], m.Annotations[c.cfg.Counter]} {
			n, _ := parseCount(v)
			f.was.count = max(f.was.count, n)
		}
	}
	return f
}

// routed is how a message was routed to the queue where it failed. If it isn't known to have been
// dead-lettered there, it is how it was routed to the failed queue.
func routed(m *client.Message, died annotation.DeadLettering) (by [len(originOf)]origin) {
	if died.Queue != "" {
		return [...]origin{{known: true, text: died.Exchange}, {known: true, text: died.RoutingKey}}
	}
	for i, o := range originOf {
		by[i].text, by[i].known = annotation.Text(m.Annotations, o.brokers)
	}
	return by
}

// origin returns the work queue of a message and its dead-lettering there. A history counts only
// if the broker wrote it: a worker that publishes to the failed queue could have copied old
// headers.
func (c *central) origin(m *client.Message, history []annotation.DeadLettering) (string, annotation.DeadLettering) {
	in := func(queue string) annotation.DeadLettering {
		for _, d := range history {
			if d.Queue == queue {
				return d
			}
		}
		return annotation.DeadLettering{}
	}
	if len(history) > 0 && c.queues[history[0].Queue] {
		return history[0].Queue, history[0]
	}
	key, _ := annotation.Text(m.Annotations, "x-routing-key")
	if c.queues[key] {
		return key, in(key)
	}
	if len(history) == 0 {
		return key, annotation.DeadLettering{}
	}
	if first := history[len(history)-1].Queue; c.queues[first] {
		return first, in(first)
	}
	return history[0].Queue, history[0]
}

// counted writes the other system's counter to the copy, and sends it to that system's exchange.
func (c *central) counted(o client.Forward, count int, queue string) client.Forward {
	setCount(o.Message, c.cfg.Counter, count)
	if c.cfg.CounterExchange != "" {
		o.To = address.Exchange(c.cfg.CounterExchange, queue)
		if e, ok := o.Else.(client.Forward); ok {
			e.To = o.To
			o.Else = e
		}
	}
	return o
}

// giveUp sends a message to the dead-letter queue with its history.
func (c *central) giveUp(d *client.Delivery, f arrival, reason client.Reason, err error) error {
	h := c.retries.plan.history(d, err, f.was, f.at.clock.now())
	h[client.AnnotationReason] = string(reason)
	report(d, decision{attempt: f.was.count + 1}, instrument.DecisionDeadLetter, string(reason), 0, err)
	return c.toDeadLetters(d, f, h)
}

// passOn sends a message that a worker with With dead-lettered to the dead-letter queue.
func (c *central) passOn(d *client.Delivery, f arrival) error {
	h := map[string]any{client.AnnotationReason: string(f.given), annotation.Retries: int64(f.was.count)}
	h[annotation.Queue] = f.err.Queue // the sender could have written another
	t := historyOf(f.message)
	for i, o := range originOf {
		if t.origin(i) == nil {
			h[o.own] = f.was.failedIn.routed[i].text
		}
	}
	return c.toDeadLetters(d, f, h)
}

// toDeadLetters moves a message to its dead-letter queue, or forwards a copy, with these annotations.
func (c *central) toDeadLetters(d *client.Delivery, f arrival, annotations map[string]any) error {
	if c.movesDead(f) {
		return c.moveDead(f, annotations)
	}
	m := client.Copy(f.message)
	for _, key := range []any{annotation.Delay, annotation.DeliveryTime, client.AnnotationKnownCount} {
		delete(m.Annotations, key)
	}
	doubtful := mayNotCopy(m)
	if m.Annotations == nil {
		m.Annotations = make(map[any]any, len(annotations))
	}
	for k, v := range annotations {
		if key := keyValues[k]; key != nil {
			m.Annotations[key] = v
		} else {
			m.Annotations[k] = v
		}
	}
	counterToProperty(m, CountProperty)
	if c.cfg.Counter != "" {
		counterToProperty(m, c.cfg.Counter)
	}
	if c.cfg.CounterEnd != 0 {
		setCount(m, c.cfg.Counter, c.cfg.CounterEnd)
	}
	o := client.Forward{To: c.deadLetterTarget(d, f), Message: m}
	if doubtful {
		// The history may be what makes it too large.
		small := *m
		small.Annotations = maps.Clone(m.Annotations)
		for _, key := range []any{client.AnnotationError, annotation.Exchange, annotation.RoutingKey} {
			delete(small.Annotations, key)
		}
		small.Annotations[annotation.History] = brief(historyOf(m).First, 0, 0)
		o.Else = client.Forward{To: o.To, Message: &small}
	}
	return o
}

// deadLetterTarget is the address for a message that is dead-lettered.
func (c *central) deadLetterTarget(d *client.Delivery, f arrival) address.Address {
	queue := f.err.Queue
	if !f.known {
		queue = c.cfg.FailedQueue
	}
	if c.cfg.CounterExchange != "" {
		return address.Exchange(c.cfg.CounterExchange, queue)
	}
	return address.Queue(queue + c.retries.plan.names.DeadSuffix)
}

// notifyUnknown logs that there is a message of an unknown queue.
func (c *central) notifyUnknown(d *client.Delivery, f arrival) {
	f.at.log.Error("hopback: the failed queue contains messages of a work queue that isn't in CentralConfig.Queues: add the queue, or stop it from dead-lettering here. They are dead-lettered with reason "+string(ReasonUnknownQueue),
		"queue", d.Queue(), "message_id", message.ID(d.Message()), "work_queue", f.err.Queue, "to", c.deadLetterTarget(d, f).String())
}

// logged returns a text that is a header of m, or "".
func logged(m *client.Message, key string) string {
	s, ok := annotation.Text(m.Annotations, key)
	if !ok {
		s, _ = m.ApplicationProperties[key].(string)
	}
	if len(s) > client.ErrorTextLimit {
		return client.ErrorText(errors.New(s))
	}
	return s
}
