package topologyfile

import (
	"fmt"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/retry"
)

// document is the whole file in its written form.
type document struct {
	retry    retrySection
	hasRetry bool
	central  centralSection
	// centralAt and centralKeys are where the section central is; nil without one.
	centralAt, centralKeys *yaml.Node
	work                   []named[declare.QuorumQueue]
	fair                   []named[fairQueue]
	queues                 []named[declare.Queue]
	exchanges              []named[declare.Exchange]
	bindings               []placed[declare.Binding]
}

// named is an entry of a mapping whose keys are names.
type named[V any] struct {
	name  string
	at    at // of the name
	keys  *yaml.Node
	value V
}

func (n named[V]) place(fields []goField) place { return place{n.at, n.keys, fields} }

type placed[V any] struct {
	at    at
	value V
}

// retrySection is what of a retry.Policy can be written down.
type retrySection struct {
	strategy     retry.Strategy
	delays       []time.Duration
	exponential  exponential
	maxRetries   retries
	jitter       retry.Jitter
	giveUpAfter  time.Duration
	immediate    int
	anyDelay     retry.Ladder
	hasLadder    bool
	names        retry.Names
	replayByMove bool
	claimable    bool
	rules        []ruleSection
}

// fairQueue is a fair.Queue, and what its main queue and its lanes have in common.
type fairQueue struct {
	lanes int
	queue declare.QuorumQueue
}

func (q fairQueue) of(name string) fair.Queue { return fair.Queue{Name: name, Lanes: q.lanes} }

// ruleSection is what of a retry.ErrorRule can be written down.
type ruleSection struct {
	reason, header string
	value          any
	do             retry.ErrorAction
	maxRetries     retries
	delays         []time.Duration
}

// centralSection is a retry.CentralConfig.
type centralSection struct {
	queues                      []string
	failedQueue, counter        string
	counterEnd                  int
	counterExchange             string
	reasonKey, textKey, typeKey string
}

type exponential struct {
	first  time.Duration
	factor float64
	max    time.Duration
}

// retries is Policy.MaxRetries.
type retries int

// fileKeys is a function, since hints look into sections, which has them all.
func fileKeys() []key[document] {
	return []key[document]{
		{
			name: "retry", about: "How failed messages of the work queues are retried. Default: five times, after 10s, 1m, 5m, 10m and 30m.",
			schema: and(objectSchema(retryKeys), "not", map[string]any{"type": "object", "required": []string{"delays", "exponential"}}),
			read: func(r *reader, a at, d *document) {
				d.hasRetry = true
				d.retry, _ = object(retryKeys).read(r, a)
			},
		},
		{
			name: "central", about: "Retry what workers of any kind reject, with hopback retry run. It is for all work queues of this file.",
			schema: objectSchema(centralKeys),
			read: func(r *reader, a at, d *document) {
				d.centralAt, d.centralKeys = a.node, a.node
				d.central, _ = object(centralKeys).read(r, a)
			},
		},
		collection("work-queues", "Quorum queues whose failed messages are retried, by name. Each gets a dead-letter queue.", object(workKeys),
			func(d *document) *[]named[declare.QuorumQueue] { return &d.work }),
		collection("fair-queues", "Queues whose workers are shared fairly among tenants, by name (RabbitMQ 4.3). Failed messages are retried as those of work-queues.", object(fairKeys),
			func(d *document) *[]named[fairQueue] { return &d.fair }),
		collection("queues", "Other queues, by name. They get no retries.", anyQueue,
			func(d *document) *[]named[declare.Queue] { return &d.queues }),
		collection("exchanges", "Exchanges, by name. All are durable.", object(exchangeKeys),
			func(d *document) *[]named[declare.Exchange] { return &d.exchanges }),
		{
			name: "bindings", about: "Bindings of exchanges to queues and to other exchanges.",
			schema: map[string]any{"type": []string{"array", "null"}, "items": and(objectSchema(bindingKeys), "oneOf", oneOfKeys("queue", "exchange"))},
			read: func(r *reader, a at, d *document) {
				for i, n := range r.list(a, "write a line that begins with a dash for each binding") {
					at := a.item(n, i)
					if b, ok := object(bindingKeys).read(r, at); ok {
						d.bindings = append(d.bindings, placed[declare.Binding]{at, b})
					}
				}
			},
			write: func(d *document) *yaml.Node {
				if len(d.bindings) == 0 {
					return nil
				}
				list := &yaml.Node{Kind: yaml.SequenceNode}
				for _, b := range d.bindings {
					list.Content = append(list.Content, inOneLine(writeKeys(bindingKeys, &b.value)))
				}
				return list
			},
		},
	}
}

