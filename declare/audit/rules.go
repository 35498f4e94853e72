package audit

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/internal/queuearg"
	"github.com/hopback/hopback/declare/internal/values"
)

// Rule is one check of [Check], of [Examine], or of both. Rules find configuration that loses
// messages or blocks them permanently, not matters of style.
type Rule struct {
	// ID is the rule's name, in findings and in the waive argument of [Check].
	ID string `json:"id"`
	// Severity is "error" if messages are lost or blocked, or will be, and "warning" if that
	// happens only once something else fails as well. It is empty if Check doesn't run the rule.
	Severity string `json:"severity,omitempty"`
	// Examined is the severity for virtual hosts of any application. It can also be "note" for
	// what loses nothing by itself. It is empty if Examine doesn't run the rule.
	Examined string `json:"examined,omitempty"`
	// Summary is what should be true, and Remedy how to fix it. Each is a sentence without a full
	// stop.
	Summary string `json:"summary"`
	Remedy  string `json:"remedy"`

	Explanation

	needs []string
	check func(*check)
}

// Rules returns every rule of [Check], in the order in which it runs them.
func Rules() []Rule { return rulesFor(func(r Rule) bool { return r.Severity != "" }) }

// ExamineRules returns every rule of [Examine], in the order in which it runs them.
func ExamineRules() []Rule { return rulesFor(func(r Rule) bool { return r.Examined != "" }) }

func rulesFor(which func(Rule) bool) []Rule {
	var list []Rule
	for _, r := range slices.Concat(rules, examineRules) {
		if which(r) {
			r.Explanation = explanations[r.ID]
			list = append(list, r)
		}
	}
	return list
}

// stallAt is how many dead letters a queue's dead-letter worker handles at once: when so many
// can't be delivered, all behind them wait.
const stallAt = 32

var everything = []string{partExchanges, partQueues, partBindings, partPolicies}

