package stream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/frames"
)

// resolve finds the offset at which the consumer starts, and saves it before anything is
// delivered: then the next start doesn't skip what is published while no consumer runs. RabbitMQ
// reports no offset before it delivers a message, so resolve reads the last chunk, which also
// works on an idle stream.
//
// A saved position must not be beyond the end of the stream: RabbitMQ would wait for the stream
// to get that far, and skip everything published until then (TestStreamPositionBehindTheEnd). Nor
// must it be the position in another stream of that name (TestAPositionBelongsToOneStream).
func (k *consumer) resolve(ctx context.Context, patient *impatience, raw *dedicated.Conn) error {
	if k.at.kind == offsetFirst || k.at.kind == offsetNumber && (!k.saved || k.at.n == 0) {
		return nil
	}
	begin, end, err := k.tail(patient, raw)
	if err != nil {
		return err
	}
	if k.at.kind == offsetNumber {
		if end < k.at.n {
			return k.beyond(patient, end)
		}
		k.beyondSince = time.Time{}
		if replaced, err := k.replaced(patient, raw); err != nil || !replaced {
			return err
		}
		return &PositionError{Stream: k.stream, Consumer: k.cfg.Consumer, Position: k.at.n, End: end, Replaced: true}
	}
	at := end
	switch k.at.kind {
	case offsetLast:
		at = begin
	case offsetTimestamp, offsetAgo:
		from := k.at
		if from.kind == offsetAgo { // before Consume was called
			from.since += time.Since(k.began)
		}
		// What is published after reading the end is later than from, or comes next.
		patient.answered()
		n, found, err := k.firstOf(patient, raw, from)
		if err != nil {
			return err
		}
		if found {
			at = n
		}
	}
	if err := k.remember(ctx, at); err != nil {
		return err
	}
	patient.answered()
	return nil
}

// lagLimit is how long a position may be beyond the end of a stream's replicas before it is taken for wrong.
const lagLimit = 2 * time.Minute

// beyond returns why a consumer can't start beyond the end. On a cluster that may pass: after its leader's node has died,
// a replica doesn't deliver yet what the leader has delivered (TestAReplicaThatLagsStopsNoConsumer). So other nodes
// are tried, and this one again, for lagLimit.
func (k *consumer) beyond(ctx context.Context, end uint64) error {
	if k.beyondSince.IsZero() {
		k.beyondSince = time.Now()
	}
	info, err := declare.Inspect(ctx, k.conn.Management(), k.stream)
	if err == nil && len(info.Replicas) <= 1 || time.Since(k.beyondSince) >= lagLimit {
		return &PositionError{Stream: k.stream, Consumer: k.cfg.Consumer, Position: k.at.n, End: end}
	}
	return fmt.Errorf("on this node the stream ends before offset %d, and the consumer is at %d; the node's replica may be behind the others", end, k.at.n)
}

// remember saves the offset at which the consumer starts.
func (k *consumer) remember(ctx context.Context, at uint64) error {
	if k.cfg.Offsets != nil {
		limited, cancel := context.WithTimeout(ctx, saveTimeout)
		defer cancel()
		if err := k.cfg.Offsets.Save(limited, k.cfg.Consumer, k.stream, at); err != nil {
			if ctx.Err() != nil {
				return errDrained
			}
			return &SaveError{Stream: k.stream, Consumer: k.cfg.Consumer, Err: err}
		}
		k.saved = true
	}
	k.at = At(at)
	return nil
}

// firstOf returns the offset of the first message from an Offset on, if there is one.
func (k *consumer) firstOf(ctx context.Context, raw *dedicated.Conn, from Offset) (n uint64, found bool, err error) {
	r, err := raw.ReceiverOf(ctx, k.source, Filter{}.set(from))
	if err != nil {
		return 0, false, err
	}
	_, _, err = r.Fetch(ctx, 1, func(d dedicated.Delivery) error {
		if n, found = offsetOfEncoded(d.Payload); !found {
			return errNoOffset
		}
		return nil
	})
	if err != nil {
		return 0, false, err
	}
	return n, found, r.Close(ctx)
}

const (
	// gapLimit limits the search for a gap's cause. A busy broker opens few connections.
	gapLimit = 30 * time.Second
	// gapPause is the pause after a gap that retention caused before the next one is examined,
	// and gapOther the pause after one with another cause.
	gapPause = time.Second
	gapOther = time.Minute
)

