package examine

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/oldbroker"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"
	"github.com/hopback/hopback/operate/internal/facts"

	"github.com/hopback/hopback/internal/rules"
)

// From these sizes on something is a pile.
const (
	pileOfUnacked  = 1_000 // for each consumer
	pileOfUnread   = 1_000
	pileOfMessages = 1_000_000
	pileOfBytes    = 1 << 30
	smallDisk      = 1 << 30
	// manyReturns is for each second, and for each acknowledgement.
	manyReturns = 10
)

// examineRules are the rules that only Examine runs: they need the state of a running broker, or
// judge what a topology of our own doesn't contain.
var examineRules = slices.Concat(deadLetterRules, policyRules, stateRules, clusterRules)

var deadLetterRules = []examineRule{
	{
		ID: "drop-head-at-least-once", Examined: rules.SeverityError, needs: []string{rules.PartPolicies},
		Summary: "a queue that should dead-letter at least once has overflow reject-publish",
		Remedy:  "set overflow to reject-publish; a policy can do that in place",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				exchange, _, ok := q.DeadLetters()
				if !ok || !q.DropsHeadAtLeastOnce() {
					continue
				}
				overflow, _ := q.Text("x-overflow")
				if overflow == "" {
					overflow = string(declare.OverflowDropHead) + ", the default"
				}
				c.ReportQueue(q, "its strategy is at-least-once, but with overflow %s the broker dead-letters at most once", overflow)
				c.Path(rules.NameOfQueue(q.Name), "dead-lettered", rules.NameOf(exchange), "without a confirm", "target, or lost")
			}
		},
	},
	{
		ID: "dead-letter-cycle", Examined: rules.SeverityError, needs: rules.Everything,
		Summary: "a rejected message doesn't return to its queue at once",
		Remedy:  "dead-letter to another queue, or through a queue with a message TTL",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				exchange, key, ok := q.DeadLetters()
				if !ok || q.HasTTL() || c.Exchanges[exchange].Type == declare.ExchangeHeaders {
					continue
				}
				for _, k := range c.keysOf(q.Name, key) {
					if !c.Reach(exchange, rules.DeadLetter{Key: &k, Reason: "rejected"})[q.Name] {
						continue
					}
					c.ReportQueue(q, "a message with the key %.80q that is rejected, or exceeds the delivery limit, returns to it at once, without end", k)
					c.Path(rules.NameOfQueue(q.Name), "rejected", rules.NameOf(exchange), fmt.Sprintf("key %.80q", k), rules.NameOfQueue(q.Name), "rejected", "…")
					break
				}
			}
		},
	},
	{
		ID: "endless-retry", Examined: rules.SeverityNote, needs: rules.Everything,
		Summary: "something ends the retries of a message",
		Remedy:  "let the consumer count x-death and give up, or let hopback retry run count",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				exchange, _, ok := q.DeadLetters()
				if !ok || q.HasTTL() || c.Exchanges[exchange].Type == declare.ExchangeHeaders {
					continue
				}
				for _, name := range c.TargetsOf(q, "rejected").Delaying {
					wait := c.Queues[name]
					if ttl, _ := wait.Number("x-message-ttl"); c.comesBack(q, wait) {
						c.ReportQueue(q, "a rejected message waits in queue %.80q for %d ms, and returns: without end, unless its consumer counts", name, ttl)
						c.Path(rules.NameOfQueue(q.Name), "rejected", rules.NameOfQueue(name), fmt.Sprintf("after %d ms", ttl), rules.NameOfQueue(q.Name))
						break
					}
				}
			}
		},
	},
	{
		ID: "no-delivery-limit", Examined: rules.SeverityWarning, needs: rules.Everything,
		Summary: "a work queue has a delivery limit",
		Remedy:  "set x-delivery-limit, and a dead-letter exchange; a policy can set both on a live queue",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				limit, set := q.Number("x-delivery-limit")
				idle := q.Counted && q.Consumers == 0
				_, byWorkers := q.Number("x-hopback-delivery-limit") // those of a partition group count crashes
				if q.Type == queuearg.Quorum && set && limit < 0 && !byWorkers && !q.HasTTL() && !idle && !c.IsFed(q.Name) {
					c.ReportQueue(q, "it has no delivery limit%s: a message that crashes its consumer comes back without end", c.ByPolicy(q, "x-delivery-limit"))
					c.Path(rules.NameOfQueue(q.Name), "delivered", "consumer", "crashes", rules.NameOfQueue(q.Name), "delivered", "…")
				}
			}
		},
	},
	{
		ID: "per-message-ttl", Examined: rules.SeverityWarning, needs: rules.Everything,
		Summary: "a queue for delays has one message TTL for all its messages",
		Remedy:  "use one queue per delay, with x-message-ttl; hopback retry run has these",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if !c.WaitsWithoutTTL(q) || delayName.MatchString(q.Name) {
					continue
				}
				t := c.TargetsOf(q, "expired")
				names := t.All
				if !rules.WaitName.MatchString(q.Name) {
					names = t.Consumed // none before they are counted
				}
				i := slices.IndexFunc(names, func(name string) bool { return name != q.Name })
				if i < 0 || !rules.WaitName.MatchString(q.Name) && !q.Counted {
					continue
				}
				to := names[i]
				c.ReportQueue(q, "it has no message TTL, so messages wait in it for as long as each one's own expiration says: one that waits long blocks those behind it, and one without an expiration stays")
				c.Path("expiration 60 s", "", rules.NameOfQueue(q.Name), "expires at the head only", rules.NameOfQueue(to))
			}
		},
	},
	{
		ID: "delay-without-ttl", Examined: rules.SeverityWarning, needs: rules.Everything,
		Summary: "a queue whose name says how long it delays messages has a message TTL",
		Remedy:  "set message-ttl, by a policy or in a new queue",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if !c.WaitsWithoutTTL(q) || !delayName.MatchString(q.Name) {
					continue
				}
				c.ReportQueue(q, "its name says that it delays messages, but it has no message TTL: they stay until their own expiration, or forever")
				if q.Messages > 0 && q.Consumers == 0 {
					c.As(rules.SeverityError)
				}
				exchange, _, _ := q.DeadLetters()
				c.Path(rules.NameOfQueue(q.Name), "no TTL", "stuck", "never", rules.NameOf(exchange))
			}
		},
	},
	{
		ID: "unread-dead-letters", Examined: rules.SeverityWarning, needs: slices.Concat(rules.Everything, []string{rules.PartCounts}),
		Summary: "somebody reads the dead letters",
		Remedy:  "read them, and replay or delete them: hopback dlq survey, hopback desk",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if q.Messages == 0 || q.Consumers > 0 || q.HasTTL() || q.Type == queuearg.Stream {
					continue
				}
				if c.IsFed(q.Name) {
					c.ReportQueue(q, "%d dead letters wait in it, and it has no consumer", q.Messages)
					c.Path(rules.NameOfQueue(c.FirstFeeder(q.Name).Name), "dead-lettered", rules.NameOfQueue(q.Name), "nobody reads", "piles up")
				}
			}
		},
	},
	{
		ID: "delayed-message-plugin", Examined: rules.SeverityWarning, needs: []string{rules.PartExchanges},
		Summary: "no exchange depends on the delayed message exchange plugin",
		Remedy:  "delay with one queue per delay, or with delayed retries of RabbitMQ 4.3; hopback retry run and hopback's schedule need no plugin",
		check: func(c *examination) {
			for _, x := range c.SortedExchanges() {
				if x.Type == "x-delayed-message" {
					c.Report(rules.ExchangeResource(x.Name), "it belongs to the delayed message exchange plugin, which is archived: it keeps pending messages on one node, unreplicated, and loses them with it")
					c.Path("publisher", "", rules.NameOf(x.Name), "pending on one node", "lost with the node")
				}
			}
		},
	},
	{
		ID: "unbound-exchange", Examined: rules.SeverityNote, needs: []string{rules.PartExchanges, rules.PartBindings, rules.PartPolicies},
		Summary: "every exchange has a binding or an alternate exchange",
		Remedy:  "bind a queue, give it an alternate exchange, or delete it",
		check: func(c *examination) {
			for _, x := range c.SortedExchanges() {
				if len(c.BySource[x.Name]) > 0 || x.Alternate != "" || strings.HasPrefix(x.Name, "amq.") || c.OfMembers(x) {
					continue
				}
				if from := c.passedOn()[x.Name]; from != "" {
					c.Report(rules.ExchangeResource(x.Name), "it has no binding and no alternate exchange, but dead letters of queue %.80q are routed to it: they are lost, or %d of them block all others", from, rules.StallAt)
					c.As(rules.SeverityWarning)
					c.Path(rules.NameOfQueue(from), "dead-lettered", rules.NameOf(x.Name), "no binding", "lost, or stuck")
				} else {
					c.Report(rules.ExchangeResource(x.Name), "it has no binding and no alternate exchange: the broker drops everything that is published to it, and reports it only to publishers that ask")
					c.Path("publisher", "", rules.NameOf(x.Name), "no binding", "dropped")
				}
			}
		},
	},
	{
		ID: "unrouted-exchange", Examined: rules.SeverityWarning, needs: []string{rules.PartExchanges, rules.PartBindings, rules.PartPolicies, rules.PartCounts},
		Summary: "what is published to an exchange reaches a queue",
		Remedy:  "bind a queue with that key, or give the exchange an alternate exchange; a policy can set one in place",
		check: func(c *examination) {
			for _, x := range c.SortedExchanges() {
				if n := c.live.here.Exchanges[x.Name]; n.In > 0 && n.Out == 0 && x.Alternate == "" {
					c.Report(rules.ExchangeResource(x.Name), "%d messages were published to it, and it routed none of them", n.In)
					c.Path("publisher", "", rules.NameOf(x.Name), "no binding matches", "dropped")
				}
			}
		},
	},
}