// collection is a mapping from names to values of one shape.
func collection[V any](name, about string, of shape[V], field func(*document) *[]named[V]) key[document] {
	return key[document]{
		name: name, about: about,
		schema: map[string]any{"type": []string{"object", "null"}, "additionalProperties": of.schema},
		read: func(r *reader, a at, d *document) {
			for _, p := range r.mapping(a, "write one indented name: line for each, and its keys below it") {
				at := a.key(p.key, p.name)
				if v, ok := of.read(r, a.key(p.value, p.name)); ok {
					*field(d) = append(*field(d), named[V]{p.name, at, p.value, v})
				}
			}
		},
		write: func(d *document) *yaml.Node {
			if len(*field(d)) == 0 {
				return nil
			}
			n := &yaml.Node{Kind: yaml.MappingNode}
			for _, e := range *field(d) {
				n.Content = append(n.Content, textNode(e.name), of.write(e.value))
			}
			return n
		},
	}
}

func inOneLine(n *yaml.Node) *yaml.Node {
	n.Style |= yaml.FlowStyle
	for _, c := range n.Content {
		inOneLine(c)
	}
	return n
}

var retryKeys = []key[retrySection]{
	with("strategy", "How a message waits: republish (default) publishes a copy to a delay queue; dead-letter has the broker move it there; native keeps it in its queue (RabbitMQ 4.3); auto chooses when the consumer starts, and declares what any of them needs.",
		like[retry.Strategy](word(string(retry.StrategyRepublish), string(retry.StrategyDeadLetter), string(retry.StrategyNative), string(retry.StrategyAuto))),
		func(s *retrySection) *retry.Strategy { return &s.strategy }),
	with("delays", "How long a message waits before each retry. Further retries wait as long as the last. Each different delay is a queue. Default: 10s, 1m, 5m, 10m, 30m.",
		listOf(duration, "write a list of times, such as [10s, 1m, 10m]"), func(s *retrySection) *[]time.Duration { return &s.delays }),
	with("exponential", "Growing delays, instead of delays.", object(exponentialKeys), func(s *retrySection) *exponential { return &s.exponential }),
	with("max-retries", "How often a message is retried after its first attempt, or none. Default: 5.", maxRetries, func(s *retrySection) *retries { return &s.maxRetries }),
	with("jitter", "How delays are spread: none (default), equal (half of the delay and a random part of the other half) or full (a random part of all of it). equal and full need the strategy native or auto, or any-delay.",
		like[retry.Jitter](word(string(retry.JitterNone), string(retry.JitterEqual), string(retry.JitterFull))), func(s *retrySection) *retry.Jitter { return &s.jitter }),
	with("give-up-after", "Dead-letter a message instead of retrying it later than this after its first failure. Default: no limit.", duration,
		func(s *retrySection) *time.Duration { return &s.giveUpAfter }),
	with("immediate", "How often a failed handler is called again at once, before each delay. Default: 0.", integer[int](0), func(s *retrySection) *int { return &s.immediate }),
	{
		name: "any-delay", about: "A ladder of queues that holds a message for any delay, instead of one queue for each delay; for republish.",
		schema: objectSchema(ladderKeys),
		field:  goField{path: []string{"AnyDelay"}, keys: []string{"any-delay"}, within: goFields(ladderKeys)},
		read: func(r *reader, a at, s *retrySection) {
			s.anyDelay, s.hasLadder = object(ladderKeys).read(r, a)
		},
	},
	with("replay-by-move", "Route messages from dead-letter queues back to their work queues, so that hopback dlq replay moves messages instead of copying them. Default: false.", flag,
		func(s *retrySection) *bool { return &s.replayByMove }),
	with("claimable", "Give each waiting message its message-id as a token, so that hopback retry cancel, run-now, and reschedule find it; for native and auto, from RabbitMQ 4.4. Default: false.", flag,
		func(s *retrySection) *bool { return &s.claimable }),
	{
		name: "rules", about: "Exceptions for some messages that workers have rejected. The first rule that matches decides.",
		schema: map[string]any{"type": "array", "items": ruleSchema(), "minItems": 1},
		field:  goField{path: []string{"Rules"}, keys: []string{"rules"}, within: append(goFields(ruleKeys), goField{path: []string{"Backoff"}, keys: []string{"delays"}})},
		read: func(r *reader, a at, s *retrySection) {
			s.rules, _ = listOf(rule, "write a line that begins with a dash for each rule").read(r, a)
		},
	},
	with("names", "Names of the exchanges and queues in between.", object(nameKeys), func(s *retrySection) *retry.Names { return &s.names }),
}

