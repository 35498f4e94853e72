package rules

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"
)

// Entry is a rule: for its texts, see Rule in package operate/audit.
type Entry struct {
	ID, Severity, Examined, Summary, Remedy string

	// Needs are the parts of a snapshot without which the rule isn't run.
	Needs []string
	Check func(*Checker)
}

// StallAt is how many dead letters a queue's dead-letter worker handles at once: when so many
// can't be delivered, all behind them wait.
const StallAt = 32

var Everything = []string{PartExchanges, partQueues, PartBindings, PartPolicies}

// Table is the one table for guards, Verify, and Examine, which has more that need a running cluster.
var Table = []Entry{
	{
		ID: "missing", Severity: SeverityError,
		Summary: "everything in the topology exists",
		Remedy:  "apply the topology, or import its definitions",
		Check: func(c *Checker) {
			for _, change := range c.diff.Changes {
				switch {
				case change.Kind == changeCreate:
					c.Report(change.Resource, "it doesn't exist")
				case change.Kind == changeRefuse && len(change.Differences) == 0:
					c.Report(change.Resource, "it doesn't exist: %s", change.Why)
				}
			}
		},
	},
	{
		ID: "different", Severity: SeverityError,
		Summary: "everything in the topology is as declared, argument by argument",
		Remedy:  "run plan, which lists the remedies",
		Check: func(c *Checker) {
			for _, change := range c.diff.Changes {
				for _, d := range change.Differences {
					c.Report(change.Resource, "%s is %s, and should be %s", d.Argument, typed(d.Found), typed(d.Wanted))
					c.found[len(c.found)-1].Argument = d.Argument
				}
			}
		},
	},
	{
		ID: "unseen", Severity: SeverityWarning,
		Summary: "the user may read everything in the topology",
		Remedy:  "grant the user the permission that the finding names, or use the HTTP API",
		Check: func(c *Checker) {
			for _, change := range c.diff.Changes {
				if change.Kind == changeUnknown && change.Resource.Kind != "exchange" {
					c.Report(change.Resource, "it is unknown whether it exists: %s", change.Why)
				}
			}
		},
	},
	{
		ID: "ill-typed-argument", Severity: SeverityError, Examined: SeverityError,
		Summary: "arguments have the types and values that the broker reads",
		Remedy:  "declare the queue with typed arguments, under a new name if it contains messages",
		Check: func(c *Checker) {
			c.eachArgument(func(q Queue, key string, v any) {
				if problem, _, unknown := queuearg.Wrong(q.Type, key, v); problem != "" && !unknown {
					c.ReportQueue(q, "%s %s", key, problem)
				}
			})
		},
	},
	{
		ID: "unknown-argument", Severity: SeverityWarning, Examined: SeverityNote,
		Summary: "the broker knows every argument for the queue's type",
		Remedy:  "check the spelling; the argument has no effect",
		Check: func(c *Checker) {
			c.eachArgument(func(q Queue, key string, v any) {
				// hopback's own are notes to itself: partition.Group keeps its settings in them.
				if problem, _, unknown := queuearg.Wrong(q.Type, key, v); unknown && !strings.HasPrefix(key, "x-hopback-") {
					c.ReportQueue(q, "%.80s %s", key, problem)
				}
			})
		},
	},
	{
		ID: rulePolicyPattern, Severity: SeverityWarning, Examined: SeverityWarning,
		Summary: "it is known for each policy whether it applies",
		Remedy:  "examine the live broker, which says what applies, or write the pattern without back references, conditions, and recursion",
		Check: func(c *Checker) {
			for _, d := range c.doubts {
				over := make([]string, len(d.over))
				for i, t := range d.over {
					over[i] = t.String()
				}
				c.Report(declare.Resource{Kind: "policy", Name: d.policy.Name}, "its pattern %.80q can't be evaluated here, so it may apply to %s, or not; findings that depend on it say so", d.policy.Pattern, enumerated(over, 5))
			}
		},
	},
	{
		ID: "impossible-queue", Severity: SeverityError, Examined: SeverityError,
		Summary: "a quorum queue or a stream is durable and not auto-delete",
		Remedy:  "make it durable and not auto-delete; x-expires deletes a queue that nobody uses",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if q.Type != queuearg.Classic && (q.AutoDelete || !q.Durable) {
					c.ReportQueue(q, "a %s queue can't be auto-delete or transient: the broker refuses it, and an import of definitions leaves it out without an error", q.Type)
					c.Path("publisher", "", NameOfQueue(q.Name), "doesn't exist after the import", "dropped")
				}
			}
		},
	},
	{
		ID: "dead-letter", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartPolicies},
		Summary: "a queue that can drop messages has a dead-letter exchange",
		Remedy:  "give it a dead-letter exchange in its declaration or by a policy",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if _, _, ok := q.DeadLetters(); ok || q.Type == queuearg.Stream || q.Passing() {
					continue
				}
				limit, set := q.Number("x-delivery-limit")
				unlimited := !set && !c.limitsDeliveries()
				severity := SeverityError
				switch {
				case q.HasTTL():
					c.ReportQueue(q, "it has no dead-letter exchange, so it drops messages that expire")
					severity = SeverityWarning // that may be intended
				case q.Type == queuearg.Quorum && !(set && limit < 0) && !unlimited:
					if !set {
						limit, severity = 20, SeverityWarning // only a message that crashes its workers comes back so often
					}
					c.ReportQueue(q, "it has no dead-letter exchange, so it drops a message that is rejected or comes back more than %d times", limit)
				case (q.Type == queuearg.Classic || unlimited) && !(c.Foreign && c.endOfLine(q.Name)):
					c.ReportQueue(q, "it has no dead-letter exchange, so it drops a message that is rejected")
					severity = SeverityNote // many applications never reject
				default:
					continue
				}
				c.As(severity)
				c.Path(NameOfQueue(q.Name), "rejected, expired, or over the delivery limit", "dropped")
			}
		},
	},
	{
		ID: "at-most-once", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartPolicies},
		Summary: "queues dead-letter at least once",
		Remedy:  "make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if exchange, _, ok := q.DeadLetters(); ok && !q.atLeastOnce() && !q.Passing() {
					if c.Foreign && q.DropsHeadAtLeastOnce() {
						continue // a rule for that
					}
					by := c.ByPolicy(q, "x-overflow")
					if by == "" {
						by = c.ByPolicy(q, "x-dead-letter-strategy")
					}
					c.ReportQueue(q, "it dead-letters at most once%s, so a dead letter is lost if its target is missing or full", by)
					c.Path(NameOfQueue(q.Name), "dead-lettered", NameOf(exchange), "without a confirm", "target, or lost")
				}
			}
		},
	},
	{
		ID: "dead-letter-exchange", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
		Summary: "every dead-letter exchange exists",
		Remedy:  "declare the exchange, or fix the queue's dead-letter exchange",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				exchange, _, ok := q.DeadLetters()
				if ok && exchange != "" && c.absent(exchange) {
					c.ReportQueue(q, "its dead-letter exchange %.80q doesn't exist", exchange)
					c.Path(NameOfQueue(q.Name), "dead-lettered", NameOf(exchange), "doesn't exist", "lost, or stuck")
				}
			}
		},
	},
	{
		ID: "dead-letter-route", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
		Summary: "dead letters can reach a queue",
		Remedy:  "bind a queue to the dead-letter exchange with that key, and give it an alternate exchange",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				exchange, key, ok := q.DeadLetters()
				if _, exists := c.Exchanges[exchange]; !ok || exchange != "" && !exists || exchange == "" && key == nil {
					continue // the rule before reports an exchange that doesn't exist
				}
				if len(c.deadFrom(q, "")) > 0 {
					continue
				}
				with := "with any key"
				if key != nil {
					with = fmt.Sprintf("with the key %.80q", *key)
				}
				c.ReportQueue(q, "its dead letters reach no queue: %s has no binding for them %s", NameOf(exchange), with)
				c.Path(NameOfQueue(q.Name), "dead-lettered", NameOf(exchange), "no binding "+with, "lost, or stuck")
			}
		},
	},
	{
		ID: "alternate-exchange", Severity: SeverityWarning, Examined: SeverityWarning, Needs: Everything,
		Summary: "an exchange for dead letters has an alternate exchange, or bindings that match everything",
		Remedy:  "give it an alternate exchange with a parking queue; a policy can set one on a live exchange",
		Check: func(c *Checker) {
			from := map[string][]Queue{}
			for _, q := range c.Sorted() {
				if exchange, _, ok := q.DeadLetters(); ok {
					from[exchange] = append(from[exchange], q)
				}
			}
			for _, x := range c.SortedExchanges() {
				if c.Foreign && len(c.ladderKeys(x)) == 2 {
					continue // what comes from the level above has a key of the ladder's form
				}
				for _, q := range from[x.Name] {
					if _, key, _ := q.DeadLetters(); c.sure(x.Name, DeadLetter{Key: key}) {
						continue
					}
					c.Report(ExchangeResource(x.Name), "it has no alternate exchange for messages that match no binding: such dead letters of queue %.80q are lost, or %d of them block all others", q.Name, StallAt)
					c.Path(NameOfQueue(q.Name), "dead-lettered", NameOf(x.Name), "a key that no binding matches", "lost, or stuck")
					break
				}
			}
		},
	},
	{
		ID: "alternate-exchange-missing", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
		Summary: "every alternate exchange exists",
		Remedy:  "declare it and bind a queue to it",
		Check: func(c *Checker) {
			for _, x := range c.SortedExchanges() {
				if x.Alternate == "" || !c.absent(x.Alternate) || c.nextGeneration(x) {
					continue
				}
				switch {
				case !c.matchesAll(x):
					c.Report(ExchangeResource(x.Name), "its alternate exchange %.80q doesn't exist, so messages that match no binding are lost", x.Alternate)
					c.Path("publisher", "", NameOf(x.Name), "no binding matches", NameOf(x.Alternate), "doesn't exist", "lost")
				case c.Foreign:
					c.Report(ExchangeResource(x.Name), "its alternate exchange %.80q doesn't exist; nothing needs it as long as a binding matches every message", x.Alternate)
					c.As(SeverityNote)
					c.Path("publisher", "", NameOf(x.Name), "once its bindings are gone", NameOf(x.Alternate), "doesn't exist", "lost")
				}
			}
		},
	},
	{
		ID: "alternate-exchange-route", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
		Summary: "every alternate exchange routes to a queue",
		Remedy:  "bind a queue to the alternate exchange; a fanout exchange matches everything",
		Check: func(c *Checker) {
			for _, x := range c.SortedExchanges() {
				if _, exists := c.Exchanges[x.Alternate]; exists && x.Alternate != "" && len(c.Reach(x.Alternate, DeadLetter{})) == 0 {
					c.Report(ExchangeResource(x.Name), "its alternate exchange %.80q routes to no queue", x.Alternate)
					c.Path("publisher", "", NameOf(x.Name), "no binding matches", NameOf(x.Alternate), "no binding", "lost")
				}
			}
		},
	},
	{
		ID: "delivery-limit", Severity: SeverityError, Examined: SeverityWarning, Needs: Everything,
		Summary: "a dead-letter queue has no delivery limit",
		Remedy:  "set x-delivery-limit to -1; a policy can do that unless the queue's own argument is a limit, which needs a new queue",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if limit, ok := q.Number("x-delivery-limit"); q.Type != queuearg.Quorum || q.HasTTL() || ok && limit < 0 || !ok && !c.limitsDeliveries() {
					continue
				}
				if from, ok := c.countedFeeder(q); ok {
					c.ReportQueue(q, "it has a delivery limit, and dead letters from queue %.80q keep their delivery count", from.Name)
					c.Path(NameOfQueue(from.Name), "over its delivery limit", NameOfQueue(q.Name), "returned once more", "dropped, or dead-lettered again")
				}
			}
		},
	},
	{
		ID: "max-length", Severity: SeverityWarning, Examined: SeverityWarning, Needs: Everything,
		Summary: "a queue that receives dead letters or delays messages has no max-length",
		Remedy:  "remove the limit, and limit the publishers instead",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				switch key := q.Limited(); {
				case key == "":
				case c.IsFed(q.Name):
					c.ReportQueue(q, "it has %s%s: while it is full, dead letters for it are lost, or %d of them block all others in queue %.80q, including messages that wait for a retry", key, c.ByPolicy(q, key), StallAt, c.FirstFeeder(q.Name).Name)
					c.Path(NameOfQueue(c.FirstFeeder(q.Name).Name), "dead-lettered", NameOfQueue(q.Name), "full", "lost, or stuck")
				case q.Delays() && c.bound[q.Name]:
					c.ReportQueue(q, "it has %s%s: while it is full, failed messages can't be retried through it, and stay unacknowledged at their workers", key, c.ByPolicy(q, key))
					c.Path("worker", "retried", NameOfQueue(q.Name), "full", "unacknowledged at the worker")
				}
			}
		},
	},
	{
		ID: "delayed-drop-head", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartPolicies, PartVersion},
		Summary: "a quorum queue that can hold messages until their delivery time doesn't drop the oldest when it is full",
		Remedy:  "set x-overflow to reject-publish",
		Check: func(c *Checker) {
			// Before 4.4 only retries are held so, and the check of StrategyNative finds these queues.
			if yes, _ := atLeast(c.Snapshot, 4, 4); !yes {
				return
			}
			for _, q := range c.Sorted() {
				if overflow, set := q.Text("x-overflow"); q.Limited() != "" && q.Type == queuearg.Quorum && (!set || overflow == string(declare.OverflowDropHead)) {
					c.ReportQueue(q, "it has %s with overflow drop-head: once the messages that wait for their x-opt-delivery-time exceed the limit, the queue hangs and uses all of a CPU core; anyone who may publish to it can cause this", q.Limited())
					c.Path("publisher", "x-opt-delivery-time", NameOfQueue(q.Name), "over its limit", "hangs")
				}
			}
		},
	},
	{
		ID: "overflow", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartPolicies},
		Summary: "a full queue refuses messages, or dead-letters them",
		Remedy:  "set x-overflow to reject-publish: publishers then see the refusal",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				overflow, set := q.Text("x-overflow")
				_, _, deadLetters := q.DeadLetters()
				if key := q.Limited(); key != "" && q.Type != queuearg.Stream && !deadLetters && !q.Passing() && (!set || overflow == string(declare.OverflowDropHead)) {
					c.ReportQueue(q, "it has %s and drops the oldest message when it is full", key)
					c.Path("publisher", "confirmed", NameOfQueue(q.Name), "full", "its oldest message is dropped")
				}
			}
		},
	},
	{
		ID: "expires", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartPolicies},
		Summary: "no durable queue expires when it is unused",
		Remedy:  "leave x-expires out, and exclude the queue from policies that set expires",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				ms, ok := q.Number("x-expires")
				if !ok || q.Passing() {
					continue
				}
				if q.Delays() {
					c.ReportQueue(q, "it is deleted %d ms after its declaration, with all messages in it%s: a delay queue has no consumers", ms, c.ByPolicy(q, "x-expires"))
					ttl, _ := q.Number("x-message-ttl")
					switch {
					case q.Type == queuearg.Quorum || ms <= ttl:
						c.As(SeverityError)
					default:
						c.As(SeverityNote) // Symfony and Laravel declare it again before each message
					}
				} else {
					c.ReportQueue(q, "it is deleted after %d ms without a consumer, with all messages in it%s", ms, c.ByPolicy(q, "x-expires"))
				}
				c.Path(NameOfQueue(q.Name), fmt.Sprintf("%d ms unused", ms), "deleted with its messages")
			}
		},
	},
	{
		ID: "expiry-cycle", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
		Summary: "no message returns to a queue by expiry alone",
		Remedy:  "let expired messages go to a queue without a time to live, or to one with consumers",
		Check: func(c *Checker) {
			f := c.flowOf("expired", Queue.HasTTL, nil)
			for _, q := range c.Sorted() {
				if part, ok := f.part[q.Name]; ok && f.looped[part] {
					c.ReportQueue(q, "a message that nobody consumes returns to it by expiry alone: the broker treats that as a cycle, and drops the message or keeps it forever")
					c.Path(NameOfQueue(q.Name), "expired", "back to "+NameOfQueue(q.Name), "a cycle", "dropped, or kept forever")
				}
			}
		},
	},
	{
		ID: "orphan-delay-queue", Severity: SeverityWarning, Needs: Everything,
		Summary: "every delay queue is bound",
		Remedy:  "bind it to the retry exchange, or delete it once it is empty",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if q.Delays() && !c.bound[q.Name] && !c.IsFed(q.Name) && !q.Passing() {
					c.ReportQueue(q, "it delays messages, but no exchange is bound to it")
				}
			}
		},
	},
	{
		ID: "delay-mismatch", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartPolicies},
		Summary: "a delay queue holds messages for the delay in its binding key",
		Remedy:  "bind the queue whose x-message-ttl is that delay, and exclude delay queues from policies that set message-ttl",
		Check: func(c *Checker) {
			for _, b := range c.Snapshot.Bindings {
				q, ok := c.Queues[b.Queue]
				text, isDelay := strings.CutPrefix(b.Key, "delay.")
				text, isDelay2 := strings.CutSuffix(text, ".#")
				ms, err := strconv.ParseInt(text, 10, 64)
				if !ok || !isDelay || !isDelay2 || err != nil {
					continue
				}
				if ttl, set := q.Number("x-message-ttl"); !set {
					c.ReportQueue(q, "its binding key says %d ms, but it holds messages forever", ms)
					c.Path(NameOf(b.Source), b.Key, NameOfQueue(q.Name), "never", "stuck")
				} else if ttl != ms {
					c.ReportQueue(q, "its binding key says %d ms, but it holds messages for %d ms%s", ms, ttl, c.ByPolicy(q, "x-message-ttl"))
					c.Path(NameOf(b.Source), b.Key, NameOfQueue(q.Name), fmt.Sprintf("after %d ms", ttl), earlyOrLate(ttl, ms))
				}
			}
			for _, q := range c.Sorted() {
				// A headers binding and a ladder say nothing about the delay; the argument does.
				own, set := q.Arguments["x-message-ttl"].(int64)
				ttl, _ := q.Number("x-message-ttl")
				reported := slices.ContainsFunc(c.found, func(f Finding) bool { return f.Resource == QueueResource(q.Name) })
				if set && ttl != own && q.Delays() && !reported {
					c.ReportQueue(q, "it is declared to hold messages for %d ms, but holds them for %d ms%s", own, ttl, c.ByPolicy(q, "x-message-ttl"))
					c.Path(NameOfQueue(q.Name), fmt.Sprintf("after %d ms", ttl), earlyOrLate(ttl, own))
				}
			}
		},
	},
	{
		ID: "several-ways-back", Severity: SeverityWarning, Examined: SeverityNote, Needs: Everything,
		Summary: "a delayed message returns to one queue",
		Remedy:  "bind each queue by its own name, and none with a key that matches everything",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				exchange, key, ok := q.DeadLetters()
				if !ok || !q.Delays() || exchange == "" {
					continue
				}
				x := c.Exchanges[exchange]
				targets := map[string]bool{}
				total := 0
				for _, b := range c.BySource[exchange] {
					may, must := x.Matches(b, DeadLetter{key, "expired"})
					if must {
						targets[b.Queue+"\x00"+b.Exchange] = true
					}
					if may {
						total++
					}
				}
				if len(targets) > 0 && total > 1 && x.Type != declare.ExchangeHeaders {
					c.ReportQueue(q, "its messages return to several queues, as duplicates: one of several bindings of the exchange %.80q matches everything", exchange)
					c.Path(NameOfQueue(q.Name), "after its delay", NameOf(exchange), "several bindings match", "one copy per queue")
				}
			}
		},
	},
	{
		ID: "work-queue-ttl", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartExchanges, PartBindings, PartPolicies},
		Summary: "no policy sets message-ttl on the work queue of a retry topology",
		Remedy:  "exclude the queue from the policy; for messages that may expire, declare the queue with a message TTL, which retry.With takes into account",
		Check: func(c *Checker) {
			if since, known := atLeast(c.Snapshot, 4, 3); known && !since {
				return
			}
			for _, q := range c.Sorted() {
				ttl, _ := q.Number("x-message-ttl")
				if by := c.ByPolicy(q, "x-message-ttl"); by != "" && c.mayWaitNatively(q, ttl) {
					c.ReportQueue(q, "its messages expire after %d ms%s, and a worker can't see that: with StrategyNative or StrategyAuto the broker dead-letters messages that wait longer for their retry", ttl, by)
					c.Path(NameOfQueue(q.Name), fmt.Sprintf("waits for its retry for more than %d ms", ttl), "dead-lettered")
				}
			}
		},
	},
	{
		ID: "shared-ladder", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartExchanges, PartBindings},
		Summary: "an exchange of a ladder of delay queues has the two bindings of one ladder, and no others",
		Remedy:  "remove the bindings that aren't this ladder's, or give each ladder its own names, as retry.Topology does",
		Check: func(c *Checker) {
			for _, x := range c.SortedExchanges() {
				if keys := c.ladderKeys(x); len(keys) > 2 {
					c.Report(ExchangeResource(x.Name), "it is a level of a ladder, and has %d bindings instead of 2: a message is routed by each one that it matches, so one message becomes several; the keys are %s", len(keys), Listed(keys, 6))
					c.Path("a delayed message", "", NameOf(x.Name), "several bindings match", "several copies")
				}
			}
		},
	},
	{
		ID: "modulus-hash-binding", Severity: SeverityError, Needs: []string{PartExchanges, PartBindings},
		Summary: "a modulus-hash exchange has the bindings of the topology, and no others",
		Remedy:  "remove these bindings, or add them to the topology; removing one moves nearly every key to another queue, so for the order of a key's messages stop the publishers first, until the queues are empty",
		Check: func(c *Checker) {
			wanted := map[string][]declare.Binding{}
			for _, b := range c.wanted.Bindings {
				wanted[bindingQuestion(b)] = append(wanted[bindingQuestion(b)], b)
			}
			for _, x := range c.wanted.Exchanges {
				if x.Type != declare.ExchangeModulusHash {
					continue
				}
				var others []string
				for _, b := range c.BySource[x.Name] {
					if !slices.ContainsFunc(wanted[bindingQuestion(b)], func(w declare.Binding) bool { return SameBinding(w, b) }) {
						others = append(others, b.Queue+b.Exchange)
					}
				}
				if len(others) > 0 {
					c.Report(ExchangeResource(x.Name), "%d of its %d bindings aren't in the topology: they take their share of the messages from the queues of the topology; they are to %s", len(others), len(c.BySource[x.Name]), Listed(others, 6))
				}
			}
		},
	},
	foreignBinding,
	{
		ID: "exchange-type", Severity: SeverityError, Needs: []string{PartVersion},
		Summary: "the broker has the exchange type",
		Remedy:  "upgrade to RabbitMQ 4.3",
		Check: func(c *Checker) {
			if yes, known := atLeast(c.Snapshot, 4, 3); yes || !known {
				return
			}
			for _, x := range c.wanted.Exchanges {
				if x.Type == declare.ExchangeModulusHash && c.absent(x.Name) {
					c.Report(ExchangeResource(x.Name), "its type %s needs RabbitMQ 4.3 or later, and this is %s", x.Type, c.Snapshot.Version)
				}
			}
		},
	},
	{
		ID: "wildcard-name", Severity: SeverityError, Examined: SeverityWarning,
		Summary: "no queue's name is a wildcard in the binding that returns its messages",
		Remedy:  "rename the queue; a star or hash within a longer word is fine",
		Check: func(c *Checker) {
			for _, b := range c.Snapshot.Bindings {
				for word := range strings.SplitSeq(b.Queue, ".") {
					if (word == "*" || word == "#") && strings.HasSuffix(b.Key, b.Queue) && b.Key != "#" {
						c.Report(QueueResource(b.Queue), "the binding %.80q also matches messages of other queues, and routes them here", b.Key)
						c.Path(NameOf(b.Source), "messages of other queues, too", NameOfQueue(b.Queue))
						break
					}
				}
			}
		},
	},
	{
		ID: "transient-exchange", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartExchanges, PartBindings},
		Summary: "exchanges that route to durable queues are durable and not auto-delete",
		Remedy:  "delete the exchange and declare it durable, not auto-delete, with its bindings",
		Check: func(c *Checker) {
			for _, x := range c.SortedExchanges() {
				leads := slices.ContainsFunc(c.BySource[x.Name], func(b declare.Binding) bool {
					return b.Exchange != "" || !c.Queues[b.Queue].Passing() && c.Queues[b.Queue].Name != ""
				})
				switch {
				case leads && !x.Durable:
					c.Report(ExchangeResource(x.Name), "it isn't durable: a restart of the broker deletes it and its bindings to durable queues")
					c.Path("publisher", "", NameOf(x.Name), "deleted by a restart", "lost")
				case leads && x.AutoDelete:
					c.Report(ExchangeResource(x.Name), "it is auto-delete: it is deleted with its last binding, and messages that are published to it are lost")
					c.Path("publisher", "", NameOf(x.Name), "deleted with its last binding", "lost")
				}
			}
		},
	},
	{
		ID: "transient-queue", Severity: SeverityError, Examined: SeverityWarning,
		Summary: "queues are durable or exclusive",
		Remedy:  "declare it durable, or exclusive if it belongs to one connection, before the upgrade to RabbitMQ 4.4",
		Check: func(c *Checker) {
			transient := func(q declare.QueueInfo) bool { return !q.Durable && !q.Exclusive }
			for _, q := range c.Sorted() {
				if transient(q.QueueInfo) {
					c.ReportQueue(q, "it is transient and not exclusive: a restart deletes it with its messages, and RabbitMQ 4.4 refuses such queues, and doesn't start on a node that has one")
					c.Path(NameOfQueue(q.Name), "its node restarts", "deleted with its messages")
				}
			}
			for _, q := range FromTopology(declare.Topology{Queues: c.wanted.Queues}).Queues {
				if _, exists := c.Queues[q.Name]; !exists && transient(q) {
					c.Report(QueueResource(q.Name), "the topology declares it neither durable nor exclusive: RabbitMQ 4.4 refuses such queues, and doesn't start on a node that has one")
				}
			}
		},
	},
	{
		ID: "not-replicated", Severity: SeverityWarning, Examined: SeverityNote,
		Summary: "durable queues are quorum queues or streams",
		Remedy:  "declare a quorum queue under a new name and move the messages, as package operate/migrate does",
		Check: func(c *Checker) {
			if c.Foreign && len(c.Snapshot.Nodes) == 1 {
				return // nothing is replicated on a single node
			}
			for _, q := range c.Sorted() {
				if q.Type == queuearg.Classic && !q.Passing() && !c.mirrored(q) {
					c.ReportQueue(q, "it is a classic queue, with one copy: it is lost with its node")
					c.Path(NameOfQueue(q.Name), "its node stops", "unavailable, or lost with the disk")
					if len(c.Snapshot.Nodes) > 1 {
						c.As(SeverityWarning)
					}
				}
			}
		},
	},
	{
		ID: "replicas", Severity: SeverityError, Examined: SeverityWarning, Needs: []string{PartNodes},
		Summary: "on a cluster, a queue has at least three replicas",
		Remedy:  "add replicas with rabbitmq-queues grow, or move the queue",
		Check: func(c *Checker) {
			want := min(3, len(c.Snapshot.Nodes))
			for _, q := range c.Sorted() {
				if n := len(q.Replicas); q.Type != queuearg.Classic && n > 0 && n < want {
					c.ReportQueue(q, "it has a replica on %d of the cluster's %d nodes", n, len(c.Snapshot.Nodes))
					c.Path(NameOfQueue(q.Name), "a node with a replica stops", "neither accepts nor delivers")
				}
			}
		},
	},
	{
		ID: "replicas-down", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartNodes},
		Summary: "every replica is up",
		Remedy:  "start the nodes that are down, or replace those replicas",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				if q.Type == queuearg.Classic || len(q.Replicas) == 0 {
					continue
				}
				down := slices.DeleteFunc(slices.Clone(q.Replicas), func(n string) bool { return slices.Contains(q.Online, n) })
				switch {
				case len(down) > 0:
					c.ReportQueue(q, "%d of its %d replicas are down: %s", len(down), len(q.Replicas), strings.Join(down, ", "))
					c.Path("publisher", "no confirm", NameOfQueue(q.Name), "nothing delivered", "consumer")
					if len(down)*2 < len(q.Replicas) { // a majority is up
						c.As(SeverityWarning)
						c.Path(NameOfQueue(q.Name), "more replicas go down", "neither accepts nor delivers")
					}
				case q.Leader == "":
					c.ReportQueue(q, "it has no leader, so it neither accepts nor delivers messages")
					c.Path("publisher", "no confirm", NameOfQueue(q.Name), "nothing delivered", "consumer")
				}
			}
		},
	},
	{
		ID: "stuck-dead-letters", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartCounts},
		Summary: "no dead letters are blocked",
		Remedy:  "check that the dead-letter exchange, its binding, and the target queue exist, and that the queue isn't full; the broker tries again every three minutes",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				switch n := q.MessagesDeadLettering; {
				case n >= StallAt:
					c.ReportQueue(q, "%d dead letters wait for their target: %d that can't be delivered block all others", n, StallAt)
				case n > 0:
					c.ReportQueue(q, "%d dead letters wait for their target", n)
					c.As(SeverityNote) // they may be in flight
				default:
					continue
				}
				c.Path(NameOfQueue(q.Name), "dead-lettered", "a target that is missing or full", "no confirm", "stuck")
			}
		},
	},
	{
		ID: "broker-version", Severity: SeverityWarning, Examined: SeverityWarning, Needs: []string{PartVersion, PartNodes},
		Summary: "a cluster has RabbitMQ 4.0.6 or later, which resends what a deposed leader didn't accept",
		Remedy:  "upgrade to RabbitMQ 4.0.6 or later; until then, if messages stay unanswered after a node was frozen or cut off, move the queue's leader or reconnect",
		Check: func(c *Checker) {
			var major, minor, patch int
			n, _ := fmt.Sscanf(c.Snapshot.Version, "%d.%d.%d", &major, &minor, &patch)
			if n == 3 && major == 4 && minor == 0 && patch < 6 && len(c.Snapshot.Nodes) > 1 {
				c.Report(declare.Resource{Kind: "broker", Name: c.Snapshot.Version}, "after a node was frozen, its sessions may keep sending to the deposed leader of a queue: publishes, settlements and consumers get no answer until the leader moves or the client reconnects")
			}
		},
	},
	{
		ID: "delayed-retry", Severity: SeverityError, Examined: SeverityError, Needs: []string{PartVersion, PartPolicies},
		Summary: "the broker knows the arguments that the queue relies on",
		Remedy:  "upgrade RabbitMQ to that version, or leave the argument out; delay queues of retry.Topology work with every version",
		Check: func(c *Checker) {
			for _, q := range c.Sorted() {
				for _, key := range values.SortedKeys(q.Args) {
					a := queuearg.Known[key]
					// What has no version is older than 4.0.
					if yes, known := atLeast(c.Snapshot, 4, a.Since); known && !yes && a.Since > 0 && slices.Contains(a.Types, q.Type) {
						c.ReportQueue(q, "%s has no effect before RabbitMQ 4.%d, and this is %s", key, a.Since, c.Snapshot.Version)
						c.Path(NameOfQueue(q.Name), "returned", NameOfQueue(q.Name), "delivered again at once", "…")
					}
				}
			}
		},
	},
}

