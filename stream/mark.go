package stream

import (
	"context"
	"fmt"
	"hash/crc32"

	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/frames"
)

// A position belongs to one stream, not to a name: a stream that was deleted and declared again
// begins with offset 0, and may have grown past the position. RabbitMQ shows nothing over AMQP by which
// two streams of one name differ, except their messages. So a mark of the last handled message is kept
// next to the position, and compared when the consumer attaches. A mark has its own offset, so it stays
// true if only the position is saved.

// mark is the offset and the checksum of a message. The zero mark is of none.
type mark struct {
	offset, sum uint64
	known       bool
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// markOf returns the mark of an encoded message. The broker changes the annotations of a message, and
// never what its publisher wrote.
func markOf(offset uint64, payload []byte) mark {
	bare := frames.Bare(payload)
	return mark{offset, uint64(crc32.Checksum(bare, castagnoli))<<32 | uint64(crc32.ChecksumIEEE(bare)), true}
}

func (m mark) String() string {
	if !m.known {
		return ""
	}
	return fmt.Sprintf("%d:%016x", m.offset, m.sum)
}

// readMark returns the mark that String wrote, or none.
func readMark(s string) (m mark) {
	if n, err := fmt.Sscanf(s, "%d:%x", &m.offset, &m.sum); err != nil || n != 2 || m.offset > maxOffset {
		return mark{}
	}
	m.known = true
	return m
}

// replaced reports whether the stream has another message than the consumer's mark at its offset. It
// is false if the message is gone, as retention removes the oldest ones.
func (k *consumer) replaced(patient *impatience, raw *dedicated.Conn) (bool, error) {
	if !k.mark.known {
		return false, nil
	}
	r, err := raw.ReceiverOf(patient, k.source, Filter{}.set(At(k.mark.offset)))
	if err != nil {
		return false, err
	}
	other, passed := false, false
	for seen := uint32(0); seen < maxTail && !passed; {
		got, _, err := r.Fetch(patient, tailStep, func(d dedicated.Delivery) error {
			patient.answered()
			n, ok := offsetOfEncoded(d.Payload)
			if !ok {
				return errNoOffset
			}
			if n == k.mark.offset {
				other = markOf(n, d.Payload) != k.mark
			}
			passed = passed || n >= k.mark.offset
			return nil
		})
		if err != nil {
			return false, err
		}
		patient.answered()
		if seen += got; got < tailStep {
			break
		}
	}
	return other, r.Close(patient)
}

// load reads the position, and a mark if the store keeps one.
func (c Config) load(ctx context.Context, stream string) (next uint64, m mark, found bool, err error) {
	next, found, err = c.Offsets.Load(ctx, c.Consumer, stream)
	if marks, ok := c.Offsets.(MarkStore); ok && found && err == nil {
		var text string
		text, err = marks.LoadMark(ctx, c.Consumer, stream)
		m = readMark(text)
	}
	return next, m, found, err
}