var rules = []Rule{
	{
		ID: "missing", Severity: severityError,
		Summary: "everything in the topology exists",
		Remedy:  "apply the topology, or import its definitions",
		check: func(c *check) {
			for _, change := range c.diff.Changes {
				switch {
				case change.Kind == changeCreate:
					c.report(change.Resource, "it doesn't exist")
				case change.Kind == changeRefuse && len(change.Differences) == 0:
					c.report(change.Resource, "it doesn't exist: %s", change.Why)
				}
			}
		},
	},
	{
		ID: "different", Severity: severityError,
		Summary: "everything in the topology is as declared, argument by argument",
		Remedy:  "run plan, which lists the remedies",
		check: func(c *check) {
			for _, change := range c.diff.Changes {
				for _, d := range change.Differences {
					c.report(change.Resource, "%s is %s, and should be %s", d.Argument, typed(d.Found), typed(d.Wanted))
					c.found[len(c.found)-1].Argument = d.Argument
				}
			}
		},
	},
	{
		ID: "unseen", Severity: severityWarning,
		Summary: "the user may read everything in the topology",
		Remedy:  "grant the user the permission that the finding names, or use the HTTP API",
		check: func(c *check) {
			for _, change := range c.diff.Changes {
				if change.Kind == changeUnknown && change.Resource.Kind != "exchange" {
					c.report(change.Resource, "it is unknown whether it exists: %s", change.Why)
				}
			}
		},
	},
	{
		ID: "ill-typed-argument", Severity: severityError, Examined: severityError,
		Summary: "arguments have the types and values that the broker reads",
		Remedy:  "declare the queue with typed arguments, under a new name if it contains messages",
		check: func(c *check) {
			c.eachArgument(func(q liveQueue, key string, v any) {
				if problem, _, unknown := queuearg.Wrong(q.Type, key, v); problem != "" && !unknown {
					c.queue(q, "%s %s", key, problem)
				}
			})
		},
	},
	{
		ID: "unknown-argument", Severity: severityWarning, Examined: severityNote,
		Summary: "the broker knows every argument for the queue's type",
		Remedy:  "check the spelling; the argument has no effect",
		check: func(c *check) {
			c.eachArgument(func(q liveQueue, key string, v any) {
				if problem, _, unknown := queuearg.Wrong(q.Type, key, v); unknown {
					c.queue(q, "%.80s %s", key, problem)
				}
			})
		},
	},
	{
		ID: "dead-letter", Severity: severityError, Examined: severityError, needs: []string{partPolicies},
		Summary: "a queue that can drop messages has a dead-letter exchange",
		Remedy:  "give it a dead-letter exchange in its declaration or by a policy",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if _, _, ok := q.deadLetters(); ok || q.Type == queuearg.Stream || q.passing() {
					continue
				}
				limit, set := q.number("x-delivery-limit")
				severity := severityError
				switch {
				case q.hasTTL():
					c.queue(q, "it has no dead-letter exchange, so it drops messages that expire")
					severity = severityWarning // that may be intended
				case q.Type == queuearg.Quorum && !(set && limit < 0):
					if !set {
						limit, severity = 20, severityWarning // only a message that crashes its workers comes back so often
					}
					c.queue(q, "it has no dead-letter exchange, so it drops a message that is rejected or comes back more than %d times", limit)
				case q.Type == queuearg.Classic && !(c.foreign() && c.endOfLine(q.Name)):
					c.queue(q, "it has no dead-letter exchange, so it drops a message that is rejected")
					severity = severityNote // many applications never reject
				default:
					continue
				}
				c.as(severity)
				c.path(nameOfQueue(q.Name), "rejected, expired, or over the delivery limit", "dropped")
			}
		},
	},
	{
		ID: "at-most-once", Severity: severityError, Examined: severityWarning, needs: []string{partPolicies},
		Summary: "queues dead-letter at least once",
		Remedy:  "make it a quorum queue with x-dead-letter-strategy at-least-once and x-overflow reject-publish; a policy can set both",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if exchange, _, ok := q.deadLetters(); ok && !q.atLeastOnce() && !q.passing() {
					if c.foreign() && q.dropsHeadAtLeastOnce() {
						continue // a rule for that
					}
					by := c.byPolicy(q, "x-overflow")
					if by == "" {
						by = c.byPolicy(q, "x-dead-letter-strategy")
					}
					c.queue(q, "it dead-letters at most once%s, so a dead letter is lost if its target is missing or full", by)
					c.path(nameOfQueue(q.Name), "dead-lettered", nameOf(exchange), "without a confirm", "target, or lost")
				}
			}
		},
	},
	{
		ID: "dead-letter-exchange", Severity: severityError, Examined: severityError, needs: everything,
		Summary: "every dead-letter exchange exists",
		Remedy:  "declare the exchange, or fix the queue's dead-letter exchange",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, _, ok := q.deadLetters()
				if ok && exchange != "" && c.absent(exchange) {
					c.queue(q, "its dead-letter exchange %.80q doesn't exist", exchange)
					c.path(nameOfQueue(q.Name), "dead-lettered", nameOf(exchange), "doesn't exist", "lost, or stuck")
				}
			}
		},
	},
	{
		ID: "dead-letter-route", Severity: severityError, Examined: severityError, needs: everything,
		Summary: "dead letters can reach a queue",
		Remedy:  "bind a queue to the dead-letter exchange with that key, and give it an alternate exchange",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, key, ok := q.deadLetters()
				if _, exists := c.exchanges[exchange]; !ok || exchange != "" && !exists || exchange == "" && key == nil {
					continue // the rule before reports an exchange that doesn't exist
				}
				if len(c.deadFrom(q, "")) > 0 {
					continue
				}
				with := "with any key"
				if key != nil {
					with = fmt.Sprintf("with the key %.80q", *key)
				}
				c.queue(q, "its dead letters reach no queue: %s has no binding for them %s", nameOf(exchange), with)
				c.path(nameOfQueue(q.Name), "dead-lettered", nameOf(exchange), "no binding "+with, "lost, or stuck")
			}
		},
	},
	{
		ID: "alternate-exchange", Severity: severityWarning, Examined: severityWarning, needs: everything,
		Summary: "an exchange for dead letters has an alternate exchange, or bindings that match everything",
		Remedy:  "give it an alternate exchange with a parking queue; a policy can set one on a live exchange",
		check: func(c *check) {
			from := map[string][]liveQueue{}
			for _, q := range c.sorted() {
				if exchange, _, ok := q.deadLetters(); ok {
					from[exchange] = append(from[exchange], q)
				}
			}
			for _, x := range c.sortedExchanges() {
				if c.foreign() && len(c.ladderKeys(x)) == 2 {
					continue // what comes from the level above has a key of the ladder's form
				}
				for _, q := range from[x.Name] {
					if _, key, _ := q.deadLetters(); c.sure(x.Name, deadLetter{key: key}, map[string]bool{}) {
						continue
					}
					c.report(exchangeResource(x.Name), "it has no alternate exchange for messages that match no binding: such dead letters of queue %.80q are lost, or %d of them block all others", q.Name, stallAt)
					c.path(nameOfQueue(q.Name), "dead-lettered", nameOf(x.Name), "a key that no binding matches", "lost, or stuck")
					break
				}
			}
		},
	},
	{
		ID: "alternate-exchange-missing", Severity: severityError, Examined: severityError, needs: everything,
		Summary: "every alternate exchange exists",
		Remedy:  "declare it and bind a queue to it",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if x.alternate != "" && c.absent(x.alternate) {
					c.report(exchangeResource(x.Name), "its alternate exchange %.80q doesn't exist, so messages that match no binding are lost", x.alternate)
					c.path("publisher", "", nameOf(x.Name), "no binding matches", nameOf(x.alternate), "doesn't exist", "lost")
				}
			}
		},
	},
	{
		ID: "alternate-exchange-route", Severity: severityError, Examined: severityError, needs: everything,
		Summary: "every alternate exchange routes to a queue",
		Remedy:  "bind a queue to the alternate exchange; a fanout exchange matches everything",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if _, exists := c.exchanges[x.alternate]; exists && len(c.reach(x.alternate, deadLetter{})) == 0 {
					c.report(exchangeResource(x.Name), "its alternate exchange %.80q routes to no queue", x.alternate)
					c.path("publisher", "", nameOf(x.Name), "no binding matches", nameOf(x.alternate), "no binding", "lost")
				}
			}
		},
	},
	{
		ID: "delivery-limit", Severity: severityError, Examined: severityWarning, needs: everything,
		Summary: "a dead-letter queue has no delivery limit",
		Remedy:  "set x-delivery-limit to -1",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if limit, ok := q.number("x-delivery-limit"); q.Type != queuearg.Quorum || q.hasTTL() || ok && limit < 0 {
					continue
				}
				for _, from := range c.feeders(q.Name) {
					// What comes out of a delay queue wasn't delivered there.
					if from.Type == queuearg.Quorum && !from.hasTTL() && !(c.waitsWithoutTTL(from) && waitName.MatchString(from.Name)) && from.Name != q.Name && !c.leadsTo(q.Name, from.Name) {
						c.queue(q, "it has a delivery limit, and dead letters from queue %.80q keep their delivery count", from.Name)
						c.path(nameOfQueue(from.Name), "over its delivery limit", nameOfQueue(q.Name), "returned once more", "dropped, or dead-lettered again")
						break
					}
				}
			}
		},
	},
	{
		ID: "max-length", Severity: severityWarning, Examined: severityWarning, needs: everything,
		Summary: "a queue that receives dead letters or delays messages has no max-length",
		Remedy:  "remove the limit, and limit the publishers instead",
		check: func(c *check) {
			for _, q := range c.sorted() {
				switch key := q.limited(); {
				case key == "":
				case len(c.feeders(q.Name)) > 0:
					c.queue(q, "it has %s%s: while it is full, dead letters for it are lost, or %d of them block all others in queue %.80q, including messages that wait for a retry", key, c.byPolicy(q, key), stallAt, c.feeders(q.Name)[0].Name)
					c.path(nameOfQueue(c.feeders(q.Name)[0].Name), "dead-lettered", nameOfQueue(q.Name), "full", "lost, or stuck")
				case q.delays() && c.bound[q.Name]:
					c.queue(q, "it has %s%s: while it is full, failed messages can't be retried through it, and stay unacknowledged at their workers", key, c.byPolicy(q, key))
					c.path("worker", "retried", nameOfQueue(q.Name), "full", "unacknowledged at the worker")
				}
			}
		},
	},
	{
		ID: "delayed-drop-head", Severity: severityError, Examined: severityError, needs: []string{partPolicies, partVersion},
		Summary: "a quorum queue that can hold messages until their delivery time doesn't drop the oldest when it is full",
		Remedy:  "set x-overflow to reject-publish",
		check: func(c *check) {
			// Before 4.4 only retries are held so, and the check of StrategyNative finds these queues.
			if yes, _ := c.s.atLeast(4, 4); !yes {
				return
			}
			for _, q := range c.sorted() {
				if overflow, set := q.text("x-overflow"); q.limited() != "" && q.Type == queuearg.Quorum && (!set || overflow == string(declare.OverflowDropHead)) {
					c.queue(q, "it has %s with overflow drop-head: once the messages that wait for their x-opt-delivery-time exceed the limit, the queue hangs and uses all of a CPU core; anyone who may publish to it can cause this", q.limited())
					c.path("publisher", "x-opt-delivery-time", nameOfQueue(q.Name), "over its limit", "hangs")
				}
			}
		},
	},
	{
		ID: "overflow", Severity: severityError, Examined: severityWarning, needs: []string{partPolicies},
		Summary: "a full queue refuses messages, or dead-letters them",
		Remedy:  "set x-overflow to reject-publish: publishers then see the refusal",
		check: func(c *check) {
			for _, q := range c.sorted() {
				overflow, set := q.text("x-overflow")
				_, _, deadLetters := q.deadLetters()
				if key := q.limited(); key != "" && q.Type != queuearg.Stream && !deadLetters && (!set || overflow == string(declare.OverflowDropHead)) {
					c.queue(q, "it has %s and drops the oldest message when it is full", key)
					c.path("publisher", "confirmed", nameOfQueue(q.Name), "full", "its oldest message is dropped")
				}
			}
		},
	},
	{
		ID: "expires", Severity: severityError, Examined: severityWarning, needs: []string{partPolicies},
		Summary: "no durable queue expires when it is unused",
		Remedy:  "leave x-expires out, and exclude the queue from policies that set expires",
		check: func(c *check) {
			for _, q := range c.sorted() {
				ms, ok := q.number("x-expires")
				if !ok || q.passing() {
					continue
				}
				if q.delays() {
					c.queue(q, "it is deleted %d ms after its declaration, with all messages in it%s: a delay queue has no consumers", ms, c.byPolicy(q, "x-expires"))
					ttl, _ := q.number("x-message-ttl")
					switch {
					case q.Type == queuearg.Quorum || ms <= ttl:
						c.as(severityError)
					default:
						c.as(severityNote) // Symfony and Laravel declare it again before each message
					}
				} else {
					c.queue(q, "it is deleted after %d ms without a consumer, with all messages in it%s", ms, c.byPolicy(q, "x-expires"))
				}
				c.path(nameOfQueue(q.Name), fmt.Sprintf("%d ms unused", ms), "deleted with its messages")
			}
		},
	},
	{
		ID: "expiry-cycle", Severity: severityError, Examined: severityError, needs: everything,
		Summary: "no message returns to a queue by expiry alone",
		Remedy:  "let expired messages go to a queue without a time to live, or to one with consumers",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if q.hasTTL() && c.expiresInto(q.Name) {
					c.queue(q, "a message that nobody consumes returns to it by expiry alone: the broker treats that as a cycle, and drops the message or keeps it forever")
					c.path(nameOfQueue(q.Name), "expired", "back to "+nameOfQueue(q.Name), "a cycle", "dropped, or kept forever")
				}
			}
		},
	},
	{
		ID: "orphan-delay-queue", Severity: severityWarning, needs: everything,
		Summary: "every delay queue is bound",
		Remedy:  "bind it to the retry exchange, or delete it once it is empty",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if q.delays() && !c.bound[q.Name] && len(c.feeders(q.Name)) == 0 && !q.passing() {
					c.queue(q, "it delays messages, but no exchange is bound to it")
				}
			}
		},
	},
	{
		ID: "delay-mismatch", Severity: severityError, Examined: severityError, needs: []string{partPolicies},
		Summary: "a delay queue holds messages for the delay in its binding key",
		Remedy:  "bind the queue whose x-message-ttl is that delay, and exclude delay queues from policies that set message-ttl",
		check: func(c *check) {
			for _, b := range c.s.Bindings {
				q, ok := c.queues[b.Queue]
				text, isDelay := strings.CutPrefix(b.Key, "delay.")
				text, isDelay2 := strings.CutSuffix(text, ".#")
				ms, err := strconv.ParseInt(text, 10, 64)
				if !ok || !isDelay || !isDelay2 || err != nil {
					continue
				}
				if ttl, set := q.number("x-message-ttl"); !set {
					c.queue(q, "its binding key says %d ms, but it holds messages forever", ms)
					c.path(nameOf(b.Source), b.Key, nameOfQueue(q.Name), "never", "stuck")
				} else if ttl != ms {
					c.queue(q, "its binding key says %d ms, but it holds messages for %d ms%s", ms, ttl, c.byPolicy(q, "x-message-ttl"))
					c.path(nameOf(b.Source), b.Key, nameOfQueue(q.Name), fmt.Sprintf("after %d ms", ttl), earlyOrLate(ttl, ms))
				}
			}
			for _, q := range c.sorted() {
				// A headers binding and a ladder say nothing about the delay; the argument does.
				own, set := q.Arguments["x-message-ttl"].(int64)
				ttl, _ := q.number("x-message-ttl")
				reported := slices.ContainsFunc(c.found, func(f Finding) bool { return f.Resource == queueResource(q.Name) })
				if set && ttl != own && q.delays() && !reported {
					c.queue(q, "it is declared to hold messages for %d ms, but holds them for %d ms%s", own, ttl, c.byPolicy(q, "x-message-ttl"))
					c.path(nameOfQueue(q.Name), fmt.Sprintf("after %d ms", ttl), earlyOrLate(ttl, own))
				}
			}
		},
	},
	{
		ID: "several-ways-back", Severity: severityWarning, Examined: severityNote, needs: everything,
		Summary: "a delayed message returns to one queue",
		Remedy:  "bind each queue by its own name, and none with a key that matches everything",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, key, ok := q.deadLetters()
				if !ok || !q.delays() || exchange == "" {
					continue
				}
				x := c.exchanges[exchange]
				targets := map[string]bool{}
				total := 0
				for _, b := range c.bySource[exchange] {
					may, must := x.matches(b, deadLetter{key, "expired"})
					if must {
						targets[b.Queue+"\x00"+b.Exchange] = true
					}
					if may {
						total++
					}
				}
				if len(targets) > 0 && total > 1 && x.Type != declare.ExchangeHeaders {
					c.queue(q, "its messages return to several queues, as duplicates: one of several bindings of the exchange %.80q matches everything", exchange)
					c.path(nameOfQueue(q.Name), "after its delay", nameOf(exchange), "several bindings match", "one copy per queue")
				}
			}
		},
	},
	{
		ID: "work-queue-ttl", Severity: severityError, Examined: severityWarning, needs: []string{partExchanges, partBindings, partPolicies},
		Summary: "no policy sets message-ttl on the work queue of a retry topology",
		Remedy:  "exclude the queue from the policy; for messages that may expire, declare the queue with a message TTL, which retry.With takes into account",
		check: func(c *check) {
			if since, known := c.s.atLeast(4, 3); known && !since {
				return
			}
			for _, q := range c.sorted() {
				ttl, _ := q.number("x-message-ttl")
				if by := c.byPolicy(q, "x-message-ttl"); by != "" && c.mayWaitNatively(q, ttl) {
					c.queue(q, "its messages expire after %d ms%s, and a worker can't see that: with StrategyNative or StrategyAuto the broker dead-letters messages that wait longer for their retry", ttl, by)
					c.path(nameOfQueue(q.Name), fmt.Sprintf("waits for its retry for more than %d ms", ttl), "dead-lettered")
				}
			}
		},
	},
	{
		ID: "shared-ladder", Severity: severityError, Examined: severityError, needs: []string{partExchanges, partBindings},
		Summary: "an exchange of a ladder of delay queues has the two bindings of one ladder, and no others",
		Remedy:  "remove the bindings that aren't this ladder's, or give each ladder its own names, as retry.Topology does",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if keys := c.ladderKeys(x); len(keys) > 2 {
					c.report(exchangeResource(x.Name), "it is a level of a ladder, and has %d bindings instead of 2: a message is routed by each one that it matches, so one message becomes several; the keys are %s", len(keys), listed(keys, 6))
					c.path("a delayed message", "", nameOf(x.Name), "several bindings match", "several copies")
				}
			}
		},
	},
	{
		ID: "modulus-hash-binding", Severity: severityError, needs: []string{partExchanges, partBindings},
		Summary: "a modulus-hash exchange has the bindings of the topology, and no others",
		Remedy:  "remove these bindings, or add them to the topology; removing one moves nearly every key to another queue, so for the order of a key's messages stop the publishers first, until the queues are empty",
		check: func(c *check) {
			wanted := map[string][]declare.Binding{}
			for _, b := range c.wanted.Bindings {
				wanted[bindingQuestion(b)] = append(wanted[bindingQuestion(b)], b)
			}
			for _, x := range c.wanted.Exchanges {
				if x.Type != declare.ExchangeModulusHash {
					continue
				}
				var others []string
				for _, b := range c.bySource[x.Name] {
					if !slices.ContainsFunc(wanted[bindingQuestion(b)], func(w declare.Binding) bool { return sameBinding(w, b) }) {
						others = append(others, b.Queue+b.Exchange)
					}
				}
				if len(others) > 0 {
					c.report(exchangeResource(x.Name), "%d of its %d bindings aren't in the topology: they take their share of the messages from the queues of the topology; they are to %s", len(others), len(c.bySource[x.Name]), listed(others, 6))
				}
			}
		},
	},
	{
		ID: "exchange-type", Severity: severityError, needs: []string{partVersion},
		Summary: "the broker has the exchange type",
		Remedy:  "upgrade to RabbitMQ 4.3",
		check: func(c *check) {
			if yes, known := c.s.atLeast(4, 3); yes || !known {
				return
			}
			for _, x := range c.wanted.Exchanges {
				if x.Type == declare.ExchangeModulusHash && c.absent(x.Name) {
					c.report(exchangeResource(x.Name), "its type %s needs RabbitMQ 4.3 or later, and this is %s", x.Type, c.s.Version)
				}
			}
		},
	},
	{
		ID: "wildcard-name", Severity: severityError, Examined: severityWarning,
		Summary: "no queue's name is a wildcard in the binding that returns its messages",
		Remedy:  "rename the queue; a star or hash within a longer word is fine",
		check: func(c *check) {
			for _, b := range c.s.Bindings {
				for word := range strings.SplitSeq(b.Queue, ".") {
					if (word == "*" || word == "#") && strings.HasSuffix(b.Key, b.Queue) && b.Key != "#" {
						c.report(queueResource(b.Queue), "the binding %.80q also matches messages of other queues, and routes them here", b.Key)
						c.path(nameOf(b.Source), "messages of other queues, too", nameOfQueue(b.Queue))
						break
					}
				}
			}
		},
	},
	{
		ID: "transient-exchange", Severity: severityError, Examined: severityWarning, needs: []string{partExchanges, partBindings},
		Summary: "exchanges that route to durable queues are durable and not auto-delete",
		Remedy:  "delete the exchange and declare it durable, not auto-delete, with its bindings",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				leads := slices.ContainsFunc(c.bySource[x.Name], func(b declare.Binding) bool {
					return b.Exchange != "" || !c.queues[b.Queue].passing() && c.queues[b.Queue].Name != ""
				})
				switch {
				case leads && !x.Durable:
					c.report(exchangeResource(x.Name), "it isn't durable: a restart of the broker deletes it and its bindings to durable queues")
					c.path("publisher", "", nameOf(x.Name), "deleted by a restart", "lost")
				case leads && x.AutoDelete:
					c.report(exchangeResource(x.Name), "it is auto-delete: it is deleted with its last binding, and messages that are published to it are lost")
					c.path("publisher", "", nameOf(x.Name), "deleted with its last binding", "lost")
				}
			}
		},
	},
	{
		ID: "transient-queue", Severity: severityError, Examined: severityWarning,
		Summary: "queues are durable or exclusive",
		Remedy:  "declare it durable, or exclusive if it belongs to one connection, before the upgrade to RabbitMQ 4.4",
		check: func(c *check) {
			transient := func(q declare.QueueInfo) bool { return !q.Durable && !q.Exclusive }
			for _, q := range c.sorted() {
				if transient(q.QueueInfo) {
					c.queue(q, "it is transient and not exclusive: a restart deletes it with its messages, and RabbitMQ 4.4 refuses such queues, and doesn't start on a node that has one")
					c.path(nameOfQueue(q.Name), "its node restarts", "deleted with its messages")
				}
			}
			for _, q := range FromTopology(declare.Topology{Queues: c.wanted.Queues}).Queues {
				if _, exists := c.queues[q.Name]; !exists && transient(q) {
					c.report(queueResource(q.Name), "the topology declares it neither durable nor exclusive: RabbitMQ 4.4 refuses such queues, and doesn't start on a node that has one")
				}
			}
		},
	},
	{
		ID: "not-replicated", Severity: severityWarning, Examined: severityNote,
		Summary: "durable queues are quorum queues or streams",
		Remedy:  "declare a quorum queue under a new name and move the messages, as package declare/migrate does",
		check: func(c *check) {
			if c.foreign() && len(c.s.Nodes) == 1 {
				return // nothing is replicated on a single node
			}
			for _, q := range c.sorted() {
				if q.Type == queuearg.Classic && !q.passing() {
					c.queue(q, "it is a classic queue, with one copy: it is lost with its node")
					c.path(nameOfQueue(q.Name), "its node stops", "unavailable, or lost with the disk")
					if len(c.s.Nodes) > 1 {
						c.as(severityWarning)
					}
				}
			}
		},
	},
	{
		ID: "replicas", Severity: severityError, Examined: severityWarning, needs: []string{partNodes},
		Summary: "on a cluster, a queue has at least three replicas",
		Remedy:  "add replicas with rabbitmq-queues grow, or move the queue",
		check: func(c *check) {
			want := min(3, len(c.s.Nodes))
			for _, q := range c.sorted() {
				if n := len(q.Replicas); q.Type != queuearg.Classic && n > 0 && n < want {
					c.queue(q, "it has a replica on %d of the cluster's %d nodes", n, len(c.s.Nodes))
					c.path(nameOfQueue(q.Name), "a node with a replica stops", "neither accepts nor delivers")
				}
			}
		},
	},
	{
		ID: "replicas-down", Severity: severityError, Examined: severityError, needs: []string{partNodes},
		Summary: "every replica is up",
		Remedy:  "start the nodes that are down, or replace those replicas",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if q.Type == queuearg.Classic || len(q.Replicas) == 0 {
					continue
				}
				down := slices.DeleteFunc(slices.Clone(q.Replicas), func(n string) bool { return slices.Contains(q.Online, n) })
				switch {
				case len(down) > 0:
					c.queue(q, "%d of its %d replicas are down: %s", len(down), len(q.Replicas), strings.Join(down, ", "))
					c.path("publisher", "no confirm", nameOfQueue(q.Name), "nothing delivered", "consumer")
					if len(down)*2 < len(q.Replicas) { // a majority is up
						c.as(severityWarning)
						c.path(nameOfQueue(q.Name), "more replicas go down", "neither accepts nor delivers")
					}
				case q.Leader == "":
					c.queue(q, "it has no leader, so it neither accepts nor delivers messages")
					c.path("publisher", "no confirm", nameOfQueue(q.Name), "nothing delivered", "consumer")
				}
			}
		},
	},
	{
		ID: "stuck-dead-letters", Severity: severityError, Examined: severityError, needs: []string{partCounts},
		Summary: "no dead letters are blocked",
		Remedy:  "check that the dead-letter exchange, its binding, and the target queue exist, and that the queue isn't full; the broker tries again every three minutes",
		check: func(c *check) {
			for _, q := range c.sorted() {
				switch n := q.MessagesDeadLettering; {
				case n >= stallAt:
					c.queue(q, "%d dead letters wait for their target: %d that can't be delivered block all others", n, stallAt)
				case n > 0:
					c.queue(q, "%d dead letters wait for their target", n)
					c.as(severityNote) // they may be in flight
				default:
					continue
				}
				c.path(nameOfQueue(q.Name), "dead-lettered", "a target that is missing or full", "no confirm", "stuck")
			}
		},
	},
	{
		ID: "broker-version", Severity: severityWarning, Examined: severityWarning, needs: []string{partVersion, partNodes},
		Summary: "a cluster has RabbitMQ 4.0.6 or later, which resends what a deposed leader didn't accept",
		Remedy:  "upgrade to RabbitMQ 4.0.6 or later; until then, if messages stay unanswered after a node was frozen or cut off, move the queue's leader or reconnect",
		check: func(c *check) {
			var major, minor, patch int
			n, _ := fmt.Sscanf(c.s.Version, "%d.%d.%d", &major, &minor, &patch)
			if n == 3 && major == 4 && minor == 0 && patch < 6 && len(c.s.Nodes) > 1 {
				c.report(declare.Resource{Kind: "broker", Name: c.s.Version}, "after a node was frozen, its sessions may keep sending to the deposed leader of a queue: publishes, settlements and consumers get no answer until the leader moves or the client reconnects")
			}
		},
	},
	{
		ID: "delayed-retry", Severity: severityError, Examined: severityError, needs: []string{partVersion, partPolicies},
		Summary: "the broker knows the arguments that the queue relies on",
		Remedy:  "upgrade RabbitMQ to that version, or leave the argument out; delay queues of retry.Topology work with every version",
		check: func(c *check) {
			for _, q := range c.sorted() {
				for _, key := range values.SortedKeys(q.args) {
					a := queuearg.Known[key]
					if yes, known := c.s.atLeast(4, a.Since); known && !yes && slices.Contains(a.Types, q.Type) {
						c.queue(q, "%s has no effect before RabbitMQ 4.%d, and this is %s", key, a.Since, c.s.Version)
						c.path(nameOfQueue(q.Name), "returned", nameOfQueue(q.Name), "delivered again at once", "…")
					}
				}
			}
		},
	},
}