// comesBack reports whether what q dead-letters to wait returns to q when its time is up. It keeps
// q's dead-letter routing key, unless wait has one.
func (c *examination) comesBack(q, wait rules.Queue) bool {
	exchange, key, ok := wait.DeadLetters()
	if key == nil {
		_, key, _ = q.DeadLetters()
	}
	return ok && c.Reach(exchange, rules.DeadLetter{Key: key, Reason: "expired"})[q.Name]
}

// passedOn are the exchanges that dead letters reach through another exchange, each with a queue
// that they come from.
func (c *examination) passedOn() map[string]string {
	if c.passed == nil {
		c.passed = map[string]string{}
		seen := map[rules.DeadLetterTo]bool{}
		var visit func(from, exchange string, key *string)
		visit = func(from, exchange string, key *string) {
			to := rules.DeadLetterTo{Exchange: exchange, Keyed: key != nil}
			if key != nil {
				to.Key = *key
			}
			if seen[to] || c.Stopped() {
				return
			}
			seen[to] = true
			for _, b := range c.Candidates(c.Exchanges[exchange], rules.DeadLetter{Key: key}) {
				if may, _ := c.Exchanges[exchange].Matches(b, rules.DeadLetter{Key: key}); may && b.Exchange != "" {
					c.passed[b.Exchange] = from
					visit(from, b.Exchange, key)
				}
			}
		}
		for _, q := range c.Sorted() {
			if exchange, key, ok := q.DeadLetters(); ok {
				visit(q.Name, exchange, key)
			}
		}
	}
	return c.passed
}

