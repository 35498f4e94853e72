package annotation

import "github.com/Azure/go-amqp"

// Unreported is how many deliveries of a message have failed without a consumer that reported it.
func Unreported(m *amqp.Message) uint32 {
	if m.Header == nil {
		return 0
	}
	n := m.Header.DeliveryCount
	known, _ := m.Annotations[KnownCount].(int64)
	if known < 0 || known > int64(n) {
		known = 0 // not written by us
	}
	return n - uint32(known)
}
