package audit

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/audit/internal/facts"
	"github.com/hopback/hopback/declare/internal/queuearg"
	"github.com/hopback/hopback/declare/internal/values"
)

// From these sizes on something is a pile.
const (
	pileOfUnacked  = 1_000 // for each consumer
	pileOfUnread   = 1_000
	pileOfMessages = 1_000_000
	pileOfBytes    = 1 << 30
	smallDisk      = 1 << 30
)

// examineRules are the rules that only Examine runs: they need the state of a running broker, or
// judge what a topology of our own doesn't contain.
var examineRules = slices.Concat(deadLetterRules, policyRules, stateRules, clusterRules)

var deadLetterRules = []Rule{
	{
		ID: "drop-head-at-least-once", Examined: severityError, needs: []string{partPolicies},
		Summary: "a queue that should dead-letter at least once has overflow reject-publish",
		Remedy:  "set overflow to reject-publish; a policy can do that in place",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, _, ok := q.deadLetters()
				if !ok || !q.dropsHeadAtLeastOnce() {
					continue
				}
				overflow, _ := q.text("x-overflow")
				if overflow == "" {
					overflow = string(declare.OverflowDropHead) + ", the default"
				}
				c.queue(q, "its strategy is at-least-once, but with overflow %s the broker dead-letters at most once", overflow)
				c.path(nameOfQueue(q.Name), "dead-lettered", nameOf(exchange), "without a confirm", "target, or lost")
			}
		},
	},
	{
		ID: "dead-letter-cycle", Examined: severityError, needs: everything,
		Summary: "a rejected message doesn't return to its queue at once",
		Remedy:  "dead-letter to another queue, or through a queue with a message TTL",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, key, ok := q.deadLetters()
				if !ok || q.hasTTL() || c.exchanges[exchange].Type == declare.ExchangeHeaders {
					continue
				}
				for _, k := range c.keysOf(q.Name, key) {
					if !c.reach(exchange, deadLetter{&k, "rejected"})[q.Name] {
						continue
					}
					c.queue(q, "a message with the key %.80q that is rejected, or exceeds the delivery limit, returns to it at once, without end", k)
					c.path(nameOfQueue(q.Name), "rejected", nameOf(exchange), fmt.Sprintf("key %.80q", k), nameOfQueue(q.Name), "rejected", "…")
					break
				}
			}
		},
	},
	{
		ID: "endless-retry", Examined: severityNote, needs: everything,
		Summary: "something ends the retries of a message",
		Remedy:  "let the consumer count x-death and give up, or let hopback retry run count",
		check: func(c *check) {
			for _, q := range c.sorted() {
				exchange, _, ok := q.deadLetters()
				if !ok || q.hasTTL() || c.exchanges[exchange].Type == declare.ExchangeHeaders {
					continue
				}
				for _, name := range slices.Sorted(maps.Keys(c.deadFrom(q, "rejected"))) {
					wait := c.queues[name]
					if ttl, held := wait.number("x-message-ttl"); held && c.comesBack(q, wait) {
						c.queue(q, "a rejected message waits in queue %.80q for %d ms, and returns: without end, unless its consumer counts", name, ttl)
						c.path(nameOfQueue(q.Name), "rejected", nameOfQueue(name), fmt.Sprintf("after %d ms", ttl), nameOfQueue(q.Name))
						break
					}
				}
			}
		},
	},
	{
		ID: "no-delivery-limit", Examined: severityWarning, needs: everything,
		Summary: "a work queue has a delivery limit",
		Remedy:  "set x-delivery-limit, and a dead-letter exchange; a policy can set both on a live queue",
		check: func(c *check) {
			for _, q := range c.sorted() {
				limit, set := q.number("x-delivery-limit")
				idle := q.Counted && q.Consumers == 0
				if q.Type == queuearg.Quorum && set && limit < 0 && !q.hasTTL() && !idle && len(c.feeders(q.Name)) == 0 {
					c.queue(q, "it has no delivery limit%s: a message that crashes its consumer comes back without end", c.byPolicy(q, "x-delivery-limit"))
					c.path(nameOfQueue(q.Name), "delivered", "consumer", "crashes", nameOfQueue(q.Name), "delivered", "…")
				}
			}
		},
	},
	{
		ID: "per-message-ttl", Examined: severityWarning, needs: everything,
		Summary: "a queue for delays has one message TTL for all its messages",
		Remedy:  "use one queue per delay, with x-message-ttl; hopback retry run has these",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if !c.waitsWithoutTTL(q) || delayName.MatchString(q.Name) {
					continue
				}
				to := ""
				for _, name := range slices.Sorted(maps.Keys(c.deadFrom(q, "expired"))) {
					if t := c.queues[name]; name != q.Name && (waitName.MatchString(q.Name) || q.Counted && t.Consumers > 0) {
						to = name
						break
					}
				}
				if to == "" {
					continue
				}
				c.queue(q, "it has no message TTL, so messages wait in it for as long as each one's own expiration says: one that waits long blocks those behind it, and one without an expiration stays")
				c.path("expiration 60 s", "", nameOfQueue(q.Name), "expires at the head only", nameOfQueue(to))
			}
		},
	},
	{
		ID: "delay-without-ttl", Examined: severityWarning, needs: everything,
		Summary: "a queue whose name says how long it delays messages has a message TTL",
		Remedy:  "set message-ttl, by a policy or in a new queue",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if !c.waitsWithoutTTL(q) || !delayName.MatchString(q.Name) {
					continue
				}
				c.queue(q, "its name says that it delays messages, but it has no message TTL: they stay until their own expiration, or forever")
				if q.Messages > 0 && q.Consumers == 0 {
					c.as(severityError)
				}
				exchange, _, _ := q.deadLetters()
				c.path(nameOfQueue(q.Name), "no TTL", "stuck", "never", nameOf(exchange))
			}
		},
	},
	{
		ID: "unread-dead-letters", Examined: severityWarning, needs: slices.Concat(everything, []string{partCounts}),
		Summary: "somebody reads the dead letters",
		Remedy:  "look into them and replay or delete them: hopback dlq survey, hopback desk",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if q.Messages == 0 || q.Consumers > 0 || q.hasTTL() || q.Type == queuearg.Stream {
					continue
				}
				if from := c.feeders(q.Name); len(from) > 0 {
					c.queue(q, "%d dead letters wait in it, and it has no consumer", q.Messages)
					c.path(nameOfQueue(from[0].Name), "dead-lettered", nameOfQueue(q.Name), "nobody reads", "piles up")
				}
			}
		},
	},
	{
		ID: "delayed-message-plugin", Examined: severityWarning, needs: []string{partExchanges},
		Summary: "no exchange depends on the delayed message exchange plugin",
		Remedy:  "delay with one queue per delay, or with delayed retries of RabbitMQ 4.3; hopback retry run and hopback's schedule need no plugin",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if x.Type == "x-delayed-message" {
					c.report(exchangeResource(x.Name), "it belongs to the delayed message exchange plugin, which is archived: it keeps pending messages on one node, unreplicated, and loses them with it")
					c.path("publisher", "", nameOf(x.Name), "pending on one node", "lost with the node")
				}
			}
		},
	},
	{
		ID: "unbound-exchange", Examined: severityNote, needs: []string{partExchanges, partBindings, partPolicies},
		Summary: "every exchange has a binding or an alternate exchange",
		Remedy:  "bind a queue, give it an alternate exchange, or delete it",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if len(c.bySource[x.Name]) > 0 || x.alternate != "" || strings.HasPrefix(x.Name, "amq.") {
					continue
				}
				if from := c.passedOn()[x.Name]; from != "" {
					c.report(exchangeResource(x.Name), "it has no binding and no alternate exchange, but dead letters of queue %.80q are routed to it: they are lost, or %d of them block all others", from, stallAt)
					c.as(severityWarning)
					c.path(nameOfQueue(from), "dead-lettered", nameOf(x.Name), "no binding", "lost, or stuck")
				} else {
					c.report(exchangeResource(x.Name), "it has no binding and no alternate exchange: the broker drops everything that is published to it, and tells only publishers that ask")
					c.path("publisher", "", nameOf(x.Name), "no binding", "dropped")
				}
			}
		},
	},
	{
		ID: "unrouted-exchange", Examined: severityWarning, needs: []string{partExchanges, partBindings, partPolicies, partCounts},
		Summary: "what is published to an exchange reaches a queue",
		Remedy:  "bind a queue with that key, or give the exchange an alternate exchange; a policy can set one in place",
		check: func(c *check) {
			for _, x := range c.sortedExchanges() {
				if n := c.live.here.Exchanges[x.Name]; n.In > 0 && n.Out == 0 && x.alternate == "" {
					c.report(exchangeResource(x.Name), "%d messages were published to it, and it routed none of them", n.In)
					c.path("publisher", "", nameOf(x.Name), "no binding matches", "dropped")
				}
			}
		},
	},
}

