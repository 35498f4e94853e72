package stream

import (
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
)

// Offset is where a consumer without a saved position starts. See [Config.From]. The zero Offset
// is the oldest message.
type Offset struct {
	kind  offsetKind
	n     uint64
	at    time.Time
	since time.Duration
}

type offsetKind int8

const (
	offsetFirst offsetKind = iota
	offsetLast
	offsetNext
	offsetNumber
	offsetTimestamp
	offsetAgo
)

// Last starts with the last chunk: the messages that the broker last wrote to its log at once,
// one or thousands.
func Last() Offset { return Offset{kind: offsetLast} }

// Next starts with the first message that is published after the consumer has started.
func Next() Offset { return Offset{kind: offsetNext} }

// At starts with the message with offset n, or with the oldest one if that is newer. If the
// stream is shorter, messages below n are skipped. n may be up to 2⁶³-1.
func At(n uint64) Offset { return Offset{kind: offsetNumber, n: n} }

// Since starts with the first chunk that was written at t or later, by the broker's clock.
// RabbitMQ reads t in seconds. If there is no such chunk, it starts with the next published
// message.
func Since(t time.Time) Offset { return Offset{kind: offsetTimestamp, at: t} }

// Ago is [Since] for the broker's current time minus d, in whole seconds, rounded up.
func Ago(d time.Duration) Offset { return Offset{kind: offsetAgo, since: d} }

// String returns a text for logs.
func (o Offset) String() string {
	switch o.kind {
	case offsetLast:
		return "last"
	case offsetNext:
		return "next"
	case offsetNumber:
		return fmt.Sprint(o.n)
	case offsetTimestamp:
		return o.at.UTC().Format(time.RFC3339)
	case offsetAgo:
		return o.age() + " ago"
	default:
		return "first"
	}
}

func (o Offset) age() string {
	s := o.since / time.Second
	if o.since%time.Second > 0 {
		s++
	}
	return fmt.Sprintf("%ds", s)
}

// maxOffset is the largest that RabbitMQ reads.
const maxOffset = 1<<63 - 1

func (o Offset) validate(at argument.Path) error {
	switch {
	case o.kind == offsetNumber && o.n > maxOffset:
		return argument.At(at, argument.CodeOutOfRange, o.n, "is above the largest offset", fmt.Sprintf("use at most %d", uint64(maxOffset)))
	case o.kind == offsetTimestamp && (o.at.Unix() < 0 || o.at.Year() > 9999):
		return argument.At(at, argument.CodeOutOfRange, o.at, "isn't a time between 1970 and 9999", "leave From out to start with the oldest message")
	case o.kind == offsetAgo && o.since <= 0:
		return argument.At(at, argument.CodeOutOfRange, o.since, "isn't above zero", "use stream.Next to start with new messages")
	}
	return nil
}

// value is what the filter rabbitmq:stream-offset-spec has.
func (o Offset) value() any {
	switch o.kind {
	case offsetLast:
		return "last"
	case offsetNext:
		return "next"
	case offsetNumber:
		return int64(o.n)
	case offsetTimestamp:
		return frames.Timestamp(o.at.UnixMilli())
	case offsetAgo:
		return o.age()
	default:
		return "first"
	}
}

// annotationOffset is RabbitMQ's.
const annotationOffset = "x-stream-offset"

// OffsetOf returns the offset of a message from a stream. ok is false for a message from another
// queue.
func OffsetOf(d *client.Delivery) (uint64, bool) {
	if d == nil || d.Message() == nil {
		return 0, false
	}
	return offsetIn(d.Message())
}

func offsetIn(m *client.Message) (uint64, bool) {
	return asOffset(m.Annotations[annotationOffset])
}

func asOffset(v any) (uint64, bool) {
	switch v := v.(type) {
	case int64:
		return uint64(v), v >= 0
	case uint64:
		return v, v < maxOffset
	case int32:
		return uint64(v), v >= 0
	case uint32:
		return uint64(v), true
	}
	return 0, false
}
