package frames

import (
	"net"
	"os"
	"runtime"
	"sync"
	"time"
)

// coalescer is a net.Conn whose writes gather in a buffer while an earlier write is
// under way, and go out as one: a group commit without a timer, so that nothing
// waits that could have gone. go-amqp writes every frame by itself, and a frame of
// ours is mostly far smaller than what a write costs.
//
// Write returns when its bytes are in the buffer. An error of the connection comes
// back from a later Write, and closes the connection, so that whoever reads from it
// learns of it at once.
type coalescer struct {
	net.Conn

	mu       sync.Mutex
	pending  []byte
	spare    []byte // the buffer that isn't pending
	deadline time.Time
	err      error
	closing  bool
	joiner   joiner
	settled  func(n int) // nil: nobody is told
	frames   int         // written since the last flush
	busy     bool        // the last flush took several
	hasty    int         // so many flushes aren't to wait for more
	// work wakes the flusher, room those who wait for the buffer to empty.
	work, room *sync.Cond
	done       chan struct{} // the flusher has ended
}

const (
	// coalesceLimit bounds the buffer: a writer that finds it full waits. There are two
	// buffers, which live as long as the connection. Larger ones save no CPU, and make
	// the garbage collector of a small process run more often.
	coalesceLimit = 64 << 10
	// coalesceKeep bounds a buffer that is used again: a frame may be larger than
	// coalesceLimit.
	coalesceKeep = 512 << 10
	// coalesceEnough is so much that a larger write saves nothing.
	coalesceEnough = coalesceLimit / 4
	// lastFlush bounds what Close waits for the last bytes to leave.
	lastFlush = time.Second
)

func coalesce(c net.Conn) *coalescer {
	w := &coalescer{Conn: c, done: make(chan struct{})}
	w.work, w.room = sync.NewCond(&w.mu), sync.NewCond(&w.mu)
	go w.flush()
	return w
}

func (w *coalescer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// The flusher's own write has the deadline, and its end wakes those who wait.
	for len(w.pending) >= coalesceLimit && w.err == nil && !w.closing {
		w.room.Wait()
	}
	switch {
	case w.err != nil:
		return 0, w.err
	case w.closing:
		return 0, net.ErrClosed
	case !w.deadline.IsZero() && !time.Now().Before(w.deadline):
		return 0, os.ErrDeadlineExceeded
	}
	w.pending = w.joiner.put(w.pending, b)
	w.frames++
	w.work.Signal()
	return len(b), nil
}

func (w *coalescer) flush() {
	defer close(w.done)
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for len(w.pending) == 0 && !w.closing && w.err == nil {
			w.work.Wait()
		}
		if len(w.pending) == 0 || w.err != nil {
			return
		}
		w.gather()
		out, deadline := w.pending, w.deadline
		w.pending, w.spare = w.spare[:0], nil
		w.joiner.flushed()
		sizes := w.joiner.take()
		w.mu.Unlock()
		for _, n := range sizes {
			w.settled(n)
		}
		err := w.Conn.SetWriteDeadline(deadline)
		if err == nil {
			_, err = w.Conn.Write(out)
		}
		w.mu.Lock()
		if cap(out) <= coalesceKeep {
			w.spare = out // one huge message mustn't keep its buffer for ever
		}
		if err != nil {
			w.err = err
			_ = w.Conn.Close()
		}
		w.room.Broadcast()
	}
}

// gather lets those run that are about to write, while what they write keeps coming:
// fewer and larger writes cost both ends less. It is no wait: where nothing else is to
// run it returns at once. It isn't done where frames come one at a time, and not for a
// while after it took long, since the CPUs are busy with other work then.
func (w *coalescer) gather() {
	if w.hasty > 0 {
		w.hasty--
	} else if w.busy && len(w.pending) < coalesceEnough {
		began := time.Now()
		for range 4 {
			n := w.frames
			w.mu.Unlock()
			runtime.Gosched()
			w.mu.Lock()
			if time.Since(began) > gatherTime {
				w.hasty = 1000
				break
			}
			if n == w.frames || len(w.pending) >= coalesceEnough || w.closing {
				break
			}
		}
	}
	w.busy, w.frames = w.frames > 1, 0
}

// gatherTime is what letting others run should take.
const gatherTime = time.Millisecond

// SetWriteDeadline holds for the writes that follow.
func (w *coalescer) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
	return w.err
}

// Close lets what is in the buffer leave, within lastFlush, and closes the
// connection.
func (w *coalescer) Close() error {
	w.mu.Lock()
	w.closing = true
	w.work.Signal()
	w.room.Broadcast()
	w.mu.Unlock()
	t := time.AfterFunc(lastFlush, func() { _ = w.Conn.Close() })
	<-w.done
	t.Stop()
	return w.Conn.Close()
}