// endOfLine reports whether a queue gets dead letters that another queue gave up. What comes out
// of a delay queue is still on its way.
func (c *check) endOfLine(queue string) bool {
	return slices.ContainsFunc(c.feeders(queue), func(from liveQueue) bool { return !from.delays() })
}

// comesBack reports whether what q dead-letters to wait returns to q when its time is up. It keeps
// q's dead-letter routing key, unless wait has one.
func (c *check) comesBack(q, wait liveQueue) bool {
	exchange, key, ok := wait.deadLetters()
	if key == nil {
		_, key, _ = q.deadLetters()
	}
	return ok && c.reach(exchange, deadLetter{key, "expired"})[q.Name]
}

// passedOn are the exchanges that dead letters reach through another exchange, each with a queue
// that they come from.
func (c *check) passedOn() map[string]string {
	if c.passed == nil {
		c.passed = map[string]string{}
		seen := map[deadLetterTo]bool{}
		var visit func(from, exchange string, key *string)
		visit = func(from, exchange string, key *string) {
			to := deadLetterTo{exchange: exchange, keyed: key != nil}
			if key != nil {
				to.key = *key
			}
			if seen[to] {
				return
			}
			seen[to] = true
			for _, b := range c.candidates(c.exchanges[exchange], deadLetter{key: key}) {
				if may, _ := c.exchanges[exchange].matches(b, deadLetter{key: key}); may && b.Exchange != "" {
					c.passed[b.Exchange] = from
					visit(from, b.Exchange, key)
				}
			}
		}
		for _, q := range c.sorted() {
			if exchange, key, ok := q.deadLetters(); ok {
				visit(q.Name, exchange, key)
			}
		}
	}
	return c.passed
}

