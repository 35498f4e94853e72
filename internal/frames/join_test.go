package frames

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The outcomes, as go-amqp writes them.
var (
	stateBytesAccepted = []byte{0, 0x53, 0x24, 0x45}
	stateBytesReleased = []byte{0, 0x53, 0x26, 0x45}
)

// stateBytesModified has the annotations in the order given: a symbol and a string each.
func stateBytesModified(dead bool, annotations ...string) []byte {
	var m []byte
	for i, s := range annotations {
		m = append(m, [2]byte{0xa3, 0xa1}[i%2], byte(len(s)))
		m = append(m, s...)
	}
	list := []byte{0x40, 0x40, 0xd1}
	if dead {
		list[1] = 0x41
	}
	list = binary.BigEndian.AppendUint32(list, uint32(len(m)+4))
	list = binary.BigEndian.AppendUint32(list, uint32(len(annotations)))
	list = append(list, m...)
	b := []byte{0, 0x53, 0x27, 0xd0}
	b = binary.BigEndian.AppendUint32(b, uint32(len(list)+4))
	b = binary.BigEndian.AppendUint32(b, 3)
	return append(b, list...)
}

// dispositionOf is a frame as go-amqp writes it.
func dispositionOf(channel uint16, id uint32, state []byte) []byte {
	list := []byte{0x41}
	switch {
	case id == 0:
		list = append(list, 0x43)
	case id < 256:
		list = append(list, 0x52, byte(id))
	default:
		list = binary.BigEndian.AppendUint32(append(list, 0x70), id)
	}
	list = append(append(list, 0x40, 0x41), state...)
	b := append(performative(codeDisposition, channel, 0), 0xd0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(list)+4))
	b = binary.BigEndian.AppendUint32(b, 5)
	b = append(b, list...)
	binary.BigEndian.PutUint32(b, uint32(len(b)))
	return b
}

// readRanges reads a buffer as a broker does: what each delivery of each session gets,
// and the other frames.
func readRanges(t testing.TB, b []byte) (settled map[string]string, frames int, rest [][]byte) {
	settled = map[string]string{}
	for len(b) > 0 {
		if len(b) < 8 || int(binary.BigEndian.Uint32(b)) > len(b) {
			require.FailNow(t, "a frame is cut off", "%x", b)
		}
		n := int(binary.BigEndian.Uint32(b))
		f := b[:n]
		b = b[n:]
		code, channel := frameKind(f)
		if code != codeDisposition {
			rest = append(rest, f)
			continue
		}
		frames++
		l := f[frameHead:]
		// Compared without testify, which takes most of a test's time for so many.
		if l[0] != 0xd0 || len(l) != 5+int(binary.BigEndian.Uint32(l[1:])) || binary.BigEndian.Uint32(l[5:]) != 5 ||
			l[9] != 0x41 || l[10] != 0x70 || l[15] != 0x70 || l[20] != 0x41 {
			require.FailNow(t, "no disposition as go-amqp writes it, with a last delivery", "%x", f)
		}
		first, last := binary.BigEndian.Uint32(l[11:]), binary.BigEndian.Uint32(l[16:])
		require.LessOrEqual(t, first, last)
		state := string(l[21:])
		for id := uint64(first); id <= uint64(last); id++ {
			key := deliveryKey(channel, uint32(id))
			if _, twice := settled[key]; twice {
				require.FailNow(t, "settled twice", key)
			}
			settled[key] = state
		}
	}
	return settled, frames, rest
}

// deliveryKey names a delivery of a channel.
func deliveryKey(channel uint16, id uint32) string {
	return strconv.FormatUint(uint64(channel), 10) + "/" + strconv.FormatUint(uint64(id), 10)
}

