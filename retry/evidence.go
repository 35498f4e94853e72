package retry

import (
	"slices"
	"strings"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
)

// Evidence is for package desk: see inside.NamesOf.
func (d *decorator) Evidence() inside.Names {
	n, _ := d.policy.Names.withDefaults(nil) // invalid names stay unchanged
	return internalNames{n}
}

// internalNames are Names without empty fields.
type internalNames struct{ names Names }

// deaths returns the dead-letterings that the broker has recorded. A publisher can write every
// other annotation, but not this one: see annotation.Deaths.
func deaths(m *client.Message) []annotation.DeadLettering {
	return annotation.DeadLetterings(nil, m.Annotations)
}

// Failed reports whether anything but the message's own annotations shows that it failed in
// queue: the broker's history, or the queue that it is in now. The copies of StrategyRepublish
// and of Central have no history from before the copy. What is left:
//
//	StrategyNative, StrategyDeadLetter   the dead-lettering in the work queue
//	StrategyRepublish                    the same, since the last attempt ends with one
//	the parking queue                    the one in a delay queue, whose routing key names
//	                                     the work queue
//	Central, imported messages           nothing; but the dead-letter queue that they are
//	                                     in is the work queue's
func (i internalNames) Failed(m *client.Message, in, queue string) bool {
	n := &i.names
	return in == queue+n.DeadSuffix || slices.ContainsFunc(deaths(m), func(d annotation.DeadLettering) bool {
		return d.Queue == queue || n.waitsFor(d) == queue && queue != ""
	})
}

// waitsFor returns the work queue of a message that left a delay queue of StrategyRepublish with
// this dead-lettering, or "".
func (n *Names) waitsFor(d annotation.DeadLettering) string {
	switch {
	case d.Reason != "expired":
	case d.Exchange == n.RetryExchange && strings.HasPrefix(d.Queue, n.DelayPrefix):
		if rest, ok := strings.CutPrefix(d.RoutingKey, "delay."); ok {
			_, queue, _ := strings.Cut(rest, ".")
			return queue
		}
	case strings.HasPrefix(d.Exchange, n.LadderPrefix) && strings.HasPrefix(d.Queue, n.LadderPrefix):
		key := d.RoutingKey
		for strings.HasPrefix(key, "0.") || strings.HasPrefix(key, "1.") {
			key = key[2:]
		}
		return key
	}
	return ""
}

// retried reports whether this is a dead-lettering in a delay queue of this package. A message
// has such a record only after a retry, which has overwritten what its sender wrote about
// failures.
func (n *Names) retried(d annotation.DeadLettering) bool {
	return n.waitsFor(d) != "" || d.Reason == "expired" && strings.HasPrefix(d.Queue, n.HoldPrefix) && (d.Exchange == n.DeadLetterExchange || d.Exchange == n.GivenUpExchange)
}

// brings reports whether retried or replayed messages return through exchange.
func (n *Names) brings(exchange string) bool {
	switch exchange {
	case n.RequeueExchange, n.ReturnExchange, n.ReplayExchange:
		return true
	}
	return strings.HasPrefix(exchange, n.LadderPrefix)
}

// Published reports whether the broker's history shows that the message came to queue through
// exchange and key.
func (i internalNames) Published(m *client.Message, queue, exchange, key string) inside.Answer {
	for _, d := range deaths(m) {
		switch {
		case d.Queue != queue:
		case d.Exchange == exchange && d.RoutingKey == key:
			return inside.AnswerYes
		case i.names.brings(d.Exchange), d.Exchange == "" && d.RoutingKey == queue:
			return inside.AnswerUnknown // it came back from a delay or by a replay
		default:
			return inside.AnswerNo
		}
	}
	return inside.AnswerUnknown
}
