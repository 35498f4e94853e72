package message

import (
	"testing"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
)

// published is a message as client.NewMessage makes it, with application properties.
func published() *amqp.Message {
	return &amqp.Message{
		Header:                &amqp.MessageHeader{Durable: true, Priority: 4},
		Properties:            &amqp.MessageProperties{MessageID: "F4QQYXMJA5QCOAREGSKIVPITA5", ContentType: ptr("application/json"), CreationTime: ptr(times())},
		ApplicationProperties: map[string]any{"type": "order.placed", "tenant": int64(1234), "again": true},
		Data:                  [][]byte{make([]byte, 256)},
	}
}

// delivered are what RabbitMQ delivers for messages like that, and one that it has
// dead-lettered.
func delivered(t testing.TB) map[string][]byte {
	all := deliveries(t)
	return map[string][]byte{"bare": all[len(all)-4], "full": all[len(all)-3], "dead": all[len(all)-1]}
}

func TestAllocationsOfAppend(t *testing.T) {
	b := make([]byte, 0, 1000)
	m := published()
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := Append(b, m); err != nil {
			panic(err)
		}
	}))
	assert.LessOrEqual(t, testing.AllocsPerRun(100, func() {
		if _, err := Append(nil, m); err != nil {
			panic(err)
		}
	}), 1.0)
}

func TestAllocationsOfDecode(t *testing.T) {
	// The message, two for a map, the text of properties, the message-id's box, and the data.
	// With application properties: a map, their text, and two boxes. After a death: the
	// array, a map with a list and two times, in boxes, and larger annotations.
	for name, most := range map[string]float64{"bare": 6, "full": 11, "dead": 23} {
		b := delivered(t)[name]
		n := testing.AllocsPerRun(100, func() {
			var x Decoded
			if err := x.Decode(b); err != nil {
				panic(err)
			}
			kept = &x
		})
		assert.LessOrEqual(t, n, most, name)
	}
}

// What is here can't be on a stack.
var (
	kept       *Decoded
	keptTheirs *amqp.Message
)

func BenchmarkAppend(b *testing.B) {
	m := published()
	b.Run("here", func(b *testing.B) {
		b.ReportAllocs()
		buffer := make([]byte, 0, 1000)
		for b.Loop() {
			if _, err := Append(buffer, m); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("go-amqp", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := m.MarshalBinary(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	for _, name := range []string{"bare", "full", "dead"} {
		m := delivered(b)[name]
		b.Run(name+"/here", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				x := new(Decoded)
				if err := x.Decode(m); err != nil {
					b.Fatal(err)
				}
				kept = x
			}
		})
		b.Run(name+"/go-amqp", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				x := new(amqp.Message)
				if err := x.UnmarshalBinary(m); err != nil {
					b.Fatal(err)
				}
				keptTheirs = x
			}
		})
		b.Run(name+"/left to go-amqp", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				x := new(amqp.Message)
				if err := unmarshal(x, m); err != nil {
					b.Fatal(err)
				}
				keptTheirs = x
			}
		})
	}
}
