package annotation

import "time"

// Deaths is the annotation that RabbitMQ writes the history of a dead-lettered message in.
const Deaths = "x-opt-deaths"

// DeadLettering is an entry of the history. A text that the broker hasn't written is empty.
type DeadLettering struct {
	Queue, Reason, Exchange, RoutingKey string
	Count                               uint64
	First, Last                         time.Time
}

// DeadLetterings appends the history in a message's annotations to all, the last death first. It appends
// nothing if the broker has written none. Publishers can't: RabbitMQ takes an x-opt-deaths
// of this form from nobody.
func DeadLetterings(all []DeadLettering, annotations map[any]any) []DeadLettering {
	list, _ := annotations[Deaths].([]map[any]any)
	for _, e := range list {
		text := func(key string) string {
			s, _ := e[key].(string)
			return s
		}
		d := DeadLettering{Queue: text("queue"), Reason: text("reason"), Exchange: text("exchange")}
		d.Count, _ = e["count"].(uint64)
		d.First, _ = e["first-time"].(time.Time)
		d.Last, _ = e["last-time"].(time.Time)
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

// Text returns an annotation that is a text. It returns false if there is none.
func Text(annotations map[any]any, key string) (string, bool) {
	s, ok := annotations[key].(string)
	return s, ok
}