var ruleKeys = []key[ruleSection]{
	with("reason", "The reason that a worker gave, or rejected, delivery-limit, expired or max-length.", text, func(u *ruleSection) *string { return &u.reason }),
	with("header", "A header of the message: an application property or an annotation.", text, func(u *ruleSection) *string { return &u.header }),
	with("value", "The value of header. Default: any.", scalar, func(u *ruleSection) *any { return &u.value }),
	with("do", "retry (default), retry-uncounted, dead-letter or discard.",
		like[retry.ErrorAction](word(string(retry.ActionRetry), string(retry.ActionRetryUncounted), string(retry.ActionDeadLetter), string(retry.ActionDiscard))),
		func(u *ruleSection) *retry.ErrorAction { return &u.do }),
	with("max-retries", "Instead of the policy's, for all retries of the message.", maxRetries, func(u *ruleSection) *retries { return &u.maxRetries }),
	with("delays", "Instead of the policy's.", listOf(duration, "write a list of times, such as [10s, 1m, 10m]"), func(u *ruleSection) *[]time.Duration { return &u.delays }),
}

func ruleSchema() map[string]any {
	s := objectSchema(ruleKeys)
	s["type"] = "object"
	s["anyOf"] = oneOfKeys("reason", "header")
	return s
}

// rule is a mapping that says which messages it is for.
var rule = shape[ruleSection]{
	read: func(r *reader, a at) (ruleSection, bool) {
		u, ok := object(ruleKeys).read(r, a)
		switch {
		case !ok:
		case u.reason == "" && u.header == "":
			r.bad(a, nil, "names neither a reason nor a header", "write reason: WORD, or header: NAME and value: VALUE")
			ok = false
		case u.value != nil && u.header == "":
			r.bad(a, nil, "has a value and no header", "write header: NAME")
			ok = false
		}
		return u, ok
	},
}

// scalar is text, a number, or true or false.
var scalar = shape[any]{
	schema: map[string]any{"type": []string{"string", "boolean", "number"}},
	read: func(r *reader, a at) (any, bool) {
		if a.node.Kind != yaml.ScalarNode || a.node.ShortTag() == "!!null" {
			r.bad(a, value(a.node), fmt.Sprintf("is %s", is(a.node)), "write text, a number, true or false")
			return nil, false
		}
		return r.any(a, 0)
	},
}

var centralKeys = []key[centralSection]{
	with("queues", "Further work queues, which exist already and aren't declared.", listOf(text, "write a list of names"), func(c *centralSection) *[]string { return &c.queues }),
	with("failed-queue", "An existing queue that failed messages arrive in. Default: failed_queue, which is declared.", text, func(c *centralSection) *string { return &c.failedQueue }),
	with("counter", "A header that counts retries for other systems, next to x-retry-count.", text, func(c *centralSection) *string { return &c.counter }),
	with("counter-end", "The counter's value when a message is dead-lettered for good. Default: unchanged.", integer[int](-1<<31), func(c *centralSection) *int { return &c.counterEnd }),
	with("counter-exchange", "Another system's headers exchange, which holds messages by the counter, instead of delay queues and dead-letter queues.", text,
		func(c *centralSection) *string { return &c.counterExchange }),
	with("reason-key", "The header in which workers say why they reject a message. Default: x-reason.", text, func(c *centralSection) *string { return &c.reasonKey }),
	with("text-key", "The header with the error's text. Default: x-error.", text, func(c *centralSection) *string { return &c.textKey }),
	with("type-key", "The header with the error's type. Default: x-error-type.", text, func(c *centralSection) *string { return &c.typeKey }),
}