// delayName is a name that says that messages wait in a queue, and how long.
var delayName = regexp.MustCompile(`(?i)(delay|retry|wait|hold|backoff|sleep)[a-z]*[._:-]?\d+[._:-]?(ms|millis|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)?$`)

// keysOf are keys of a queue's dead letters: the queue's dead-letter routing key, or else the keys
// that messages arrive with, as far as bindings name them.
func (c *examination) keysOf(queue string, key *string) []string {
	if key != nil {
		return []string{*key}
	}
	keys := []string{queue}
	for _, b := range c.BindingsTo(queue) {
		if !strings.ContainsAny(b.Key, "*#") {
			keys = append(keys, b.Key)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

var policyRules = []examineRule{
	{
		ID: "policy-conflict", Examined: rules.SeverityWarning, needs: []string{facts.Policies, rules.PartPolicies},
		Summary: "a policy and a queue's arguments say the same",
		Remedy:  "leave the setting to one of them; arguments can't be changed on a live queue, policies can",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				for _, operator := range []bool{false, true} {
					p := rules.PolicyOf(c.Snapshot, operator, "queue", q.Type, q.Name)
					if p == nil {
						continue
					}
					for _, key := range values.SortedKeys(p.Definition) {
						own, set := q.Arguments["x-"+key]
						if says := p.Definition[key]; set && !reflect.DeepEqual(own, says) {
							c.ReportQueue(q, "the policy %.80q sets %.80q to %s, and its own argument is %s: %s counts", p.Name, key, rules.SettingOf(says), rules.SettingOf(own), rules.SettingOf(q.Args["x-"+key]))
						}
					}
				}
			}
		},
	},
	{
		ID: "policy-tie", Examined: rules.SeverityWarning, needs: []string{facts.Policies, rules.PartPolicies},
		Summary: "of two policies that match a queue, one has the higher priority",
		Remedy:  "give them different priorities, or patterns that don't overlap: policies aren't merged",
		check: func(c *examination) {
			tied := map[[2]string]bool{}
			for _, q := range c.Sorted() {
				p := rules.PolicyOf(c.Snapshot, false, "queue", q.Type, q.Name)
				if p == nil {
					continue
				}
				for i := range c.Snapshot.Policies {
					o := &c.Snapshot.Policies[i]
					if o == p || o.Operator || o.Priority != p.Priority || tied[[2]string{p.Name, o.Name}] || rules.Unsupported(*o, "queue", q.Type) != "" {
						continue
					}
					if yes, _ := rules.Applies(c.Snapshot, o, "queue", q.Type, q.Name); yes {
						tied[[2]string{p.Name, o.Name}] = true
						c.Report(declare.Resource{Kind: "policy", Name: p.Name}, "it and the policy %.80q have the same priority, %d, and both match queue %.80q: one of them applies, and the other doesn't", o.Name, p.Priority, q.Name)
					}
				}
			}
		},
	},
	{
		ID: "policy-not-applied", Examined: rules.SeverityWarning, needs: []string{facts.Policies, rules.PartPolicies},
		Summary: "a policy that matches a queue applies to it",
		Remedy:  "make a policy for each type of queue, with apply-to quorum_queues, classic_queues, or streams",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				for i := range c.Snapshot.Policies {
					p := &c.Snapshot.Policies[i]
					key := rules.Unsupported(*p, "queue", q.Type)
					if key == "" {
						continue
					}
					if yes, _ := rules.Applies(c.Snapshot, p, "queue", q.Type, q.Name); yes {
						c.ReportQueue(q, "the policy %.80q matches it and has the key %.80q, which %s queues don't have: nothing of that policy applies", p.Name, key, q.Type)
					}
				}
			}
		},
	},
	{
		ID: "policy-unmatched", Examined: rules.SeverityNote, needs: []string{facts.Policies, rules.PartPolicies},
		Summary: "every policy matches something",
		Remedy:  "check the pattern: it is a regular expression, and needs ^ and $ to match a whole name",
		check: func(c *examination) {
			for i := range c.Snapshot.Policies {
				if c.Stopped() {
					return
				}
				p := &c.Snapshot.Policies[i]
				may := func(kind, queueType, name string) bool {
					yes, known := rules.Applies(c.Snapshot, p, kind, queueType, name)
					return yes || !known
				}
				matched := slices.ContainsFunc(c.Snapshot.Queues, func(q declare.QueueInfo) bool { return may("queue", q.Type, q.Name) }) ||
					slices.ContainsFunc(c.Snapshot.Exchanges, func(x rules.ExchangeInfo) bool { return may("exchange", "", x.Name) })
				if !matched {
					c.Report(declare.Resource{Kind: "policy", Name: p.Name}, "its pattern %.80q matches no queue and no exchange", p.Pattern)
				}
			}
		},
	},
}

