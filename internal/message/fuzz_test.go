package message

import (
	"testing"

	"github.com/Azure/go-amqp"
)

func seeds(f *testing.F) {
	for _, b := range deliveries(f) {
		f.Add(b)
	}
	for _, m := range messages() {
		if b, err := marshal(m); err == nil && len(b) < 10_000 {
			f.Add(b)
		}
	}
	for _, r := range refused() {
		if len(r.b) < 10_000 {
			f.Add(r.b)
		}
	}
	for _, b := range unusual() {
		f.Add(b)
	}
}

// Any bytes decode to the same as with go-amqp.
func FuzzDecode(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) { decode(t, b) })
}

// Each message that can be decoded is written as go-amqp writes it.
func FuzzAppend(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		m := decode(t, b)
		if m == nil {
			return
		}
		encode(t, m)
		// What doesn't come off the wire: symbols, and keys of type int.
		more := amqp.Annotations{5: m.Data}
		for k, v := range m.Annotations {
			if s, ok := k.(string); ok {
				more["s"+s], more[amqp.Symbol("t"+s)] = amqp.Symbol(s), v
			}
		}
		m.Annotations = more
		encode(t, m)
	})
}