var exponentialKeys = []key[exponential]{
	with("first", "The first delay.", duration, func(e *exponential) *time.Duration { return &e.first }).must(),
	with("factor", "Each delay is this many times the one before. Default: 2.", factor, func(e *exponential) *float64 { return &e.factor }),
	with("max", "The longest delay. Default: no limit.", duration, func(e *exponential) *time.Duration { return &e.max }),
}

// maxRetries doesn't take 0: it would be none here, and the default in Go.
var maxRetries = shape[retries]{
	schema: map[string]any{"anyOf": []any{
		map[string]any{"type": "integer", "minimum": 1}, map[string]any{"const": noneWord},
	}},
	read: func(r *reader, a at) (retries, bool) {
		if a.node.Kind == yaml.ScalarNode && a.node.Value == noneWord && r.plain(a) {
			return retry.NoRetries, true
		}
		if a.node.Kind != yaml.ScalarNode || a.node.ShortTag() != "!!int" {
			r.bad(a, value(a.node), fmt.Sprintf("is %s, and should be a whole number or none", is(a.node)), "write, for example, 5")
			return 0, false
		}
		n, ok := r.integer(a, 0)
		if ok && n == 0 {
			r.bad(a, n, "is ambiguous", "write none for no retries, or leave it out for the default of 5")
			ok = false
		}
		return retries(n), ok
	},
}

const noneWord = "none"

var ladderKeys = []key[retry.Ladder]{
	with("unit", "How long the first level holds a message. Each further level holds it twice as long. Default: 100ms.", duration, func(l *retry.Ladder) *time.Duration { return &l.Unit }),
	with("levels", "How many levels there are. Default: 20.", integer[int](1), func(l *retry.Ladder) *int { return &l.Levels }),
}

var nameKeys = []key[retry.Names]{
	with("prefix", "Begins every default name below, except dead-suffix.", text, func(n *retry.Names) *string { return &n.Prefix }),
	with("retry-exchange", "Receives failed messages. Default: retry_exchange.", text, func(n *retry.Names) *string { return &n.RetryExchange }),
	with("requeue-exchange", "Returns them to their work queues after the delay. Default: requeue_exchange.", text, func(n *retry.Names) *string { return &n.RequeueExchange }),
	with("dead-letter-exchange", "Receives what work queues dead-letter. Default: dead_letter_exchange.", text, func(n *retry.Names) *string { return &n.DeadLetterExchange }),
	with("given-up-exchange", "Routes dead letters to the dead-letter queues. Default: given_up_exchange.", text, func(n *retry.Names) *string { return &n.GivenUpExchange }),
	with("return-exchange", "Returns messages that the strategy dead-letter has delayed. Default: return_exchange.", text, func(n *retry.Names) *string { return &n.ReturnExchange }),
	with("replay-exchange", "Returns replayed dead letters, with replay-by-move. Default: replay_exchange.", text, func(n *retry.Names) *string { return &n.ReplayExchange }),
	with("parking", "Begins the exchange and the queue for messages that can't return. Default: parking.", text, func(n *retry.Names) *string { return &n.Parking }),
	with("failed-queue", "Receives what workers reject, for central. Default: failed_queue.", text, func(n *retry.Names) *string { return &n.FailedQueue }),
	with("failed-exchange", "Moves messages out of the failed queue, for central. Default: failed_exchange.", text, func(n *retry.Names) *string { return &n.FailedExchange }),
	with("delay-prefix", "Begins the names of delay queues. Default: delay_.", text, func(n *retry.Names) *string { return &n.DelayPrefix }),
	with("hold-prefix", "Begins the names of the strategy dead-letter's delay queues. Default: hold_.", text, func(n *retry.Names) *string { return &n.HoldPrefix }),
	with("ladder-prefix", "Begins the names of any-delay's queues and exchanges. Default: retry_ladder_.", text, func(n *retry.Names) *string { return &n.LadderPrefix }),
	with("dead-suffix", "Ends the names of dead-letter queues. Default: .dead.", text, func(n *retry.Names) *string { return &n.DeadSuffix }),
}

