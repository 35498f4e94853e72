package retry

import (
	"unicode/utf8"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// Copy returns a copy without the history of failures and waits.
func (internalNames) Copy(m *client.Message) *client.Message {
	c := client.Copy(m)
	if c == nil {
		return nil
	}
	delete(c.ApplicationProperties, CountProperty)
	delete(c.Annotations, CountProperty)
	t := historyOf(m)
	for i, o := range originOf {
		if s := t.origin(i); s != nil && utf8.ValidString(*s) && len(*s) <= maxOrigin {
			if c.Annotations == nil {
				c.Annotations = map[any]any{}
			}
			c.Annotations[o.own] = *s
		}
	}
	for k := range keyValues {
		if k != annotation.Exchange && k != annotation.RoutingKey {
			delete(c.Annotations, k)
		}
	}
	delete(c.Annotations, annotation.DeliveryTime)
	delete(c.Annotations, client.AnnotationKnownCount)
	return c
}
