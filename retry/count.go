package retry

import (
	"context"
	"math"
	"reflect"
	"strconv"
	"strings"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/inside"
)

// CountProperty is the application property that counts a message's retries. Workers in other
// languages may write it too, as a number or as a string.
const CountProperty = "x-retry-count"

// Count returns how often m was retried, in whichever queue. Use it outside a handler; in a handler,
// use [Attempt].
//
// The result is the largest of these counters, since workers with different strategies may share
// a queue:
//
//   - CountProperty, which StrategyRepublish and other systems write.
//   - The annotation "x-opt-hopback-retries", which the other strategies write.
//   - An annotation named like CountProperty: RabbitMQ converts the header of an AMQP 0-9-1
//     worker to one.
//
// A negative value, or one that isn't a number, counts as 0. A count that the message brought from
// another queue doesn't count, once it was retried in this one.
func Count(m *client.Message) int {
	if m == nil {
		return 0
	}
	own, others := counters(m)
	if others > 0 {
		others = max(others-baseOf(m), 0)
	}
	return max(own, others)
}

// counters returns the count that only this package writes, and the larger one of those that other
// systems write, too.
func counters(m *client.Message) (own, others int) {
	n, _ := parseCount(m.ApplicationProperties[CountProperty])
	header, _ := parseCount(m.Annotations[CountProperty])
	own, _ = parseCount(m.Annotations[annotation.Retries])
	return own, max(n, header)
}

// baseOf is how much of the others' count m had brought from another queue. A strategy that makes no
// copy can't reset it.
func baseOf(m *client.Message) int {
	compact, _ := m.Annotations[annotation.History].(string)
	if !strings.Contains(compact, `"base":`) {
		return 0
	}
	return int(min(max(readCompact(compact).Base, 0), math.MaxInt32))
}

// Attempt returns the number of the current attempt in the handler's queue. Call it in a handler, with
// the handler's ctx. The first attempt is 1, also for a message that was retried in another queue and
// then forwarded to this one. With any other ctx it returns 0.
func Attempt(ctx context.Context) int {
	d, ok := client.DeliveryFrom(ctx)
	if !ok {
		return 0
	}
	if again := inside.AgainFrom(ctx); again != nil { // the message hasn't left this worker since
		return again.Retries + 1
	}
	return pastOf(messageOf(d), d.Queue()).read().count + 1
}

// parseCount reads a counter that anybody could have written. text reports whether it is a
// string. A number that is too large to count stays large, so that the message is dead-lettered:
// starting again at 0 would retry it forever.
func parseCount(v any) (n int, text bool) {
	const huge = math.MaxInt32
	f, ok := number(v)
	if !ok {
		digits, isText := v.(string)
		if !isText {
			return 0, false
		}
		digits = strings.TrimSpace(digits)
		if len(digits) > 64 {
			return 0, true
		}
		parsed, err := strconv.ParseFloat(digits, 64)
		if err != nil && !math.IsInf(parsed, 1) {
			return 0, true
		}
		f, text = parsed, true
	}
	switch {
	case math.IsNaN(f) || f < 1:
		return 0, text
	case f > huge:
		return huge, text
	}
	return int(f), text
}

// number returns the value of a number of any type.
func number(v any) (f float64, ok bool) {
	switch n := reflect.ValueOf(v); {
	case n.CanInt():
		return float64(n.Int()), true
	case n.CanUint():
		return float64(n.Uint()), true
	case n.CanFloat():
		return n.Float(), true
	}
	return 0, false
}

// counterToProperty makes an application property of a counter that is an annotation: that
// is what RabbitMQ makes of a header of AMQP 0-9-1 that begins with "x-". With both, a worker
// over AMQP 0-9-1 would read the old one.
func counterToProperty(m *client.Message, counter string) {
	v, has := m.Annotations[counter]
	if !has {
		return
	}
	delete(m.Annotations, counter)
	n, _ := parseCount(v)
	if old, _ := parseCount(m.ApplicationProperties[counter]); n < old {
		return
	}
	if m.ApplicationProperties == nil {
		m.ApplicationProperties = map[string]any{}
	}
	m.ApplicationProperties[counter] = v
}

// setCount writes a counter in the type it had: as a string if a worker that writes strings
// shares the queue, else as a number (an AMQP long).
func setCount(m *client.Message, property string, n int) {
	_, text := parseCount(m.ApplicationProperties[property])
	if m.ApplicationProperties == nil {
		m.ApplicationProperties = map[string]any{}
	}
	if text {
		m.ApplicationProperties[property] = strconv.Itoa(n)
	} else {
		m.ApplicationProperties[property] = int64(n)
	}
}