// workKeys are those of a quorum queue, without its type.
var workKeys = []key[declare.QuorumQueue]{
	with("delivery-limit", "How many failed deliveries a message may have before the broker dead-letters it; N allows N+1 deliveries. -1 or unlimited: no limit. Default: the broker's, 20.", limit,
		func(q *declare.QuorumQueue) *declare.Limit { return &q.DeliveryLimit }),
	with(deadLetterKey, "Where dead letters go: drop, a queue, or an exchange. A work queue without it gets a dead-letter queue.", deadLetter,
		func(q *declare.QuorumQueue) *declare.DeadLetterTarget { return &q.DeadLetter }),
	with("message-ttl", "How long a message may wait in the queue. Default: no limit.", duration, func(q *declare.QuorumQueue) *time.Duration { return &q.MessageTTL }),
	with("expires", "Delete the queue when it is unused for this long. Default: never.", duration, func(q *declare.QuorumQueue) *time.Duration { return &q.Expires }),
	with("max-length", "How many messages the queue holds. Default: no limit.", integer[int64](1), func(q *declare.QuorumQueue) *int64 { return &q.MaxLength }),
	with("max-length-bytes", "How many bytes of bodies it holds. Default: no limit.", integer[int64](1), func(q *declare.QuorumQueue) *int64 { return &q.MaxLengthBytes }),
	with("overflow", "What a full queue does: drop-head or reject-publish. With at-least-once dead-lettering it is reject-publish.",
		like[declare.Overflow](word(string(declare.OverflowDropHead), string(declare.OverflowRejectPublish))), func(q *declare.QuorumQueue) *declare.Overflow { return &q.Overflow }),
	with(singleActiveKey, "Deliver to one consumer at a time.", flag, func(q *declare.QuorumQueue) *bool { return &q.SingleActiveConsumer }),
	with("quorum-initial-group-size", "How many replicas the queue has at first. Default: three, or one on each node.", integer[int](1), func(q *declare.QuorumQueue) *int { return &q.InitialGroupSize }),
	with("quorum-target-group-size", "How many replicas the broker adds up to.", integer[int](1), func(q *declare.QuorumQueue) *int { return &q.TargetGroupSize }),
	with("member-placement-tag", "Key of a node tag, such as zone, over whose values the replicas are spread (RabbitMQ 4.4; refused by earlier versions).", text, func(q *declare.QuorumQueue) *string { return &q.PlacementTag }),
	with("queue-leader-locator", "How the leading node is chosen: client-local (default) or balanced.", leaderLocator, func(q *declare.QuorumQueue) *declare.LeaderLocator { return &q.LeaderLocator }),
	with("consumer-timeout", "How long a consumer may hold a delivery (RabbitMQ 4.3). Default: the broker's, 30m.", duration, func(q *declare.QuorumQueue) *time.Duration { return &q.ConsumerTimeout }),
	with("consumer-disconnected-timeout", "How long the broker waits for a consumer whose node it has lost (RabbitMQ 4.3).", duration,
		func(q *declare.QuorumQueue) *time.Duration { return &q.ConsumerDisconnectedTimeout }),
	with("delayed-retry-type", "Which messages the queue holds back before it delivers them again: all, failed or returned (RabbitMQ 4.3).",
		like[declare.RetryKind](word(string(declare.RetryAll), string(declare.RetryFailed), string(declare.RetryReturned))), func(q *declare.QuorumQueue) *declare.RetryKind { return &q.DelayedRetry.Kind }),
	with("delayed-retry-min", "The first such delay; it grows by as much each time.", duration, func(q *declare.QuorumQueue) *time.Duration { return &q.DelayedRetry.Min }),
	with("delayed-retry-max", "The longest such delay. Default: the first.", duration, func(q *declare.QuorumQueue) *time.Duration { return &q.DelayedRetry.Max }),
	with("arguments", `Further arguments, with their "x-".`, further, func(q *declare.QuorumQueue) *map[string]any { return &q.Arguments }),
}