// matchesAll reports whether a binding of an exchange matches every message.
func (c *Checker) matchesAll(x Exchange) bool {
	return slices.ContainsFunc(c.BySource[x.Name], func(b declare.Binding) bool { _, must := x.Matches(b, DeadLetter{}); return must })
}

// nextGeneration reports whether an exchange is the front of a partition group, whose alternate
// exchange doesn't exist before the group's next generation does: partition.Reshard declares it, and
// couldn't if another one were there.
func (c *Checker) nextGeneration(x Exchange) bool {
	return afterName.MatchString(x.Alternate) && x.Type == declare.ExchangeFanout && slices.ContainsFunc(c.BySource[x.Name], func(b declare.Binding) bool {
		return c.Exchanges[b.Exchange].Type == declare.ExchangeModulusHash && b.Exchange != ""
	})
}

var afterName = regexp.MustCompile(`\.after\.[0-9]+$`)

// OfMembers reports whether an exchange is that of a partition group's workers, which bind their
// queues while they run.
func (c *Checker) OfMembers(x Exchange) bool {
	group, ok := strings.CutSuffix(x.Name, ".members")
	return ok && c.Exchanges[group].Type == declare.ExchangeModulusHash
}

// limitsDeliveries reports whether quorum queues have a delivery limit unless they say otherwise, as
// they do since 4.0.
func (c *Checker) limitsDeliveries() bool {
	yes, known := atLeast(c.Snapshot, 4, 0)
	return yes || !known
}

