package retry

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
)

// world is a broker in memory: as much of one as retry topologies use. Exchanges
// route as RabbitMQ's do, with alternates; queues with a TTL let their messages
// expire; the dead are handed on at least once, so that what finds no queue stays
// where it is.
type world struct {
	t         testing.TB
	exchanges map[string]declare.Exchange
	queues    map[string]declare.QuorumQueue
	bindings  []declare.Binding
	contents  map[string][]*held
}

// held is a message in a world.
type held struct {
	home   string // the work queue that it belongs to
	msg    *client.Message
	key    string
	waited time.Duration // in queues with a TTL
	path   []string      // queues that it was in
	stuck  int           // dead-letterings that found no queue
}

func newWorld(t testing.TB, topologies ...declare.Topology) *world {
	w := &world{t: t, exchanges: map[string]declare.Exchange{}, queues: map[string]declare.QuorumQueue{}, contents: map[string][]*held{}}
	for _, topology := range topologies {
		for _, x := range topology.Exchanges {
			w.exchanges[x.Name] = x
		}
		for _, q := range topology.Queues {
			w.queues[q.Address().QueueName()] = q.(declare.QuorumQueue)
		}
		w.bindings = append(w.bindings, topology.Bindings...)
	}
	return w
}

// publish routes m and says whether a queue has taken it.
func (w *world) publish(exchange, key string, m *held) bool {
	m.key = key
	to := w.route(exchange, m, map[string]bool{})
	for _, q := range to {
		each := m
		if len(to) > 1 { // as many copies as queues
			each = &held{home: m.home, msg: m.msg, key: key, waited: m.waited, path: slices.Clone(m.path)}
		}
		each.path = append(each.path, q)
		w.contents[q] = append(w.contents[q], each)
	}
	return len(to) > 0
}

// route returns the queues that an exchange brings m to, each once.
func (w *world) route(exchange string, m *held, visited map[string]bool) []string {
	if exchange == "" {
		if _, ok := w.queues[m.key]; ok {
			return []string{m.key}
		}
		return nil
	}
	x, ok := w.exchanges[exchange]
	if !ok || visited[exchange] {
		return nil
	}
	visited[exchange] = true
	var to []string
	matched := false
	for _, b := range w.bindings {
		if b.Source != exchange || !matches(x.Type, b, m) {
			continue
		}
		if _, ok := w.queues[b.Queue]; ok {
			matched, to = true, append(to, b.Queue)
		} else if _, ok := w.exchanges[b.Exchange]; ok {
			matched, to = true, append(to, w.route(b.Exchange, m, visited)...)
		}
	}
	if !matched && x.AlternateExchange != "" {
		to = w.route(x.AlternateExchange, m, visited)
	}
	slices.Sort(to)
	return slices.Compact(to)
}

func matches(kind declare.ExchangeType, b declare.Binding, m *held) bool {
	switch kind {
	case declare.ExchangeFanout:
		return true
	case declare.ExchangeDirect, "":
		return b.Key == m.key
	case declare.ExchangeTopic:
		return topicMatches(strings.Split(b.Key, "."), strings.Split(m.key, "."))
	case declare.ExchangeHeaders: // all-with-x, the only one in use
		for k, v := range b.Headers {
			// Annotations go before application properties of the same name: see
			// TestForgedMarksOfASender in the integration tests.
			have := m.msg.Annotations[k]
			if have == nil {
				have = m.msg.ApplicationProperties[k]
			}
			if fmt.Sprint(have) != fmt.Sprint(v) {
				return false
			}
		}
		return true
	}
	panic("unknown exchange type " + kind)
}

func topicMatches(pattern, words []string) bool {
	switch {
	case len(pattern) == 0:
		return len(words) == 0
	case pattern[0] == "#":
		return topicMatches(pattern[1:], words) || len(words) > 0 && topicMatches(pattern, words[1:])
	case len(words) == 0:
		return false
	}
	return (pattern[0] == "*" || pattern[0] == words[0]) && topicMatches(pattern[1:], words[1:])
}

// die dead-letters m out of a queue, in which it stays if nothing takes it.
func (w *world) die(queue string, m *held, reason string) {
	q := w.queues[queue]
	if q.DeadLetter.IsDrop() {
		w.t.Fatalf("a message was dropped by %q", queue)
	}
	if m.msg != nil {
		if m.msg.Annotations == nil {
			m.msg.Annotations = map[any]any{}
		}
		m.msg.Annotations["x-last-death-reason"], m.msg.Annotations["x-last-death-queue"] = reason, queue
	}
	key := q.DeadLetter.RoutingKey
	if key == "" {
		key = m.key
	}
	if !w.publish(q.DeadLetter.Exchange, key, m) {
		if m.stuck++; m.stuck == 1 {
			m.path = append(m.path, queue+" (stuck)")
		}
		w.contents[queue] = append(w.contents[queue], m)
	}
}

// settle lets everything expire that can, and the time of what a queue holds by
// itself come; the latter needs a bubble of testing/synctest.
func (w *world) settle() {
	for _, ms := range w.contents {
		for _, m := range ms {
			if m.msg != nil {
				time.Sleep(time.Until(millis(m.msg.Annotations[annotation.DeliveryTime])))
			}
		}
	}
	for range 100 {
		moved := false
		for name, q := range w.queues {
			if q.MessageTTL == 0 {
				continue
			}
			for _, m := range w.take(name) {
				moved = moved || m.stuck == 0
				m.waited += q.MessageTTL
				w.die(name, m, "expired")
			}
		}
		if !moved {
			return
		}
	}
	w.t.Fatal("messages circle")
}

// take empties a queue.
func (w *world) take(queue string) []*held {
	ms := w.contents[queue]
	delete(w.contents, queue)
	return ms
}

// where maps all queues that hold something to how much it is.
func (w *world) where() map[string]int {
	counts := map[string]int{}
	for q, ms := range w.contents {
		if len(ms) > 0 {
			counts[q] = len(ms)
		}
	}
	return counts
}

func (w *world) empty() {
	w.t.Helper()
	require.Empty(w.t, w.where())
}

// carryOut does with a delivery of queue what the client does with an outcome. It
// says false for a forward that nobody took, after which the client gives the
// original back.
func (w *world) carryOut(queue string, m *held, err error) bool {
	switch o := client.OutcomeOf(err).(type) {
	case nil:
	case client.Forward:
		m.msg = o.Message
		return w.publish(o.To.ExchangeName(), o.To.RoutingKey(), m)
	case client.DeadLetter:
		annotate(m, o.Annotations)
		if o.Reason != "" {
			annotate(m, map[string]any{client.AnnotationReason: string(o.Reason)})
		}
		w.die(queue, m, "rejected")
	case client.Modify:
		annotate(m, o.Annotations)
		if o.DeadLetter {
			w.die(queue, m, "rejected")
			return true
		}
		w.contents[queue] = append(w.contents[queue], m)
	case client.Requeue:
		w.contents[queue] = append(w.contents[queue], m)
	}
	return true
}

func annotate(m *held, annotations map[string]any) {
	if m.msg.Annotations == nil {
		m.msg.Annotations = map[any]any{}
	}
	for k, v := range annotations {
		m.msg.Annotations[k] = v
	}
}