// levelKey is the key of a binding at a level of a ladder. The word is 1 for a message that
// waits there, and 0 for one that continues to the level below.
var levelKey = regexp.MustCompile(`^(\*\.)*[01]\.#$`)

// ladderKeys are the keys of all bindings of an exchange that is a level of a ladder, nil for
// any other: the level's messages wait in a queue, and one exchange is below.
func (c *check) ladderKeys(x liveExchange) []string {
	var keys []string
	waits, passes := false, false
	for _, b := range c.bySource[x.Name] {
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

// listed is the first of some texts, quoted, and how many more there are.
func listed(texts []string, most int) string {
	var b strings.Builder
	for i, text := range texts {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(texts)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%.80q", text)
	}
	return b.String()
}

func nameOfQueue(name string) string { return queueResource(name).String() }

// earlyOrLate is where a message is after so many milliseconds instead of others.
func earlyOrLate(after, instead int64) string {
	if after < instead {
		return "back too early"
	}
	return "back too late"
}

// dropsHeadAtLeastOnce is a queue that should dead-letter at least once, and doesn't because of
// its overflow setting.
func (q liveQueue) dropsHeadAtLeastOnce() bool {
	strategy, _ := q.text("x-dead-letter-strategy")
	return q.Type == queuearg.Quorum && strategy == "at-least-once" && !q.atLeastOnce()
}

func nameOf(exchange string) string {
	if exchange == "" {
		return "the default exchange"
	}
	return fmt.Sprintf("the exchange %.80q", exchange)
}

// limited is the argument that bounds a queue's length, or "".
func (q liveQueue) limited() string {
	for _, key := range []string{"x-max-length", "x-max-length-bytes"} {
		if _, ok := q.number(key); ok {
			return key
		}
	}
	return ""
}

// byPolicy says which policy sets an argument, " by the policy ...", and is "" if the queue's
// own argument counts.
func (c *check) byPolicy(q liveQueue, key string) string {
	v, set := q.args[key]
	if own, has := q.Arguments[key]; !set || has && reflect.DeepEqual(own, v) {
		return ""
	}
	for _, operator := range []bool{true, false} {
		p := c.s.policyOf(operator, "queue", q.Type, q.Name)
		if p != nil && reflect.DeepEqual(p.Definition[strings.TrimPrefix(key, "x-")], v) {
			return fmt.Sprintf(" by the policy %.80q", p.Name)
		}
	}
	return ""
}

// mayWaitNatively reports whether a queue is a work queue as retry.Topology declares it, on
// which messages may wait for longer than ttl: it dead-letters under its own name to a
// headers exchange. If only StrategyRepublish can retry its messages, they wait elsewhere.
func (c *check) mayWaitNatively(q liveQueue, ttl int64) bool {
	exchange, key, _ := q.deadLetters()
	if q.Type != queuearg.Quorum || key == nil || *key != q.Name || c.exchanges[exchange].Type != declare.ExchangeHeaders {
		return false
	}
	longest, republished := int64(0), false
	for _, from := range c.feeders(q.Name) {
		if held, ok := from.number("x-message-ttl"); ok && from.Name != q.Name {
			longest, republished = max(longest, held), true
		}
	}
	if !republished {
		return true
	}
	holds := slices.ContainsFunc(c.bySource[exchange], func(b declare.Binding) bool { return c.queues[b.Queue].hasTTL() })
	return holds && ttl <= longest
}

func (c *check) eachArgument(do func(q liveQueue, key string, v any)) {
	for _, q := range c.sorted() {
		for _, key := range values.SortedKeys(q.Arguments) {
			do(q, key, q.Arguments[key])
		}
	}
}

// expiresInto reports whether a message that expires in a queue may come back to
// it through queues in which it expires as well.
func (c *check) expiresInto(name string) bool {
	seen := map[string]bool{}
	var visit func(string) bool
	visit = func(at string) bool {
		if seen[at] {
			return false
		}
		seen[at] = true
		next := c.deadFrom(c.queues[at], "expired")
		if next[name] {
			return true
		}
		for n := range next {
			if c.queues[n].hasTTL() && visit(n) {
				return true
			}
		}
		return false
	}
	return visit(name)
}