// gaps searches for the causes of gaps, one at a time, in parallel with the deliveries.
type gaps struct {
	peeking atomic.Bool
	stop    context.CancelFunc // of the last search; nil: there was none
	ended   chan struct{}
	next    time.Time // no gap is examined before it; owned by the running search
}

// gap logs that retention has removed the messages before offset. RabbitMQ silently continues
// with the oldest message, also under a live consumer (TestStreamRetentionUnderALiveConsumer).
// But a gap alone proves nothing: the records in which RabbitMQ tracks offsets and publishers of
// its stream protocol have offsets, too. So the stream's oldest offset decides. It is logged,
// because retention continues until it is read.
func (k *consumer) gap(ctx context.Context, offset uint64) {
	if k.gaps.peeking.Load() || time.Now().Before(k.gaps.next) {
		return
	}
	ctx, k.gaps.stop = context.WithTimeout(ctx, gapLimit)
	k.gaps.ended = make(chan struct{})
	k.gaps.peeking.Store(true)
	go func(from uint64, behind int, stop context.CancelFunc, ended chan<- struct{}) {
		defer close(ended)
		defer stop()
		defer k.gaps.peeking.Store(false)
		k.gaps.next = time.Now().Add(k.explain(ctx, from, offset-1, behind))
	}(k.at.n, k.behind, k.gaps.stop, k.gaps.ended)
}

// end stops a search.
func (g *gaps) end() {
	if g.stop == nil {
		return
	}
	g.stop()
	limit := time.NewTimer(closeTimeout)
	defer limit.Stop()
	select {
	case <-g.ended:
	case <-limit.C: // it is in a Config.Dial that ignores its ctx
	}
}

// explain logs the cause of a gap, and returns how long to wait before the next is examined.
func (k *consumer) explain(ctx context.Context, from, to uint64, behind int) time.Duration {
	var oldest uint64
	var found bool
	var err error
	for try := range backoff.Tries(ctx, k.owner.Pause) {
		if oldest, found, err = k.oldest(ctx, behind+try.Attempt()-1); err == nil {
			break
		}
	}
	attrs := []any{"consumer", k.cfg.Consumer, "from", from, "to", to}
	switch {
	case err != nil:
		k.log.Warn("hopback: a stream consumer found missing offsets, and can't determine whether retention removed their messages", append(attrs, "error", err)...)
	case !found || oldest <= from:
		return gapOther
	default:
		k.log.Warn("hopback: retention removed messages of the stream before the consumer handled them; keep messages longer, or make the consumer faster", append(attrs, "oldest", oldest)...)
	}
	return gapPause
}

// oldest returns the offset of the oldest message. A raw connection has one receiver, so
// this opens another.
func (k *consumer) oldest(ctx context.Context, behind int) (n uint64, found bool, err error) {
	raw, err := dedicated.OpenFor(ctx, k.owner, "stream", behind)
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = raw.Close(ctx) }()
	return k.firstOf(ctx, raw, Offset{})
}

const (
	// tailStep is how many messages of the last chunk are asked for at once.
	tailStep = 200
	// maxTail limits the scan of a stream that grows faster than it is read.
	maxTail = 20_000
)

// tail returns the first offset of the last chunk, and the one after the last message. Both are 0
// if the stream is empty.
func (k *consumer) tail(patient *impatience, raw *dedicated.Conn) (begin, end uint64, err error) {
	filter := Filter{}.set(Last())
	r, err := raw.ReceiverOf(patient, k.source, filter)
	if err != nil {
		return 0, 0, err
	}
	empty := true
	for seen := uint32(0); seen < maxTail; {
		got, _, err := r.Fetch(patient, tailStep, func(d dedicated.Delivery) error {
			patient.answered()
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
		patient.answered()
		seen += got
		if got < tailStep || k.saved && end >= k.at.n {
			break
		}
	}
	return begin, end, r.Close(patient)
}

var errNoOffset = errors.New("the broker sent a message from a stream without an offset")

func offsetOfEncoded(payload []byte) (uint64, bool) {
	m, err := frames.DecodeMessage(frames.Head(payload))
	if err != nil {
		return 0, false
	}
	v, _ := m.Annotations.Get(annotationOffset)
	return asOffset(v)
}
