package client

import (
	"crypto/rand"
	"maps"
	"slices"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/userid"
)

// Message is an AMQP 1.0 message with all its sections. Its body is one of Data (binary
// sections), Value (one amqp-value), or Sequence (amqp-sequences). It is the type of
// github.com/Azure/go-amqp.
type Message = amqp.Message

// Header and Properties are a Message's sections of these names.
type (
	Header     = amqp.MessageHeader
	Properties = amqp.MessageProperties
)

// NewMessage returns a durable message with body as its only data section, the default priority
// (4), and a random message-id. Publish it with a Publisher[*Message].
func NewMessage(body []byte) *Message {
	m := emptyMessage()
	m.Data = [][]byte{body}
	complete(m)
	return m
}

// emptyMessage returns what complete would set up, in one allocation.
func emptyMessage() *Message {
	whole := &struct {
		Message
		Header
		Properties
	}{Header: Header{Durable: true, Priority: defaultPriority}}
	m := &whole.Message
	m.Header, m.Properties = &whole.Header, &whole.Properties
	return m
}

// complete fills in what hopback sets in every message. It always sends a Header: without one,
// RabbitMQ 4.3 delivers durable=false, and the zero Header has priority 0, which ranks below
// messages without a priority.
func complete(m *Message) {
	if m.Header == nil {
		m.Header = &Header{Durable: true, Priority: defaultPriority}
	}
	if p := properties(m); p.MessageID == nil {
		p.MessageID = rand.Text()
	}
}

// defaultPriority is AMQP's (core specification, part 3, section 3.2.1).
const defaultPriority = 4

func properties(m *Message) *Properties {
	if m.Properties == nil {
		m.Properties = &Properties{}
	}
	return m.Properties
}

// annotationCC has a message's further routing keys.
const annotationCC = "x-cc"

// brokerAnnotations are those that the broker writes itself. Copies omit them: RabbitMQ sets
// them again, and x-opt-deaths has a type (an array of maps) that it doesn't accept from
// clients.
var brokerAnnotations = map[string]bool{
	"x-exchange":             true,
	"x-routing-key":          true,
	annotation.Deaths:        true,
	"x-first-death-exchange": true,
	"x-first-death-queue":    true,
	"x-first-death-reason":   true,
	"x-last-death-exchange":  true,
	"x-last-death-queue":     true,
	"x-last-death-reason":    true,

	annotation.Parked: true,

	"x-acquired-count":             true,
	"x-delivery-count":             true, // 4.0's
	"x-opt-rabbitmq-received-time": true,
	"x-opt-delivery-time":          true,
	"x-opt-deferral-token":         true,

	annotationCC: true, // the sender's, but about where that one publish went
}

// Copy returns a copy of m that you can send. Use it for the Message of a [Forward], or to
// publish a received message again. Copy(nil) is nil.
//
// The copy keeps what the sender set: properties, application properties, the sender's
// annotations, the body of any kind, footer, and priority. It has its own maps, but shares the
// body, so don't change the body. It is durable, even if m isn't.
//
// The copy omits what belongs to one delivery:
//
//   - the delivery tag, delivery annotations, delivery count, first-acquirer, and the
//     annotations that RabbitMQ writes;
//   - the ttl, because RabbitMQ would apply it in a delay queue: a message with a ttl of 200 ms
//     would leave a queue that delays by a second after 200 ms;
//   - further routing keys (CC), because the copy would reach other queues again.
//
// Limits:
//
//   - Headers of AMQP 0-9-1 clients that hold a table or an array, and don't begin with "x-",
//     aren't delivered over AMQP 1.0 at all. Byte arrays come out as strings when the copy is
//     read over 0-9-1.
//   - AMQP symbols become strings, because go-amqp decodes them so.
//   - Arrays of integers in annotations become lists, because RabbitMQ accepts no arrays there.
func Copy(m *Message) *Message {
	if m == nil {
		return nil
	}
	c := emptyMessage()
	c.Format = m.Format
	c.ApplicationProperties = maps.Clone(m.ApplicationProperties)
	c.Data, c.Value, c.Sequence = m.Data, m.Value, m.Sequence
	c.Footer = maps.Clone(m.Footer)
	if m.Header != nil {
		c.Header.Priority = m.Header.Priority
	}
	if m.Properties != nil {
		*c.Properties = *m.Properties
	} else {
		c.Properties = nil
	}
	for k, v := range m.Annotations {
		if s, ok := k.(string); ok && brokerAnnotations[s] {
			continue
		}
		if c.Annotations == nil {
			c.Annotations = make(amqp.Annotations, len(m.Annotations))
		}
		c.Annotations[k] = sendable(v)
	}
	if len(c.Data) == 0 && c.Value == nil && len(c.Sequence) == 0 {
		// A received amqp-value of null decodes to a nil Value, which would be
		// sent with no body section at all: the broker ends the link for that.
		c.Value = amqp.Null{}
	}
	return c
}

// sendable turns arrays of integers into lists. RabbitMQ delivers such arrays, but can't read
// them the way go-amqp encodes them.
func sendable(v any) any {
	if !hasIntegerArray(v) {
		return v
	}
	switch v := v.(type) {
	case []int32:
		return listOf(v)
	case []int64:
		return listOf(v)
	case []uint32:
		return listOf(v)
	case []uint64:
		return listOf(v)
	case []any:
		l := make([]any, len(v))
		for i, e := range v {
			l[i] = sendable(e)
		}
		return l
	case map[string]any:
		m := make(map[string]any, len(v))
		for k, e := range v {
			m[k] = sendable(e)
		}
		return m
	case map[any]any:
		m := make(map[any]any, len(v))
		for k, e := range v {
			m[k] = sendable(e)
		}
		return m
	}
	return v
}

func listOf[T any](a []T) []any {
	l := make([]any, len(a))
	for i, e := range a {
		l[i] = e
	}
	return l
}

// hasIntegerArray searches a value that checkValue has accepted.
func hasIntegerArray(v any) bool {
	switch v := v.(type) {
	case []int32, []int64, []uint32, []uint64:
		return true
	case []any:
		return slices.ContainsFunc(v, hasIntegerArray)
	case map[string]any:
		for _, e := range v {
			if hasIntegerArray(e) {
				return true
			}
		}
	case map[any]any:
		for _, e := range v {
			if hasIntegerArray(e) {
				return true
			}
		}
	}
	return false
}

// AnnotationUserID holds, in a copy, the user-id of the original message: a string, or binary if
// the user-id isn't valid UTF-8. RabbitMQ accepts only the user-id of the publishing user. So a
// copy that another user publishes can't keep the original user-id, unless that user is an
// impersonator (see [Config.Impersonator]). A copy that the same user publishes keeps it.
const AnnotationUserID = userid.Annotation

// UserID returns the user who published m, or the message that m is a copy of. It returns "" if
// the message doesn't carry a user-id.
//
// checked reports whether the broker has verified it. The broker verifies the property user-id,
// but not an annotation: anyone who may publish to the queue can set [AnnotationUserID]. Don't
// base authorization on it.
func UserID(m *Message) (user string, checked bool) {
	if id := userid.Of(m); id != nil {
		return string(id), true
	}
	switch id := m.Annotations[AnnotationUserID].(type) {
	case string:
		return id, false
	case []byte:
		return string(id), false
	}
	return "", false
}