var stateRules = []examineRule{
	{
		ID: "queue-down", Examined: rules.SeverityError,
		Summary: "every queue runs",
		Remedy:  "start the node that has it; if that is gone, delete the queue or restore the node",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if slices.Contains([]string{"down", "crashed", "stopped", "minority"}, q.State) {
					c.ReportQueue(q, "its state is %s: it neither accepts nor delivers messages", q.State)
					c.Path("publisher", "no confirm", rules.NameOfQueue(q.Name), "nothing delivered", "consumer")
				}
			}
		},
	},
	{
		ID: "unacked-pile-up", Examined: rules.SeverityWarning, needs: []string{rules.PartCounts},
		Summary: "consumers acknowledge what they receive",
		Remedy:  "find the consumers that don't acknowledge, and give them a prefetch limit",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if q.Consumers == 0 || q.MessagesUnacknowledged < pileOfUnacked*q.Consumers {
					continue
				}
				rate := ""
				if f := c.live.here.Queues[q.Name]; f.Rated {
					rate = fmt.Sprintf(", at %.1f acknowledgements a second", f.AckRate)
				}
				c.ReportQueue(q, "%d messages are unacknowledged at %d consumers%s: nobody else gets them until those connections end", q.MessagesUnacknowledged, q.Consumers, rate)
				c.Path(rules.NameOfQueue(q.Name), "delivered", "consumer", "no acknowledgement", "stuck")
			}
		},
	},
	{
		ID: "returned-without-end", Examined: rules.SeverityWarning, needs: []string{rules.PartCounts},
		Summary: "consumers don't return the same messages again and again",
		Remedy:  "let consumers reject what they can't handle, without requeue, or with a delay: a retry topology, hopback retry run, or x-delayed-retry-type of RabbitMQ 4.3; basic.reject with requeue at least counts toward the delivery limit",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				f := c.live.here.Queues[q.Name]
				if f.Returned < manyReturns || f.Returned < manyReturns*f.AckRate {
					continue
				}
				counts := "nothing counts that"
				if old := oldbroker.Of(oldbroker.Version(c.Snapshot.Version).AtLeast); !old.CountsReturns && q.Type == queuearg.Quorum {
					counts = "since RabbitMQ 4.3 the delivery limit doesn't count what basic.nack or released returns"
				}
				c.ReportQueue(q, "it delivers %.0f messages a second once more, at %.1f acknowledgements a second: its consumers return them, and %s", f.Returned, f.AckRate, counts)
				c.Path(rules.NameOfQueue(q.Name), "delivered", "consumer", "returned", rules.NameOfQueue(q.Name), "delivered", "…")
			}
		},
	},
	{
		ID: "default-queue-type", Examined: rules.SeverityNote,
		Summary: "queues have the virtual host's default type",
		Remedy:  "declare it durable and not auto-delete, under a new name; if it should be a classic queue, waive the rule",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if t := rules.DefaultQueueType(c.Snapshot); (t == queuearg.Quorum || t == queuearg.Stream) && q.Type == queuearg.Classic && !q.Exclusive && (q.AutoDelete || !q.Durable) {
					c.ReportQueue(q, "it is a classic queue, although the virtual host's default is %s: the broker makes one of a queue that is auto-delete or not durable, and says nothing", t)
					c.Path(rules.NameOfQueue(q.Name), "its node stops", "unavailable, or lost with the disk")
				}
			}
		},
	},
	{
		ID: "no-prefetch-limit", Examined: rules.SeverityWarning, needs: []string{facts.Consumers},
		Summary: "AMQP 0-9-1 consumers have a prefetch limit",
		Remedy:  "call basic.qos with a prefetch count before basic.consume, such as 10 to 300",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if n := c.live.here.Queues[q.Name].Unlimited; n > 0 {
					c.ReportQueue(q, "%d of its consumers have no prefetch limit: the broker sends them all messages at once", n)
					c.Path(rules.NameOfQueue(q.Name), "everything at once", "one consumer", "", "memory, and nothing for the others")
				}
			}
		},
	},
	{
		ID: "auto-ack", Examined: rules.SeverityWarning, needs: []string{facts.Consumers},
		Summary: "consumers of durable queues acknowledge",
		Remedy:  "consume with manual acknowledgements, and acknowledge after the work is done",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				if n := c.live.here.Queues[q.Name].AutoAck; n > 0 && !q.Passing() && q.Type != queuearg.Stream {
					c.ReportQueue(q, "%d of its consumers acknowledge automatically: the broker forgets a message once it is sent, so one that crashes loses what it holds", n)
					c.Path(rules.NameOfQueue(q.Name), "sent and forgotten", "consumer", "crashes", "lost")
				}
			}
		},
	},
	{
		ID: "oversized-queue", Examined: rules.SeverityWarning, needs: []string{rules.PartCounts, rules.PartPolicies},
		Summary: "a queue has fewer than a million messages, or a length limit",
		Remedy:  "add consumers, or set max-length with overflow reject-publish, so that publishers see it before the disk is full",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				n, size := q.Messages+q.MessagesUnacknowledged, c.live.here.Queues[q.Name].Bytes
				if q.Limited() == "" && q.Type != queuearg.Stream && (n >= pileOfMessages || size >= pileOfBytes) {
					c.ReportQueue(q, "it has %d messages (%d MiB) and no length limit: it grows until an alarm stops all publishers", n, size>>20)
					c.Path("publisher", "", rules.NameOfQueue(q.Name), "grows", "an alarm blocks all publishers")
				}
			}
		},
	},
	{
		ID: "unread-queue", Examined: rules.SeverityNote, needs: slices.Concat(rules.Everything, []string{rules.PartCounts}),
		Summary: "somebody reads every queue that has messages",
		Remedy:  "start its consumers, or remove its bindings and delete it",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				_, _, deadLetters := q.DeadLetters()
				waits := q.HasTTL() || deadLetters && rules.WaitName.MatchString(q.Name)
				if q.Messages == 0 || q.Consumers > 0 || waits || q.Type == queuearg.Stream || c.IsFed(q.Name) {
					continue
				}
				c.ReportQueue(q, "%d messages wait in it, and it has no consumer", q.Messages)
				c.Path("publisher", "", rules.NameOfQueue(q.Name), "nobody reads", "piles up")
				if q.Messages >= pileOfUnread {
					c.As(rules.SeverityWarning)
				}
			}
		},
	},
	{
		ID: "stream-retention", Examined: rules.SeverityWarning, needs: []string{rules.PartPolicies},
		Summary: "a stream has a retention limit",
		Remedy:  "set max-age or max-length-bytes; a policy can do that in place",
		check: func(c *examination) {
			for _, q := range c.Sorted() {
				_, sized := q.Number("x-max-length-bytes")
				if _, aged := q.Text("x-max-age"); q.Type == queuearg.Stream && !sized && !aged {
					c.ReportQueue(q, "it has neither max-age nor max-length-bytes: it grows until the disk alarm stops all publishers")
					c.Path("publisher", "", rules.NameOfQueue(q.Name), "grows", "the disk alarm blocks all publishers")
				}
			}
		},
	},
}