// Names that say that messages wait in a queue, and how long.
var (
	waitName  = regexp.MustCompile(`(?i)delay|retry|retries|wait|hold|backoff|postpone|defer|sleep`)
	delayName = regexp.MustCompile(`(?i)(delay|retry|wait|hold|backoff|sleep)[a-z]*[._:-]?\d+[._:-]?(ms|millis|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)?$`)
)

// waitsWithoutTTL is a queue that messages can leave only by an expiration of their own: it
// dead-letters, has no message TTL, and as far as can be seen no consumer.
func (c *check) waitsWithoutTTL(q liveQueue) bool {
	exchange, _, ok := q.deadLetters()
	return ok && !q.hasTTL() && q.Consumers == 0 && !q.passing() && q.Type != queuearg.Stream && c.exchanges[exchange].Type != declare.ExchangeHeaders
}

// keysOf are keys of a queue's dead letters: the queue's dead-letter routing key, or else the keys
// that messages arrive with, as far as bindings name them.
func (c *check) keysOf(queue string, key *string) []string {
	if key != nil {
		return []string{*key}
	}
	keys := []string{queue}
	for _, b := range c.bindingsTo(queue) {
		if !strings.ContainsAny(b.Key, "*#") {
			keys = append(keys, b.Key)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

var policyRules = []Rule{
	{
		ID: "policy-conflict", Examined: severityWarning, needs: []string{facts.Policies, partPolicies},
		Summary: "a policy and a queue's arguments say the same",
		Remedy:  "leave the setting to one of them; arguments can't be changed on a live queue, policies can",
		check: func(c *check) {
			for _, q := range c.sorted() {
				for _, operator := range []bool{false, true} {
					p := c.s.policyOf(operator, "queue", q.Type, q.Name)
					if p == nil {
						continue
					}
					for _, key := range values.SortedKeys(p.Definition) {
						own, set := q.Arguments["x-"+key]
						if says := p.Definition[key]; set && !reflect.DeepEqual(own, says) {
							c.queue(q, "the policy %.80q sets %.80q to %s, and its own argument is %s: %s counts", p.Name, key, settingOf(says), settingOf(own), settingOf(q.args["x-"+key]))
						}
					}
				}
			}
		},
	},
	{
		ID: "policy-tie", Examined: severityWarning, needs: []string{facts.Policies, partPolicies},
		Summary: "of two policies that match a queue, one has the higher priority",
		Remedy:  "give them different priorities, or patterns that don't overlap: policies aren't merged",
		check: func(c *check) {
			tied := map[[2]string]bool{}
			for _, q := range c.sorted() {
				p := c.s.policyOf(false, "queue", q.Type, q.Name)
				if p == nil {
					continue
				}
				for i := range c.s.Policies {
					o := &c.s.Policies[i]
					if o == p || o.Operator || o.Priority != p.Priority || tied[[2]string{p.Name, o.Name}] || unsupported(*o, "queue", q.Type) != "" {
						continue
					}
					if yes, _ := policyApplies(*o, "queue", q.Type, q.Name); yes {
						tied[[2]string{p.Name, o.Name}] = true
						c.report(declare.Resource{Kind: "policy", Name: p.Name}, "it and the policy %.80q have the same priority, %d, and both match queue %.80q: one of them applies, and the other doesn't", o.Name, p.Priority, q.Name)
					}
				}
			}
		},
	},
	{
		ID: "policy-not-applied", Examined: severityWarning, needs: []string{facts.Policies, partPolicies},
		Summary: "a policy that matches a queue applies to it",
		Remedy:  "make a policy for each type of queue, with apply-to quorum_queues, classic_queues, or streams",
		check: func(c *check) {
			for _, q := range c.sorted() {
				for _, p := range c.s.Policies {
					key := unsupported(p, "queue", q.Type)
					if key == "" {
						continue
					}
					if yes, _ := policyApplies(p, "queue", q.Type, q.Name); yes {
						c.queue(q, "the policy %.80q matches it and has the key %.80q, which %s queues don't have: nothing of that policy applies", p.Name, key, q.Type)
					}
				}
			}
		},
	},
	{
		ID: "policy-unmatched", Examined: severityNote, needs: []string{facts.Policies, partPolicies},
		Summary: "every policy matches something",
		Remedy:  "check the pattern: it is a regular expression, and needs ^ and $ to match a whole name",
		check: func(c *check) {
			for _, p := range c.s.Policies {
				matched := slices.ContainsFunc(c.s.Queues, func(q declare.QueueInfo) bool { yes, _ := policyApplies(p, "queue", q.Type, q.Name); return yes }) ||
					slices.ContainsFunc(c.s.Exchanges, func(x ExchangeInfo) bool { yes, _ := policyApplies(p, "exchange", "", x.Name); return yes })
				if !matched {
					c.report(declare.Resource{Kind: "policy", Name: p.Name}, "its pattern %.80q matches no queue and no exchange", p.Pattern)
				}
			}
		},
	},
}

var stateRules = []Rule{
	{
		ID: "queue-down", Examined: severityError,
		Summary: "every queue runs",
		Remedy:  "start the node that has it; if that is gone, delete the queue or restore the node",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if slices.Contains([]string{"down", "crashed", "stopped", "minority"}, q.State) {
					c.queue(q, "its state is %s: it neither accepts nor delivers messages", q.State)
					c.path("publisher", "no confirm", nameOfQueue(q.Name), "nothing delivered", "consumer")
				}
			}
		},
	},
	{
		ID: "unacked-pile-up", Examined: severityWarning, needs: []string{partCounts},
		Summary: "consumers acknowledge what they receive",
		Remedy:  "find the consumers that don't acknowledge, and give them a prefetch limit",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if q.Consumers == 0 || q.MessagesUnacknowledged < pileOfUnacked*q.Consumers {
					continue
				}
				rate := ""
				if f := c.live.here.Queues[q.Name]; f.Rated {
					rate = fmt.Sprintf(", at %.1f acknowledgements a second", f.AckRate)
				}
				c.queue(q, "%d messages are unacknowledged at %d consumers%s: nobody else gets them until those connections end", q.MessagesUnacknowledged, q.Consumers, rate)
				c.path(nameOfQueue(q.Name), "delivered", "consumer", "no acknowledgement", "stuck")
			}
		},
	},
	{
		ID: "no-prefetch-limit", Examined: severityWarning, needs: []string{facts.Consumers},
		Summary: "AMQP 0-9-1 consumers have a prefetch limit",
		Remedy:  "call basic.qos with a prefetch count before basic.consume, such as 10 to 300",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if n := c.live.here.Queues[q.Name].Unlimited; n > 0 {
					c.queue(q, "%d of its consumers have no prefetch limit: the broker sends them all messages at once", n)
					c.path(nameOfQueue(q.Name), "everything at once", "one consumer", "", "memory, and nothing for the others")
				}
			}
		},
	},
	{
		ID: "auto-ack", Examined: severityWarning, needs: []string{facts.Consumers},
		Summary: "consumers of durable queues acknowledge",
		Remedy:  "consume with manual acknowledgements, and acknowledge after the work is done",
		check: func(c *check) {
			for _, q := range c.sorted() {
				if n := c.live.here.Queues[q.Name].AutoAck; n > 0 && !q.passing() && q.Type != queuearg.Stream {
					c.queue(q, "%d of its consumers acknowledge automatically: the broker forgets a message once it is sent, so one that crashes loses what it holds", n)
					c.path(nameOfQueue(q.Name), "sent and forgotten", "consumer", "crashes", "lost")
				}
			}
		},
	},
	{
		ID: "oversized-queue", Examined: severityWarning, needs: []string{partCounts, partPolicies},
		Summary: "a queue has fewer than a million messages, or a length limit",
		Remedy:  "add consumers, or set max-length with overflow reject-publish, so that publishers see it before the disk is full",
		check: func(c *check) {
			for _, q := range c.sorted() {
				n, size := q.Messages+q.MessagesUnacknowledged, c.live.here.Queues[q.Name].Bytes
				if q.limited() == "" && q.Type != queuearg.Stream && (n >= pileOfMessages || size >= pileOfBytes) {
					c.queue(q, "it has %d messages (%d MiB) and no length limit: it grows until an alarm stops all publishers", n, size>>20)
					c.path("publisher", "", nameOfQueue(q.Name), "grows", "an alarm blocks all publishers")
				}
			}
		},
	},
	{
		ID: "unread-queue", Examined: severityNote, needs: slices.Concat(everything, []string{partCounts}),
		Summary: "somebody reads every queue that has messages",
		Remedy:  "start its consumers, or remove its bindings and delete it",
		check: func(c *check) {
			for _, q := range c.sorted() {
				_, _, deadLetters := q.deadLetters()
				waits := q.hasTTL() || deadLetters && waitName.MatchString(q.Name)
				if q.Messages == 0 || q.Consumers > 0 || waits || q.Type == queuearg.Stream || len(c.feeders(q.Name)) > 0 {
					continue
				}
				c.queue(q, "%d messages wait in it, and it has no consumer", q.Messages)
				c.path("publisher", "", nameOfQueue(q.Name), "nobody reads", "piles up")
				if q.Messages >= pileOfUnread {
					c.as(severityWarning)
				}
			}
		},
	},
	{
		ID: "stream-retention", Examined: severityWarning, needs: []string{partPolicies},
		Summary: "a stream has a retention limit",
		Remedy:  "set max-age or max-length-bytes; a policy can do that in place",
		check: func(c *check) {
			for _, q := range c.sorted() {
				_, sized := q.number("x-max-length-bytes")
				if _, aged := q.text("x-max-age"); q.Type == queuearg.Stream && !sized && !aged {
					c.queue(q, "it has neither max-age nor max-length-bytes: it grows until the disk alarm stops all publishers")
					c.path("publisher", "", nameOfQueue(q.Name), "grows", "the disk alarm blocks all publishers")
				}
			}
		},
	},
}

