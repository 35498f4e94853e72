package wire

import (
	"sync/atomic"

	"github.com/hopback/hopback/internal/frames"
)

// Direction is a direction of a connection.
type Direction uint8

// The directions.
const (
	DirectionFromClient Direction = iota
	DirectionToClient
)

// faults is what a test does to a connection.
type faults struct {
	of [2]direction
}

// direction is what is done to one direction of a connection. Frames are counted from the
// open frame on, without signs of life.
type direction struct {
	frames atomic.Int64
	// at is the number of the frame that the connection is cut before (its negative) or
	// after; 0 if it isn't.
	at    atomic.Int64
	quiet atomic.Bool
}

// Frames is how many frames have gone in a direction: open and all behind it, without
// signs of life.
func (c *Conn) Frames(d Direction) int { return int(c.faults.of[d].frames.Load()) }

// CutBefore cuts the connection in place of the n-th frame from now on, which isn't
// carried out or sent.
func (c *Conn) CutBefore(d Direction, n int) {
	f := &c.faults.of[d]
	f.at.Store(-(f.frames.Load() + int64(max(n, 1))))
}

// CutAfter cuts the connection behind the n-th frame from now on. One of the client's is
// carried out, and its answer isn't sent.
func (c *Conn) CutAfter(d Direction, n int) {
	f := &c.faults.of[d]
	f.at.Store(f.frames.Load() + int64(max(n, 1)))
}

// Silence makes everything vanish that is sent in a direction from now on. Neither end
// learns of it. It lasts as long as the connection.
func (c *Conn) Silence(d Direction) {
	c.faults.of[d].quiet.Store(true)
	c.poke()
}

func (f *faults) silent(d Direction) bool { return f.of[d].quiet.Load() }

// before counts a frame, and says whether the connection is to be cut in its place.
func (f *faults) before(d Direction) bool {
	n := f.of[d].frames.Add(1)
	return f.of[d].at.Load() == -n
}

// after says whether the connection is to be cut behind the frame that was counted last.
func (f *faults) after(d Direction) bool {
	at := f.of[d].at.Load()
	return at > 0 && at == f.of[d].frames.Load()
}

// outgoing counts the frames in b, and returns as much of it as is to be sent, and
// whether the connection is to be cut behind that.
func (f *faults) outgoing(b []byte) (send []byte, cut bool) {
	for at := 0; at < len(b); {
		size := int(uint32(b[at])<<24 | uint32(b[at+1])<<16 | uint32(b[at+2])<<8 | uint32(b[at+3]))
		if size > frames.HeaderSize {
			if f.before(DirectionToClient) {
				return f.heard(b[:at]), true
			}
			if f.after(DirectionToClient) {
				return f.heard(b[:at+size]), true
			}
		}
		at += size
	}
	return f.heard(b), false
}

// heard is b, or nothing if nothing reaches the client.
func (f *faults) heard(b []byte) []byte {
	if f.silent(DirectionToClient) {
		return nil
	}
	return b
}