var clusterRules = []examineRule{
	{
		ID: "memory-alarm", Examined: rules.SeverityError, needs: []string{facts.Alarms},
		Summary: "no node has a memory alarm",
		Remedy:  "free memory: let consumers catch up, purge what nobody needs, or raise the limit; until then all publishers of the cluster are blocked",
		check: func(c *examination) {
			for _, n := range c.live.cluster.Nodes {
				if n.MemoryAlarm {
					c.Report(nodeResource(n.Name), "it has a memory alarm: publishers are blocked in the whole cluster, and retries by publishing wait")
					c.Path("publisher", "blocked", nodeResource(n.Name).String())
				}
			}
		},
	},
	{
		ID: "disk-alarm", Examined: rules.SeverityError, needs: []string{facts.Alarms},
		Summary: "no node has a disk alarm",
		Remedy:  "free disk space, or lower disk_free_limit; until then all publishers of the cluster are blocked",
		check: func(c *examination) {
			for _, n := range c.live.cluster.Nodes {
				if n.DiskAlarm {
					c.Report(nodeResource(n.Name), "it has a disk alarm, with %d MiB free: publishers are blocked in the whole cluster", n.DiskFree>>20)
					c.Path("publisher", "blocked", nodeResource(n.Name).String())
				}
			}
		},
	},
	{
		ID: "disk-limit", Examined: rules.SeverityNote, needs: []string{facts.Alarms},
		Summary: "the disk alarm comes before the disk is full",
		Remedy:  "set disk_free_limit.absolute in rabbitmq.conf to at least the node's memory limit",
		check: func(c *examination) {
			for _, n := range c.live.cluster.Nodes {
				if n.DiskFreeLimit > 0 && n.DiskFreeLimit < smallDisk {
					c.Report(nodeResource(n.Name), "its disk_free_limit is %d MB: one burst can fill the disk before the alarm stops publishers, and then the node crashes", n.DiskFreeLimit/1_000_000)
				}
			}
		},
	},
	{
		ID: "node-down", Examined: rules.SeverityError, needs: []string{facts.Alarms},
		Summary: "every node of the cluster runs",
		Remedy:  "start the node, or remove it from the cluster with rabbitmqctl forget_cluster_node",
		check: func(c *examination) {
			for _, n := range c.live.cluster.Nodes {
				if !n.Running {
					c.Report(nodeResource(n.Name), "it doesn't run: classic queues on it are gone, and quorum queues have one replica less")
				}
			}
		},
	},
	{
		ID: "partition", Examined: rules.SeverityError, needs: []string{facts.Alarms},
		Summary: "the nodes see each other",
		Remedy:  "heal the network; then restart the nodes of the minority if they don't rejoin by themselves",
		check: func(c *examination) {
			for _, n := range c.live.cluster.Nodes {
				if len(n.Partitioned) > 0 {
					c.Report(nodeResource(n.Name), "it lost contact with %s", rules.Listed(n.Partitioned, 5))
				}
			}
		},
	},
	{
		ID: "two-nodes", Examined: rules.SeverityWarning, needs: []string{facts.Alarms},
		Summary: "a cluster has one node, or at least three",
		Remedy:  "add a third node, and a replica of each queue on it: rabbitmq-queues grow",
		check: func(c *examination) {
			if n := len(c.live.cluster.Nodes); n == 2 {
				c.Report(declare.Resource{Kind: "broker", Name: c.live.cluster.Version}, "the cluster has two nodes: quorum queues stop when either of them does, because one isn't a majority")
			}
		},
	},
	{
		ID: "leaders-on-one-node", Examined: rules.SeverityWarning, needs: []string{facts.Alarms},
		Summary: "the leaders of queues are spread over the nodes",
		Remedy:  "rabbitmq-queues rebalance quorum, and set queue-leader-locator to balanced by a policy",
		check: func(c *examination) {
			leaders := map[string]int{}
			all := 0
			for _, s := range c.live.all {
				for _, q := range s.Queues {
					if q.Leader != "" && !q.Exclusive {
						leaders[q.Leader]++
						all++
					}
				}
			}
			running := 0
			for _, n := range c.live.cluster.Nodes {
				if n.Running {
					running++
				}
			}
			for _, name := range slices.Sorted(maps.Keys(leaders)) {
				if n := leaders[name]; running >= 3 && all >= 10 && n*5 >= all*4 {
					c.Report(nodeResource(name), "it leads %d of %d queues: it does the work of the cluster, and all of them fail over when it stops", n, all)
				}
			}
		},
	},
	{
		ID: "unsupported-version", Examined: rules.SeverityWarning, needs: []string{rules.PartVersion},
		Summary: "the version of RabbitMQ has community support",
		Remedy:  "upgrade, one minor version at a time; before each upgrade enable the stable feature flags, as the rule disabled-feature-flags says",
		check: func(c *examination) {
			for _, v := range supportEnds {
				if !strings.HasPrefix(c.Snapshot.Version, v.series) || c.live.cluster.Now.Before(v.end) {
					continue
				}
				c.Report(declare.Resource{Kind: "broker", Name: c.Snapshot.Version}, "community support of RabbitMQ %s ended on %s", strings.TrimSuffix(v.series, "."), v.end.Format("2 January 2006"))
				break
			}
		},
	},
	{
		ID: "deprecated-feature", Examined: rules.SeverityWarning, needs: []string{facts.Features},
		Summary: "nobody uses a deprecated feature",
		Remedy:  "change the clients that use it before you upgrade",
		check: func(c *examination) {
			for _, f := range c.live.cluster.Deprecated {
				c.Report(declare.Resource{Kind: "broker", Name: f.Name}, "the deprecated feature %.80q is in use: a later version refuses it, or doesn't start", f.Name)
			}
		},
	},
	{
		ID: "disabled-feature-flags", Examined: rules.SeverityWarning, needs: []string{facts.Flags},
		Summary: "all stable feature flags are enabled",
		Remedy:  "start all nodes first, check that no quorum queue is left at an old machine version, and then enable one flag at a time",
		check: func(c *examination) {
			flags := c.live.cluster.DisabledFlags
			if len(flags) == 0 {
				return
			}
			harm := ""
			if slices.Contains(flags, "rabbitmq_4.0.0") {
				harm = "; but \"rabbitmq_4.0.0\" permanently breaks each quorum queue whose machine version is below 4, and one stays there if a replica of it didn't answer during the upgrade"
			}
			c.Report(declare.Resource{Kind: "broker", Name: c.live.cluster.Version}, "stable feature flags are disabled: %s; a node of a later version may not start until they are enabled%s", rules.Listed(flags, 5), harm)
		},
	},
}

// supportEnds is when the community support of versions ended, according to
// https://www.rabbitmq.com/release-information and https://endoflife.date/rabbitmq. 3.13 was the
// last series before 4.0.
var supportEnds = []struct {
	series string
	end    time.Time
}{
	{"3.", time.Date(2024, time.September, 17, 0, 0, 0, 0, time.UTC)},
	{"4.0.", time.Date(2025, time.April, 15, 0, 0, 0, 0, time.UTC)},
	{"4.1.", time.Date(2026, time.January, 30, 0, 0, 0, 0, time.UTC)},
}

func nodeResource(name string) declare.Resource { return declare.Resource{Kind: "node", Name: name} }