// fairKeys are those of a fair queue: its lanes, and those of a work queue but for a single active consumer, which would get all messages.
var fairKeys = append([]key[fairQueue]{
	with("lanes", "How many queues there are for noisy tenants, 1 to 16. It can't be changed later. Default: 4.", integer[int](1), func(q *fairQueue) *int { return &q.lanes }),
}, lift(slices.DeleteFunc(slices.Clone(workKeys), func(k key[declare.QuorumQueue]) bool { return k.name == singleActiveKey }), func(q *fairQueue) *declare.QuorumQueue { return &q.queue })...)

// lift makes keys of a part those of the whole.
func lift[T, P any](keys []key[P], part func(*T) *P) (lifted []key[T]) {
	for _, k := range keys {
		lifted = append(lifted, key[T]{
			name: k.name, about: k.about, required: k.required, schema: k.schema, field: k.field,
			read:  func(r *reader, a at, into *T) { k.read(r, a, part(into)) },
			write: func(from *T) *yaml.Node { return k.write(part(from)) },
		})
	}
	return lifted
}

var leaderLocator = like[declare.LeaderLocator](word(string(declare.LeaderClientLocal), string(declare.LeaderBalanced)))

var classicKeys = []key[declare.ClassicQueue]{
	with(deadLetterKey, "Where dead letters go: drop, a queue, or an exchange, with the strategy at-most-once; a classic queue supports no other.", deadLetter,
		func(q *declare.ClassicQueue) *declare.DeadLetterTarget { return &q.DeadLetter }),
	with("message-ttl", "How long a message may wait in the queue. Default: no limit.", duration, func(q *declare.ClassicQueue) *time.Duration { return &q.MessageTTL }),
	with("expires", "Delete the queue when it is unused for this long. Default: never.", duration, func(q *declare.ClassicQueue) *time.Duration { return &q.Expires }),
	with("max-length", "How many messages the queue holds. Default: no limit.", integer[int64](1), func(q *declare.ClassicQueue) *int64 { return &q.MaxLength }),
	with("max-length-bytes", "How many bytes of bodies it holds. Default: no limit.", integer[int64](1), func(q *declare.ClassicQueue) *int64 { return &q.MaxLengthBytes }),
	with("overflow", "What a full queue does: drop-head (default), reject-publish or reject-publish-dlx.",
		like[declare.Overflow](word(string(declare.OverflowDropHead), string(declare.OverflowRejectPublish), string(declare.OverflowRejectPublishDLX))), func(q *declare.ClassicQueue) *declare.Overflow { return &q.Overflow }),
	with("max-priority", "How many priorities there are, up to 255.", integer[int](1), func(q *declare.ClassicQueue) *int { return &q.MaxPriority }),
	with("single-active-consumer", "Deliver to one consumer at a time.", flag, func(q *declare.ClassicQueue) *bool { return &q.SingleActiveConsumer }),
	with("queue-leader-locator", "How the node is chosen: client-local (default) or balanced.", leaderLocator, func(q *declare.ClassicQueue) *declare.LeaderLocator { return &q.LeaderLocator }),
	with("queue-version", "How messages are stored: 1 or 2.", integer[int](1), func(q *declare.ClassicQueue) *int { return &q.Version }),
	with("auto-delete", "Delete the queue with its last consumer.", flag, func(q *declare.ClassicQueue) *bool { return &q.AutoDelete }),
	with("transient", "The queue is gone after a restart of the broker.", flag, func(q *declare.ClassicQueue) *bool { return &q.Transient }),
	with("arguments", `Further arguments, with their "x-".`, further, func(q *declare.ClassicQueue) *map[string]any { return &q.Arguments }),
}

