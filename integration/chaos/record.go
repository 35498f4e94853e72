package chaos

import (
	"encoding/binary"
	"hash/crc32"
	"io"
)

// what is what a handler has done, in a record.
type what uint8

const (
	whatFailed  what = 1 // an error that is retried, or the last of an exhausted message
	whatHandled what = 2 // nil
	whatDied    what = 3 // an error or panic that dead-letters
	whatForeign what = 4 // a message that nobody has sent, or that has changed
)

// record is one attempt.
type record struct {
	id      uint32
	at      uint32 // milliseconds since the run began
	lane    uint8
	attempt uint8
	what    what
	count   uint8 // the broker's delivery count
}

// recordSize divides the size of a page.
const recordSize = 16

func (r record) encode() [recordSize]byte {
	var b [recordSize]byte
	binary.LittleEndian.PutUint32(b[0:], r.id)
	binary.LittleEndian.PutUint32(b[4:], r.at)
	b[8], b[9], b[10], b[11] = r.lane, r.attempt, byte(r.what), r.count
	binary.LittleEndian.PutUint32(b[12:], crc32.ChecksumIEEE(b[:12]))
	return b
}

func decodeRecord(b []byte) (r record, ok bool) {
	if len(b) < recordSize || binary.LittleEndian.Uint32(b[12:]) != crc32.ChecksumIEEE(b[:12]) {
		return record{}, false
	}
	return record{
		id: binary.LittleEndian.Uint32(b[0:]), at: binary.LittleEndian.Uint32(b[4:]),
		lane: b[8], attempt: b[9], what: what(b[10]), count: b[11],
	}, true
}

// tail reads the records that have been added to a file since the last call.
type tail struct {
	r    io.ReaderAt
	at   int64
	torn int // whole records with a wrong checksum
	buf  [recordSize << 10]byte
}

func (t *tail) read(each func(record)) error {
	for {
		n, err := t.r.ReadAt(t.buf[:], t.at)
		n -= n % recordSize
		for i := 0; i < n; i += recordSize {
			if r, ok := decodeRecord(t.buf[i:]); ok {
				each(r)
			} else {
				t.torn++
			}
		}
		t.at += int64(n)
		if err == io.EOF || err == nil && n == 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
