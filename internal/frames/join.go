package frames

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
)

// joiner puts frames into a write buffer, and makes one of those dispositions in it
// that settle neighbouring deliveries of a session with the same outcome: RabbitMQ
// then has one command to store in place of many. go-amqp writes a frame for each
// delivery, and has no way to name a range.
//
// A range holds no delivery that wasn't given to it: it grows by its neighbour only.
// It is closed by any other frame of its session, so that nothing is moved across one,
// and when the buffer leaves.
type joiner struct {
	ranges []dispositionRange
	// counts says that sizes is wanted: how many deliveries each range settles that is
	// closed. spare is the slice that isn't in use.
	counts       bool
	sizes, spare []int
	// state and entries are for work.
	state   []byte
	entries []mapEntry
}

// dispositionRange is a disposition in the buffer, written by put.
type dispositionRange struct {
	at, end     int // its frame
	channel     uint16
	first, last uint32
}

// maxRanges bounds the ranges that a disposition is compared with. Handlers that run
// at once end in any order, so several are open.
const maxRanges = 16

const (
	// Where the parts of a disposition are that put writes: its delivery-ids in the
	// long form, so that they can be changed in place.
	rangeFirst, rangeLast, rangeState = 22, 27, 32
)

// disposition frames of ours, as go-amqp writes them: role receiver, first, no last,
// settled, state, and nothing more.
type dispositionFrame struct {
	channel uint16
	id      uint32
	state   []byte
}

// readDisposition returns false for every other frame.
func readDisposition(b []byte) (d dispositionFrame, ok bool) {
	code, channel := frameKind(b)
	if code != codeDisposition || int(binary.BigEndian.Uint32(b)) != len(b) {
		return d, false
	}
	b = b[frameHead:]
	// A list with 32 bits of size and count, and role true.
	if len(b) < 13 || b[0] != 0xd0 || int(binary.BigEndian.Uint32(b[1:]))+5 != len(b) || binary.BigEndian.Uint32(b[5:]) != 5 || b[9] != 0x41 {
		return d, false
	}
	d.channel = channel
	switch b = b[10:]; {
	case b[0] == 0x43:
		b = b[1:]
	case b[0] == 0x52:
		d.id, b = uint32(b[1]), b[2:]
	case b[0] == 0x70 && len(b) >= 5:
		d.id, b = binary.BigEndian.Uint32(b[1:]), b[5:]
	default:
		return d, false
	}
	if len(b) < 3 || b[0] != 0x40 || b[1] != 0x41 {
		return d, false
	}
	d.state = b[2:]
	return d, valueSize(d.state) == len(d.state)
}

// put appends the frame to the buffer, or makes a range in it larger.
func (j *joiner) put(buffer, frame []byte) []byte {
	d, ok := readDisposition(frame)
	if !ok {
		if len(j.ranges) > 0 && len(frame) >= 8 {
			channel := binary.BigEndian.Uint16(frame[6:])
			j.ranges = slices.DeleteFunc(j.ranges, func(r dispositionRange) bool {
				if r.channel != channel {
					return false
				}
				j.close(r)
				return true
			})
		}
		return append(buffer, frame...)
	}
	j.sortState(d.state)
	for i := len(j.ranges) - 1; i >= 0; i-- {
		r := &j.ranges[i]
		before := d.id != math.MaxUint32 && d.id+1 == r.first
		after := d.id != 0 && d.id-1 == r.last
		if r.channel != d.channel || !before && !after || !bytes.Equal(buffer[r.at+rangeState:r.end], j.state) {
			continue
		}
		if before {
			r.first = d.id
			binary.BigEndian.PutUint32(buffer[r.at+rangeFirst:], d.id)
		} else {
			r.last = d.id
			binary.BigEndian.PutUint32(buffer[r.at+rangeLast:], d.id)
		}
		return buffer
	}
	if len(j.ranges) == maxRanges {
		j.close(j.ranges[0])
		j.ranges = slices.Delete(j.ranges, 0, 1)
	}
	r := dispositionRange{at: len(buffer), end: len(buffer) + rangeState + len(j.state), channel: d.channel, first: d.id, last: d.id}
	j.ranges = append(j.ranges, r)
	size := uint32(rangeState + len(j.state))
	buffer = binary.BigEndian.AppendUint32(buffer, size)
	buffer = append(buffer, frame[4:frameHead]...)
	buffer = append(buffer, 0xd0)
	buffer = binary.BigEndian.AppendUint32(buffer, size-frameHead-5)
	buffer = binary.BigEndian.AppendUint32(buffer, 5)
	buffer = append(buffer, 0x41, 0x70)
	buffer = binary.BigEndian.AppendUint32(buffer, d.id)
	buffer = append(buffer, 0x70)
	buffer = binary.BigEndian.AppendUint32(buffer, d.id)
	buffer = append(buffer, 0x41)
	return append(buffer, j.state...)
}

// flushed is called when the buffer has left: what comes goes into a new one.
func (j *joiner) flushed() {
	for _, r := range j.ranges {
		j.close(r)
	}
	j.ranges = j.ranges[:0]
}

// close notes the size of a range that grows no more.
func (j *joiner) close(r dispositionRange) {
	if j.counts {
		j.sizes = append(j.sizes, int(r.last-r.first)+1)
	}
}

// take returns the sizes of the ranges that were closed since. They are valid until the
// next call.
func (j *joiner) take() []int {
	taken := j.sizes
	j.sizes, j.spare = j.spare[:0], taken
	return taken
}

// mapEntry is where a key begins in a map, and where its value begins and ends.
type mapEntry struct{ key, value, end int }

// sortState copies an outcome into j.state, with the annotations of a modified one
// sorted: go-amqp writes a map in another order each time.
func (j *joiner) sortState(state []byte) {
	j.state = append(j.state[:0], state...)
	// 00 53 27 (modified), a list of three with 32 bits of size, the last a map with
	// 32 bits of size.
	if len(state) < 23 || state[1] != 0x53 || state[2] != 0x27 || state[3] != 0xd0 || binary.BigEndian.Uint32(state[8:]) != 3 || state[14] != 0xd1 {
		return
	}
	const from = 23 // behind the map's size and count
	j.entries = j.entries[:0]
	for at := from; at < len(state); {
		key := at
		n := valueSize(state[at:])
		if n <= 0 {
			return
		}
		at += n
		value := at
		if n = valueSize(state[at:]); n <= 0 {
			return
		}
		at += n
		j.entries = append(j.entries, mapEntry{key, value, at})
	}
	slices.SortFunc(j.entries, func(a, b mapEntry) int { return bytes.Compare(state[a.key:a.value], state[b.key:b.value]) })
	to := j.state[:from]
	for _, e := range j.entries {
		to = append(to, state[e.key:e.end]...)
	}
}