var streamKeys = []key[declare.Stream]{
	with("max-age", "How old messages may get, in whole seconds.", duration, func(s *declare.Stream) *time.Duration { return &s.MaxAge }),
	with("max-length-bytes", "How many bytes the stream holds.", integer[int64](1), func(s *declare.Stream) *int64 { return &s.MaxLengthBytes }),
	with("stream-max-segment-size-bytes", "The size of one of its files.", integer[int64](1), func(s *declare.Stream) *int64 { return &s.MaxSegmentSize }),
	with("stream-filter-size-bytes", "The size of the filter of a chunk: 16 to 255.", integer[int](1), func(s *declare.Stream) *int { return &s.FilterSize }),
	with("initial-cluster-size", "How many replicas the stream has at first.", integer[int](1), func(s *declare.Stream) *int { return &s.InitialClusterSize }),
	with("queue-leader-locator", "How the leading node is chosen: client-local (default) or balanced.", leaderLocator, func(s *declare.Stream) *declare.LeaderLocator { return &s.LeaderLocator }),
	with("arguments", `Further arguments, with their "x-".`, further, func(s *declare.Stream) *map[string]any { return &s.Arguments }),
}

var rawKeys = []key[declare.RawQueue]{
	with("durable", "Keep the queue over a restart of the broker. Default: false.", flag, func(q *declare.RawQueue) *bool { return &q.Durable }),
	with("auto-delete", "Delete the queue with its last consumer.", flag, func(q *declare.RawQueue) *bool { return &q.AutoDelete }),
	with("exclusive", "The queue lives as long as the connection that declares it.", flag, func(q *declare.RawQueue) *bool { return &q.Exclusive }),
	with("arguments", `All arguments, with their "x-"; x-queue-type among them.`, further, func(q *declare.RawQueue) *map[string]any { return &q.Arguments }),
}

var exchangeKeys = []key[declare.Exchange]{
	with("type", "direct (default), fanout, topic, headers, x-modulus-hash (RabbitMQ 4.3), or that of a plugin.", like[declare.ExchangeType](text), func(x *declare.Exchange) *declare.ExchangeType { return &x.Type }),
	with("alternate-exchange", "The exchange for messages that no binding matches.", text, func(x *declare.Exchange) *string { return &x.AlternateExchange }),
	with("auto-delete", "Delete the exchange with its last binding.", flag, func(x *declare.Exchange) *bool { return &x.AutoDelete }),
	with("internal", "Only other exchanges may publish to it.", flag, func(x *declare.Exchange) *bool { return &x.Internal }),
	with("arguments", "Further arguments.", further, func(x *declare.Exchange) *map[string]any { return &x.Arguments }),
}

var bindingKeys = []key[declare.Binding]{
	with("source", "The exchange that messages come from.", text, func(b *declare.Binding) *string { return &b.Source }).must(),
	with("queue", "The queue that they go to. Either this or exchange.", text, func(b *declare.Binding) *string { return &b.Queue }),
	with("exchange", "The exchange that they go to. Either this or queue.", text, func(b *declare.Binding) *string { return &b.Exchange }),
	with("key", "The binding key: the routing key for a direct exchange, a pattern for a topic exchange.", text, func(b *declare.Binding) *string { return &b.Key }),
	with("match", "How a headers exchange compares: all (default), any, all-with-x or any-with-x.",
		like[declare.Match](word(string(declare.MatchAll), string(declare.MatchAny), string(declare.MatchAllWithX), string(declare.MatchAnyWithX))), func(b *declare.Binding) *declare.Match { return &b.Match }),
	with("headers", "What a headers exchange compares.", further, func(b *declare.Binding) *map[string]any { return &b.Headers }),
	with("arguments", "Further arguments.", further, func(b *declare.Binding) *map[string]any { return &b.Arguments }),
}

// target is a dead-letter mapping in its written form.
type target struct {
	queue, exchange, key string
	strategy             string
}