// mirrored reports whether a policy mirrors a classic queue, which it did before 4.0.
func (c *Checker) mirrored(q Queue) bool {
	_, set := q.Text("x-ha-mode")
	return set && !c.limitsDeliveries()
}

// levelKey is the key of a binding at a level of a ladder. The word is 1 for a message that
// waits there, and 0 for one that continues to the level below.
var levelKey = regexp.MustCompile(`^(\*\.)*[01]\.#$`)

// ladderKeys are the keys of all bindings of an exchange that is a level of a ladder, nil for
// any other: the level's messages wait in a queue, and one exchange is below.
func (c *Checker) ladderKeys(x Exchange) []string {
	var keys []string
	waits, passes := false, false
	for _, b := range c.BySource[x.Name] {
		keys = append(keys, b.Key)
		if levelKey.MatchString(b.Key) {
			waits = waits || b.Queue != "" && strings.HasSuffix(b.Key, "1.#")
			passes = passes || b.Exchange != "" && strings.HasSuffix(b.Key, "0.#")
		}
	}
	if x.Type != declare.ExchangeTopic || !waits || !passes {
		return nil
	}
	return keys
}

// rulePolicyPattern is a rule about what Check and Examine themselves can't tell.
const rulePolicyPattern = "policy-pattern"

// Listed is the first of some texts, quoted, and how many more there are.
func Listed(texts []string, most int) string {
	quoted := make([]string, len(texts))
	for i, text := range texts {
		quoted[i] = fmt.Sprintf("%.80q", text)
	}
	return enumerated(quoted, most)
}

