package message

import (
	"fmt"

	"github.com/Azure/go-amqp"
)

// unmarshal decodes b with go-amqp's decoder. It survives any b.
func unmarshal(m *amqp.Message, b []byte) (err error) {
	if err := decodable(b); err != nil {
		return fmt.Errorf("the message can't be decoded: %w", err)
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the message can't be decoded: go-amqp panics: %v", r)
		}
	}()
	if err := m.UnmarshalBinary(b); err != nil {
		return fmt.Errorf("the message can't be decoded: %w", err)
	}
	return nil
}