var targetKeys = []key[target]{
	with("queue", "The queue that dead letters go to. Either this or exchange.", text, func(t *target) *string { return &t.queue }),
	with("exchange", "The exchange that dead letters go to.", text, func(t *target) *string { return &t.exchange }),
	with("routing-key", "The routing key. Default: each message's own.", text, func(t *target) *string { return &t.key }),
	with("strategy", "at-least-once (default), or at-most-once, which loses messages that the target doesn't accept.",
		word("at-least-once", atMostOnce), func(t *target) *string { return &t.strategy }),
}

const (
	dropWord   = "drop"
	atMostOnce = "at-most-once"
)

// deadLetter is the word drop or a target.
var deadLetter = shape[declare.DeadLetterTarget]{
	within: []goField{
		{path: []string{"Exchange"}, keys: []string{"exchange"}},
		{path: []string{"RoutingKey"}, keys: []string{"queue", "routing-key"}},
		{path: []string{"AtMostOnce"}, keys: []string{"strategy"}},
	},
	schema: map[string]any{"anyOf": []any{map[string]any{"const": dropWord}, and(and(objectSchema(targetKeys), "type", "object"), "oneOf", oneOfKeys("queue", "exchange"))}},
	read: func(r *reader, a at) (declare.DeadLetterTarget, bool) {
		const remedy = "write drop, {queue: NAME}, or {exchange: NAME, routing-key: KEY}"
		if a.node.Kind == yaml.ScalarNode {
			if r.plain(a) && a.node.Value == dropWord {
				return declare.Drop(), true
			}
			r.bad(a, value(a.node), "is neither drop nor a mapping", remedy)
			return declare.DeadLetterTarget{}, false
		}
		t, ok := object(targetKeys).read(r, a)
		switch {
		case !ok:
		case t.queue == "" && t.exchange == "":
			r.bad(a, nil, "names neither a queue nor an exchange", remedy)
			ok = false
		case t.queue != "" && (t.exchange != "" || t.key != ""):
			r.bad(a, t.queue, "names a queue and also an exchange or a routing key", remedy)
			ok = false
		}
		d := declare.DeadLetterTarget{Exchange: t.exchange, RoutingKey: t.key, AtMostOnce: t.strategy == atMostOnce}
		if t.queue != "" {
			d.RoutingKey = t.queue
		}
		return d, ok
	},
	write: func(d declare.DeadLetterTarget) *yaml.Node {
		if d.IsDrop() {
			return textNode(dropWord)
		}
		t := target{exchange: d.Exchange, key: d.RoutingKey}
		if d.AtMostOnce {
			t.strategy = atMostOnce
		}
		if d.Exchange == "" {
			t.queue, t.key = d.RoutingKey, ""
		}
		return inOneLine(writeKeys(targetKeys, &t))
	},
}

// and adds to a schema.
func and(schema map[string]any, key string, v any) map[string]any {
	schema[key] = v
	return schema
}

// oneOfKeys is a schema's list of keys. Exactly one of them is required.
func oneOfKeys(names ...string) []any {
	var list []any
	for _, n := range names {
		list = append(list, map[string]any{"required": []string{n}})
	}
	return list
}

// section is a place in the file and the keys that are known there, for hints.
type section struct {
	where string
	keys  []string
}

var sections []section

func init() {
	sections = []section{
		{"at the top", namesOf(fileKeys())}, {"under retry", namesOf(retryKeys)}, {"under retry.names", namesOf(nameKeys)},
		{"under retry.exponential", namesOf(exponentialKeys)}, {"under retry.any-delay", namesOf(ladderKeys)},
		{"to a rule under retry.rules", namesOf(ruleKeys)}, {"under central", namesOf(centralKeys)},
		{"to a queue", namesOf(workKeys)}, {"to a fair queue", namesOf(fairKeys)}, {"to an exchange", namesOf(exchangeKeys)}, {"to a binding", namesOf(bindingKeys)},
		{"to a classic queue", namesOf(classicKeys)}, {"to a stream", namesOf(streamKeys)}, {"to a dead-letter", namesOf(targetKeys)},
	}
}

func namesOf[T any](keys []key[T]) []string {
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	return names
}
