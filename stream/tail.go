package stream

import (
	"context"
	"errors"

	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/rawlink"
)

// resolve replaces a place that moves by an offset, so that what is published while the
// connection is lost isn't left out. And it makes sure that a saved position isn't behind
// the end of the stream: RabbitMQ would wait for the stream to get that far, and leave out
// what comes until then (TestStreamPositionBehindTheEnd).
func (k *consumer) resolve(ctx context.Context, raw *rawlink.Conn) error {
	switch {
	case k.at.kind == last || k.at.kind == next:
	case k.saved && k.at.n > 0:
	default:
		return nil
	}
	begin, end, err := k.tail(ctx, raw)
	if err != nil {
		return err
	}
	switch {
	case k.at.kind == last:
		k.at = At(begin)
	case k.at.kind == next:
		k.at = At(end)
	case end < k.at.n:
		return &PositionError{Stream: k.stream, Consumer: k.cfg.Consumer, Position: k.at.n, End: end}
	}
	return nil
}

const (
	// tailStep is how many messages of the last chunk are asked for at once.
	tailStep = 200
	// maxTail ends the walk through a stream that grows faster than it is read.
	maxTail = 20_000
)

// tail returns the first offset of the last chunk, and the one behind the last message.
// Both are 0 if the stream is empty.
func (k *consumer) tail(ctx context.Context, raw *rawlink.Conn) (begin, end uint64, err error) {
	filter := Filter{}.set(Last())
	r, err := raw.ReceiverOf(ctx, k.source, filter)
	if err != nil {
		return 0, 0, err
	}
	empty := true
	for seen := uint32(0); seen < maxTail; {
		got, _, err := r.Fetch(ctx, tailStep, func(d rawlink.Delivery) error {
			n, ok := offsetOfEncoded(d.Payload)
			if !ok {
				return errNoOffset
			}
			if empty {
				begin, empty = n, false
			}
			end = n + 1
			return nil
		})
		if err != nil {
			return 0, 0, err
		}
		seen += got
		if got < tailStep || k.saved && end >= k.at.n {
			break
		}
	}
	return begin, end, r.Close(ctx)
}

var errNoOffset = errors.New("the broker sent a message of a stream without an offset")

func offsetOfEncoded(payload []byte) (uint64, bool) {
	m, err := frames.DecodeMessage(payload)
	if err != nil {
		return 0, false
	}
	v, _ := m.Annotations.Get(annotationOffset)
	return asOffset(v)
}
