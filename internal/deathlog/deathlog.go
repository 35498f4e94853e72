// Package deathlog reads the history of a message's deaths, which RabbitMQ writes into the
// annotation x-opt-deaths.
package deathlog

import "github.com/hopback/hopback/internal/frames"

// Key is the annotation that the broker writes.
const Key = "x-opt-deaths"

// FoldedKey is the annotation that takes its place after Fold. Each process has its own.
var FoldedKey = frames.FoldedDeaths

// Death is an entry of the history.
type Death = frames.Death

// Fold makes a consumer's deliveries carry the history in the form that costs least to
// decode. start is the client.Start of that consumer. Package client sets it.
var Fold = func(start any) {}

// Of returns the history in a message's annotations, the last death first. It is empty if
// the broker has written none. Publishers can't: RabbitMQ takes an x-opt-deaths of this
// form from nobody, and FoldedKey is a secret.
func Of(annotations map[any]any) []Death {
	if folded, ok := annotations[FoldedKey].([]byte); ok {
		return frames.Deaths(folded)
	}
	list, _ := annotations[Key].([]map[any]any)
	all := make([]Death, 0, len(list))
	for _, e := range list {
		text := func(key string) string {
			s, _ := e[key].(string)
			return s
		}
		d := Death{Queue: text("queue"), Reason: text("reason"), Exchange: text("exchange")}
		switch keys := e["routing-keys"].(type) {
		case []string:
			if len(keys) > 0 {
				d.RoutingKey = keys[0]
			}
		case []any:
			if len(keys) > 0 {
				d.RoutingKey, _ = keys[0].(string)
			}
		}
		all = append(all, d)
	}
	return all
}