func TestDispositionsOfNeighboursBecomeOne(t *testing.T) {
	t.Parallel()
	transfer := performative(0x14, 1, 40)
	for name, c := range map[string]struct {
		frames [][]byte
		want   int // dispositions written
	}{
		"one":                     {[][]byte{dispositionOf(1, 7, stateBytesAccepted)}, 1},
		"the same outcome":        {[][]byte{dispositionOf(1, 0, stateBytesAccepted), dispositionOf(1, 1, stateBytesAccepted), dispositionOf(1, 2, stateBytesAccepted)}, 1},
		"backwards":               {[][]byte{dispositionOf(1, 257, stateBytesReleased), dispositionOf(1, 256, stateBytesReleased), dispositionOf(1, 255, stateBytesReleased)}, 1},
		"other outcomes":          {[][]byte{dispositionOf(1, 1, stateBytesAccepted), dispositionOf(1, 2, stateBytesReleased), dispositionOf(1, 3, stateBytesModified(false, "x-a", "1"))}, 3},
		"a gap":                   {[][]byte{dispositionOf(1, 1, stateBytesAccepted), dispositionOf(1, 3, stateBytesAccepted)}, 2},
		"other sessions":          {[][]byte{dispositionOf(1, 1, stateBytesAccepted), dispositionOf(2, 2, stateBytesAccepted)}, 2},
		"two sessions in turn":    {[][]byte{dispositionOf(1, 1, stateBytesAccepted), dispositionOf(2, 1, stateBytesAccepted), dispositionOf(1, 2, stateBytesAccepted), dispositionOf(2, 2, stateBytesAccepted)}, 2},
		"two outcomes in turn":    {[][]byte{dispositionOf(1, 1, stateBytesAccepted), dispositionOf(1, 5, stateBytesReleased), dispositionOf(1, 2, stateBytesAccepted), dispositionOf(1, 6, stateBytesReleased)}, 2},
		"annotations reordered":   {[][]byte{dispositionOf(1, 1, stateBytesModified(true, "x-a", "1", "x-b", "2")), dispositionOf(1, 2, stateBytesModified(true, "x-b", "2", "x-a", "1"))}, 1},
		"another annotation":      {[][]byte{dispositionOf(1, 1, stateBytesModified(true, "x-a", "1")), dispositionOf(1, 2, stateBytesModified(true, "x-a", "2"))}, 2},
		"swapped values":          {[][]byte{dispositionOf(1, 1, stateBytesModified(true, "x-a", "1", "x-b", "2")), dispositionOf(1, 2, stateBytesModified(true, "x-b", "1", "x-a", "2"))}, 2},
		"another kind of death":   {[][]byte{dispositionOf(1, 1, stateBytesModified(true, "x-a", "1")), dispositionOf(1, 2, stateBytesModified(false, "x-a", "1"))}, 2},
		"a frame between":         {[][]byte{dispositionOf(1, 1, stateBytesAccepted), transfer, dispositionOf(1, 2, stateBytesAccepted)}, 2},
		"another session's":       {[][]byte{dispositionOf(2, 1, stateBytesAccepted), transfer, dispositionOf(2, 2, stateBytesAccepted)}, 1},
		"around the number's end": {[][]byte{dispositionOf(1, math.MaxUint32, stateBytesAccepted), dispositionOf(1, 0, stateBytesAccepted)}, 2},
		"up to the number's end":  {[][]byte{dispositionOf(1, math.MaxUint32-1, stateBytesAccepted), dispositionOf(1, math.MaxUint32, stateBytesAccepted)}, 1},
	} {
		var s joiner
		var b []byte
		want := map[string]string{}
		for _, f := range c.frames {
			if d, ok := readDisposition(f); ok {
				var one joiner
				one.sortState(d.state)
				want[deliveryKey(d.channel, d.id)] = string(one.state)
			}
			b = s.put(b, f)
		}
		got, frames, _ := readRanges(t, b)
		assert.Equal(t, c.want, frames, name)
		assert.Equal(t, want, got, name)
	}
}

// What isn't exactly what go-amqp writes for one delivery is passed on as it is.
func TestOtherFramesArePassedOnAsTheyAre(t *testing.T) {
	t.Parallel()
	good := dispositionOf(1, 1, stateBytesAccepted)
	changed := func(at int, to ...byte) []byte {
		b := bytes.Clone(good)
		copy(b[at:], to)
		return b
	}
	for name, f := range map[string][]byte{
		"empty": {}, "header": []byte("AMQP\x00\x01\x00\x00"), "sign of life": {0, 0, 0, 8, 2, 0, 0, 0},
		"cut off": good[:len(good)-1], "a role of sender": changed(20, 0x42), "another encoding": changed(frameHead, 0xc0), "more fields": changed(19, 6),
		"not settled": changed(24, 0x42), "a transfer": performative(0x14, 1, 100), "two frames": slices.Concat(good, good),
		"an outcome cut off": dispositionOf(1, 1, []byte{0, 0x53}), "no outcome": dispositionOf(1, 1, nil),
	} {
		var s joiner
		b := s.put(nil, dispositionOf(1, 0, stateBytesAccepted))
		n := len(b)
		b = s.put(b, f)
		assert.Equal(t, f, b[n:], name)
	}
	var s joiner
	b := s.put(nil, good)
	s.flushed()
	assert.Len(t, s.put(b[:0], dispositionOf(1, 2, stateBytesAccepted)), len(b), "a buffer that has left isn't changed")
}

