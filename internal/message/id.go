package message

import (
	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/failure"
)

// ID is m's message-id for a log line; nil if it has none.
func ID(m *amqp.Message) any {
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