var clusterRules = []Rule{
	{
		ID: "memory-alarm", Examined: severityError, needs: []string{facts.Alarms},
		Summary: "no node has a memory alarm",
		Remedy:  "free memory: let consumers catch up, purge what nobody needs, or raise the limit; until then all publishers of the cluster are blocked",
		check: func(c *check) {
			for _, n := range c.live.cluster.Nodes {
				if n.MemoryAlarm {
					c.report(nodeResource(n.Name), "it has a memory alarm: publishers are blocked in the whole cluster, and retries by publishing wait")
					c.path("publisher", "blocked", nodeResource(n.Name).String())
				}
			}
		},
	},
	{
		ID: "disk-alarm", Examined: severityError, needs: []string{facts.Alarms},
		Summary: "no node has a disk alarm",
		Remedy:  "free disk space, or lower disk_free_limit; until then all publishers of the cluster are blocked",
		check: func(c *check) {
			for _, n := range c.live.cluster.Nodes {
				if n.DiskAlarm {
					c.report(nodeResource(n.Name), "it has a disk alarm, with %d MiB free: publishers are blocked in the whole cluster", n.DiskFree>>20)
					c.path("publisher", "blocked", nodeResource(n.Name).String())
				}
			}
		},
	},
	{
		ID: "disk-limit", Examined: severityNote, needs: []string{facts.Alarms},
		Summary: "the disk alarm comes before the disk is full",
		Remedy:  "set disk_free_limit.absolute in rabbitmq.conf to at least the node's memory limit",
		check: func(c *check) {
			for _, n := range c.live.cluster.Nodes {
				if n.DiskFreeLimit > 0 && n.DiskFreeLimit < smallDisk {
					c.report(nodeResource(n.Name), "its disk_free_limit is %d MB: one burst can fill the disk before the alarm stops publishers, and then the node crashes", n.DiskFreeLimit/1_000_000)
				}
			}
		},
	},
	{
		ID: "node-down", Examined: severityError, needs: []string{facts.Alarms},
		Summary: "every node of the cluster runs",
		Remedy:  "start the node, or remove it from the cluster with rabbitmqctl forget_cluster_node",
		check: func(c *check) {
			for _, n := range c.live.cluster.Nodes {
				if !n.Running {
					c.report(nodeResource(n.Name), "it doesn't run: classic queues on it are gone, and quorum queues have one replica less")
				}
			}
		},
	},
	{
		ID: "partition", Examined: severityError, needs: []string{facts.Alarms},
		Summary: "the nodes see each other",
		Remedy:  "heal the network; then restart the nodes of the minority if they don't rejoin by themselves",
		check: func(c *check) {
			for _, n := range c.live.cluster.Nodes {
				if len(n.Partitioned) > 0 {
					c.report(nodeResource(n.Name), "it lost contact with %s", listed(n.Partitioned, 5))
				}
			}
		},
	},
	{
		ID: "two-nodes", Examined: severityWarning, needs: []string{facts.Alarms},
		Summary: "a cluster has one node, or at least three",
		Remedy:  "add a third node, and a replica of each queue on it: rabbitmq-queues grow",
		check: func(c *check) {
			if n := len(c.live.cluster.Nodes); n == 2 {
				c.report(declare.Resource{Kind: "broker", Name: c.live.cluster.Version}, "the cluster has two nodes: quorum queues stop when either of them does, because one isn't a majority")
			}
		},
	},
	{
		ID: "leaders-on-one-node", Examined: severityWarning, needs: []string{facts.Alarms},
		Summary: "the leaders of queues are spread over the nodes",
		Remedy:  "rabbitmq-queues rebalance quorum, and set queue-leader-locator to balanced by a policy",
		check: func(c *check) {
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
					c.report(nodeResource(name), "it leads %d of %d queues: it does the work of the cluster, and all of them fail over when it stops", n, all)
				}
			}
		},
	},
	{
		ID: "unsupported-version", Examined: severityWarning, needs: []string{partVersion},
		Summary: "the version of RabbitMQ has community support",
		Remedy:  "upgrade, one minor version at a time, with all stable feature flags enabled",
		check: func(c *check) {
			for _, v := range supportEnds {
				if !strings.HasPrefix(c.s.Version, v.series) || c.live.cluster.Now.Before(v.end) {
					continue
				}
				c.report(declare.Resource{Kind: "broker", Name: c.s.Version}, "community support of RabbitMQ %s ended on %s", strings.TrimSuffix(v.series, "."), v.end.Format("2 January 2006"))
				break
			}
		},
	},
	{
		ID: "deprecated-feature", Examined: severityWarning, needs: []string{facts.Features},
		Summary: "nobody uses a deprecated feature",
		Remedy:  "change the clients that use it before you upgrade",
		check: func(c *check) {
			for _, f := range c.live.cluster.Deprecated {
				c.report(declare.Resource{Kind: "broker", Name: f.Name}, "the deprecated feature %.80q is in use: a later version refuses it, or doesn't start", f.Name)
			}
		},
	},
	{
		ID: "disabled-feature-flags", Examined: severityWarning, needs: []string{facts.Flags},
		Summary: "all stable feature flags are enabled",
		Remedy:  "rabbitmqctl enable_feature_flag all",
		check: func(c *check) {
			if flags := c.live.cluster.DisabledFlags; len(flags) > 0 {
				c.report(declare.Resource{Kind: "broker", Name: c.live.cluster.Version}, "stable feature flags are disabled: %s; a node of a later version may not start until they are enabled", listed(flags, 5))
			}
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