// However dispositions come, each delivery gets its own outcome, once.
func TestRangesSettleWhatWasSettledAndNothingElse(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	merged := 0
	states := [][]byte{stateBytesAccepted, stateBytesAccepted, stateBytesModified(true, "x-a", "1", "x-b", "2"), stateBytesModified(true, "x-b", "2", "x-a", "1")}
	sorted := make([]string, len(states))
	for i, state := range states {
		var one joiner
		one.sortState(state)
		sorted[i] = string(one.state)
	}
	for range 300 {
		s := joiner{counts: true}
		counted, written := 0, 0
		count := func() {
			s.flushed()
			for _, n := range s.take() {
				counted += n
				written++
			}
		}
		var all []byte
		var b []byte
		want, rest := map[string]string{}, [][]byte(nil)
		next := map[uint16][]uint32{}
		for ch := range uint16(3) {
			from := r.Uint32()
			for i := range uint32(60) {
				if from+i >= from {
					next[ch] = append(next[ch], from+i)
				}
			}
			for i := range next[ch] { // handlers end a little out of order
				j := min(i+r.IntN(4), len(next[ch])-1)
				next[ch][i], next[ch][j] = next[ch][j], next[ch][i]
			}
		}
		for len(next) > 0 {
			switch r.IntN(20) {
			case 0:
				all, b = append(all, b...), b[:0]
				count()
				continue
			case 1:
				f := performative(0x14, uint16(r.IntN(3)), r.IntN(50))
				b, rest = s.put(b, f), append(rest, f)
				continue
			}
			ch := slices.Sorted(maps.Keys(next))[r.IntN(len(next))]
			ids := next[ch]
			if len(ids) == 0 {
				delete(next, ch)
				continue
			}
			next[ch] = ids[1:]
			i := r.IntN(len(states))
			want[deliveryKey(ch, ids[0])] = sorted[i]
			b = s.put(b, dispositionOf(ch, ids[0], states[i]))
		}
		got, frames, others := readRanges(t, append(all, b...))
		require.Equal(t, want, got)
		require.Equal(t, rest, others)
		count()
		require.Equal(t, []int{len(want), frames}, []int{counted, written}, "sizes are told")
		merged += len(want) - frames
	}
	assert.Positive(t, merged)
}

func BenchmarkJoiner(b *testing.B) {
	for name, state := range map[string][]byte{
		"accepted": stateBytesAccepted,
		"modified": stateBytesModified(true, "x-opt-hopback-error", "the bank timed out", "x-opt-hopback-queue", "orders", "x-opt-hopback-worker", "host-1",
			"x-opt-hopback-exchange", "shop", "x-opt-hopback-routing-key", "order.placed", "x-opt-hopback-error-type", "*errors.errorString"),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var s joiner
			var buffer []byte
			frame := dispositionOf(1, 1000, state)
			id := uint32(1000)
			for b.Loop() {
				binary.BigEndian.PutUint32(frame[22:], id-1000+256)
				if id++; id%64 == 0 {
					buffer = buffer[:0]
					s.flushed()
				}
				buffer = s.put(buffer, frame)
			}
		})
	}
}

// Frames that are no dispositions of ours leave as they are; those that are keep
// their outcome and name every delivery, and no other.
func FuzzJoiner(f *testing.F) {
	f.Add([]byte{1, 2, 3, 5, 5, 0}, stateBytesAccepted, []byte{0xa1, 1, 'a'})
	f.Add([]byte{255, 0, 1}, stateBytesModified(true, "x-a", "1", "x-b", "2"), performative(codeBegin, 0, 20))
	f.Fuzz(func(t *testing.T, ids, state, other []byte) {
		n := valueSize(other)
		require.LessOrEqual(t, n, len(other))
		require.GreaterOrEqual(t, n, 0)
		var s joiner
		var buffer []byte
		want := map[uint32]int{}
		for _, id := range ids {
			frame := dispositionOf(uint16(id%2), uint32(id), state)
			if _, ok := readDisposition(frame); !ok {
				require.Equal(t, string(buffer)+string(frame), string(s.put(buffer, frame)))
				return
			}
			buffer = s.put(buffer, frame)
			want[uint32(id)]++
		}
		got := map[uint32]int{}
		for b := buffer; len(b) > 0; {
			size := binary.BigEndian.Uint32(b)
			require.LessOrEqual(t, int(size), len(b))
			first, last := binary.BigEndian.Uint32(b[rangeFirst:]), binary.BigEndian.Uint32(b[rangeLast:])
			require.LessOrEqual(t, first, last)
			for id := first; id <= last; id++ {
				got[id]++
			}
			b = b[size:]
		}
		require.Equal(t, want, got)
		before := bytes.Clone(buffer)
		if _, ok := readDisposition(other); !ok {
			require.Equal(t, string(before)+string(other), string(s.put(buffer, other)))
		}
	})
}
