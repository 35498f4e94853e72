package stream

import (
	"fmt"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
)

// Offset is where a consumer begins that has no saved position. The zero Offset is
// First.
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

// Last begins with the last chunk: the messages that the broker has written to its log
// at once, one or thousands.
func Last() Offset { return Offset{kind: offsetLast} }

// Next begins with what is published after the consumer has started.
func Next() Offset { return Offset{kind: offsetNext} }

// At begins with the message whose offset is n, or the oldest if that is newer. If the
// stream hasn't got that far, messages below n are left out. n may be up to 2⁶³-1.
func At(n uint64) Offset { return Offset{kind: offsetNumber, n: n} }

// Since begins with the first chunk that was written at t or later, by the broker's
// clock. RabbitMQ reads t in seconds. If there is none, it begins with what is published
// next.
func Since(t time.Time) Offset { return Offset{kind: offsetTimestamp, at: t} }

// Ago is Since for the broker's own time less d, in whole seconds. A fraction is rounded
// up.
func Ago(d time.Duration) Offset { return Offset{kind: offsetAgo, since: d} }

// String is for logs.
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
		return argument.At(at, argument.CodeOutOfRange, o.at, "isn't a time between 1970 and 9999", "use stream.First for the beginning")
	case o.kind == offsetAgo && o.since <= 0:
		return argument.At(at, argument.CodeOutOfRange, o.since, "isn't above zero", "use stream.Next for what is published from now on")
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

// OffsetOf returns the offset of a message that a stream has delivered. It is false for
// a message of another queue.
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
