package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hopback/hopback/declare"
)

// foreignBinding finds bindings that take messages from their way. RabbitMQ routes to an alternate
// exchange only what matches no binding, and a modulus-hash exchange to one binding only. And it finds those that have
// retries multiply: RabbitMQ refuses a message if one of its queues does, and leaves it in the others.
var foreignBinding = Entry{
	ID: "foreign-binding", Severity: SeverityError, Examined: SeverityError, Needs: Everything,
	Summary: "no binding takes messages from the exchanges of hopback, or has its retries refused",
	Remedy:  "remove the binding, and bind the queue to the exchange in front of it, where it gets copies; for the dead letters of a queue, apply retry.Topology or retry.CentralTopology of the current version",
	Check: func(c *Checker) {
		for _, x := range c.SortedExchanges() {
			switch x.Type {
			case declare.ExchangeHeaders:
				c.takenByHeaders(x)
			case declare.ExchangeTopic:
				c.takenByTopic(x)
				c.refusedByTopic(x)
			case declare.ExchangeModulusHash:
				c.takenByHash(x)
			case declare.ExchangeDirect:
				c.takenByDirect(x)
			}
		}
	},
}

// takenByHeaders is about the exchanges that sort dead letters.
func (c *Checker) takenByHeaders(x Exchange) {
	given := c.Exchanges[x.Alternate]
	ours := x.Alternate != "" && given.Type == declare.ExchangeDirect && c.Exchanges[given.Alternate].Type == declare.ExchangeFanout
	sorts := false // it is behind another one
	for _, b := range c.BySource[x.Name] {
		ours = ours || x.Alternate != "" && hasHeader(b, "x-opt-hopback-")
	}
	if !ours {
		return
	}
	sorted := map[string]bool{} // queues whose dead letters pass a binding of their own
	for _, b := range c.BySource[x.Name] {
		if q, ok := b.Headers["x-last-death-queue"].(string); ok && b.Exchange != "" && b.Match == declare.MatchAllWithX && len(b.Headers) == 1 {
			sorted[q] = true
		}
	}
	for _, b := range c.Snapshot.Bindings {
		sorts = sorts || b.Exchange == x.Name && hasHeader(b, "x-last-death-queue")
	}
	var taken []string
	feeds := false
	for _, q := range c.Sorted() {
		if exchange, _, ok := q.DeadLetters(); ok && exchange == x.Name {
			feeds = true
			if !sorted[q.Name] {
				taken = append(taken, q.Name)
			}
		}
	}
	if feeds && len(taken) == 0 && !sorts {
		return // a binding adds copies
	}
	for _, b := range c.BySource[x.Name] {
		if hasHeader(b, "x-last-death-") {
			continue
		}
		of := "the dead letters"
		if len(taken) > 0 {
			of = fmt.Sprintf("the dead letters of %s", Listed(taken, 3))
		}
		c.Report(ExchangeResource(x.Name), "its binding to %s takes %s that it matches: its alternate exchange %.80q gets only what matches no binding", destination(b), of, x.Alternate)
		c.Path("dead letter", "", NameOf(x.Name), "the binding matches", destination(b), "instead of", NameOf(x.Alternate))
	}
}

// takenByTopic is about the exchanges that return messages after a delay.
func (c *Checker) takenByTopic(x Exchange) {
	returns := x.Alternate != "" && slices.ContainsFunc(c.BySource[x.Name], func(b declare.Binding) bool {
		return b.Queue != "" && strings.HasPrefix(b.Key, "*.*.") && strings.HasSuffix(b.Key, "."+b.Queue)
	})
	if !returns {
		return
	}
	for _, b := range c.BySource[x.Name] {
		if b.Key == "#" {
			c.Report(ExchangeResource(x.Name), "its binding to %s matches everything, so its alternate exchange %.80q gets nothing: messages of queues that aren't bound reach only that binding", destination(b), x.Alternate)
			c.Path("delayed message", "", NameOf(x.Name), "the binding matches", destination(b), "instead of", NameOf(x.Alternate))
		}
	}
}

// refusedByTopic is about the exchanges that retries are published to.
func (c *Checker) refusedByTopic(x Exchange) {
	delays := ""
	for _, b := range c.BySource[x.Name] {
		if q, known := c.Queues[b.Queue]; known && q.Delays() && strings.HasPrefix(b.Key, "delay.") {
			delays = b.Queue
		}
	}
	if delays == "" {
		return
	}
	for _, b := range c.BySource[x.Name] {
		q, known := c.Queues[b.Queue]
		overflow, _ := q.Text("x-overflow")
		if !known || q.Delays() || q.Limited() == "" || !strings.HasPrefix(overflow, string(declare.OverflowRejectPublish)) {
			continue
		}
		c.Report(ExchangeResource(x.Name), "its binding to %s, which has %s and refuses messages when it is full, has retries multiply then: each attempt to send one is refused, and leaves a copy in its delay queue",
			destination(b), q.Limited())
		c.Path("worker", "retried", NameOf(x.Name), "refused by", destination(b), "and stored by", NameOfQueue(delays))
	}
}

// takenByHash is about partitions. Check compares those of the topology with it: see the rule
// modulus-hash-binding.
func (c *Checker) takenByHash(x Exchange) {
	toPartition := func(b declare.Binding) bool { return c.isPartition(b.Queue) }
	partitions := slices.ContainsFunc(c.BySource[x.Name], toPartition)
	generations := slices.ContainsFunc(c.BySource[x.Name], func(b declare.Binding) bool {
		return b.Exchange != "" && slices.ContainsFunc(c.BySource[b.Exchange], toPartition)
	})
	for _, b := range c.BySource[x.Name] {
		if b.Queue != "" && !toPartition(b) && (generations || partitions && c.Foreign) {
			c.Report(ExchangeResource(x.Name), "its binding to %s takes its share of the messages from a group of partitions, and moves keys to other partitions", destination(b))
			c.Path("publisher", "", NameOf(x.Name), "one of its bindings", destination(b), "instead of a partition")
		}
	}
}

// takenByDirect is about the exchanges of package fair that route noisy tenants to lanes, and all
// others to their alternate exchange.
func (c *Checker) takenByDirect(x Exchange) {
	name, i, ok := strings.Cut(x.Name, ".sort.")
	lane := name + ".bulk." + i
	if _, is := c.Queues[lane].Arguments["x-hopback-lanes"]; !ok || !is || x.Alternate == "" {
		return
	}
	for _, b := range c.BySource[x.Name] {
		if b.Queue != lane {
			c.Report(ExchangeResource(x.Name), "its binding to %s takes the messages of the tenant %.80q from the fair queue %.80q: its alternate exchange gets only what matches no binding", destination(b), b.Key, name)
			c.Path("publisher", "", NameOf(x.Name), "the binding matches", destination(b), "instead of", NameOf(x.Alternate))
		}
	}
}

func (c *Checker) isPartition(queue string) bool {
	_, ok := c.Queues[queue].Arguments["x-hopback-partitions"]
	return ok
}

func hasHeader(b declare.Binding, prefix string) bool {
	for key := range b.Headers {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}

func destination(b declare.Binding) string {
	if b.Queue != "" {
		return NameOfQueue(b.Queue)
	}
	return NameOf(b.Exchange)
}
