package publish

import (
	"strings"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
)

// MessageID is m's message-id for a log line; nil if it has none.
func MessageID(m *amqp.Message) any {
	if m.Properties == nil {
		return nil
	}
	switch id := m.Properties.MessageID.(type) {
	case string:
		return failure.Clip(id, 255)
	case amqp.UUID:
		return id.String()
	default:
		return id
	}
}

// CheckAnnotationKey refuses keys of annotations that RabbitMQ ignores or changes.
func CheckAnnotationKey(name, k string) error {
	if !strings.HasPrefix(k, "x-") || !utf8.ValidString(k) || len(k) > 255 {
		return argument.New(name+" key", k, `doesn't begin with "x-", is over 255 bytes, or is not valid UTF-8`, `use a key such as "x-opt-tenant"`)
	}
	return nil
}
