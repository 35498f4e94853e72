// Package deathlog reads what RabbitMQ writes into the annotations of a message that died:
// the history of its deaths, x-opt-deaths, and texts about them.
//
// A consumer can ask for these annotations in a form that costs less to decode: they are
// folded into one. Delivery.Message and Delivery.Annotation of package client don't show
// that.
package deathlog

import "github.com/hopback/hopback/internal/frames"

// Key is the annotation that the broker writes the history in.
const Key = "x-opt-deaths"

// FoldedKey is the annotation that others are in after Fold. Each process has its own.
var FoldedKey = frames.FoldedDeaths

// Death is an entry of the history.
type Death = frames.Death

// Fold makes a consumer's deliveries carry what the broker has written in the form that
// costs least to decode. start is the client.Start of that consumer. Package client sets it.
var Fold = func(start any) {}

// Peek returns the *client.Message of a *client.Delivery as it came, and so perhaps folded.
// Package client sets it.
var Peek = func(delivery any) (message any) { return nil }

// Of appends the history in a message's annotations to all, the last death first. It appends
// nothing if the broker has written none. Publishers can't: RabbitMQ takes an x-opt-deaths
// of this form from nobody, and FoldedKey is a secret.
func Of(all []Death, annotations map[any]any) []Death {
	if folded, ok := annotations[FoldedKey].(string); ok {
		all = frames.Deaths(all, folded)
	}
	// It isn't folded if it is very long.
	list, _ := annotations[Key].([]map[any]any)
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

// Text returns an annotation that is a text, folded or not. It returns false if there is none.
func Text(annotations map[any]any, key string) (string, bool) {
	if s, ok := annotations[key].(string); ok || !frames.Folds(key) {
		return s, ok
	}
	folded, _ := annotations[FoldedKey].(string)
	return frames.FoldedText(folded, key)
}
