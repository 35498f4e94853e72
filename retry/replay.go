package retry

import (
	"unicode/utf8"

	"github.com/hopback/hopback/client"
)

// Replay returns a copy of a dead letter that starts over: its retries count from 0,
// and Policy.GiveUpAfter counts from its next failure. Publish it to the queue that it
// died in:
//
//	client.Forward{To: address.Queue(retry.DeathOf(m).Queue), Message: retry.Replay(m)}
//
// The copy has everything that client.Copy keeps except the history of failures and
// waits. It keeps the exchange and the routing key that the message was first published
// with. m isn't changed. Replay(nil) is nil.
func Replay(m *client.Message) *client.Message {
	c := client.Copy(m)
	if c == nil {
		return nil
	}
	delete(c.ApplicationProperties, CountProperty)
	t := historyOf(m)
	for i, o := range originOf {
		if s := t.origin(i); s != nil && c.Annotations[o.own] == nil && utf8.ValidString(*s) && len(*s) <= maxOrigin {
			if c.Annotations == nil {
				c.Annotations = map[any]any{}
			}
			c.Annotations[o.own] = *s
		}
	}
	for k := range keyValues {
		if k != AnnotationExchange && k != AnnotationRoutingKey {
			delete(c.Annotations, k)
		}
	}
	delete(c.Annotations, AnnotationDeliveryTime)
	delete(c.Annotations, client.AnnotationKnownCount)
	return c
}