// enumerated is the first of some texts, and how many more there are.
func enumerated(texts []string, most int) string {
	if len(texts) <= most {
		return strings.Join(texts, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(texts[:most], ", "), len(texts)-most)
}

func NameOfQueue(name string) string { return QueueResource(name).String() }

// earlyOrLate is where a message is after so many milliseconds instead of others.
func earlyOrLate(after, instead int64) string {
	if after < instead {
		return "back too early"
	}
	return "back too late"
}

// DropsHeadAtLeastOnce is a queue that should dead-letter at least once, and doesn't because of
// its overflow setting.
func (q Queue) DropsHeadAtLeastOnce() bool {
	strategy, _ := q.Text("x-dead-letter-strategy")
	return q.Type == queuearg.Quorum && strategy == "at-least-once" && !q.atLeastOnce()
}

func NameOf(exchange string) string {
	if exchange == "" {
		return "the default exchange"
	}
	return fmt.Sprintf("the exchange %.80q", exchange)
}

// Limited is the argument that bounds a queue's length, or "".
func (q Queue) Limited() string {
	for _, key := range []string{"x-max-length", "x-max-length-bytes"} {
		if _, ok := q.Number(key); ok {
			return key
		}
	}
	return ""
}

// ByPolicy says which policy sets an argument, " by the policy ...", and is "" if the queue's
// own argument counts.
func (c *Checker) ByPolicy(q Queue, key string) string {
	v, set := q.Args[key]
	if own, has := q.Arguments[key]; !set || has && reflect.DeepEqual(own, v) {
		return ""
	}
	for _, operator := range []bool{true, false} {
		p := PolicyOf(c.Snapshot, operator, "queue", q.Type, q.Name)
		if p != nil && reflect.DeepEqual(p.Definition[strings.TrimPrefix(key, "x-")], v) {
			return fmt.Sprintf(" by the policy %.80q", p.Name)
		}
	}
	return ""
}

// mayWaitNatively reports whether a queue is a work queue as retry.Topology declares it, on
// which messages may wait for longer than ttl: it dead-letters under its own name to a
// headers exchange. If only StrategyRepublish can retry its messages, they wait elsewhere.
func (c *Checker) mayWaitNatively(q Queue, ttl int64) bool {
	exchange, key, _ := q.DeadLetters()
	if q.Type != queuearg.Quorum || key == nil || *key != q.Name || c.Exchanges[exchange].Type != declare.ExchangeHeaders {
		return false
	}
	longest, republished := int64(0), false
	for from := range c.feeders(q.Name) {
		if held, ok := from.Number("x-message-ttl"); ok && from.Name != q.Name {
			longest, republished = max(longest, held), true
		}
	}
	if !republished {
		return true
	}
	holds := slices.ContainsFunc(c.BySource[exchange], func(b declare.Binding) bool { return c.Queues[b.Queue].HasTTL() })
	return holds && ttl <= longest
}

func (c *Checker) eachArgument(do func(q Queue, key string, v any)) {
	for _, q := range c.Sorted() {
		for _, key := range values.SortedKeys(q.Arguments) {
			do(q, key, q.Arguments[key])
		}
	}
}
