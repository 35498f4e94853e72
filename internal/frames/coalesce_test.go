package frames

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// gated is a connection whose writes wait for a permit each, and are recorded.
type gated struct {
	net.Conn
	permits chan error
	mu      sync.Mutex
	writes  [][]byte
	closed  chan struct{}
	once    sync.Once
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func newGated() *gated { return &gated{permits: make(chan error), closed: make(chan struct{})} }

func (g *gated) Write(b []byte) (int, error) {
	select {
	case err := <-g.permits:
		if err != nil {
			return 0, err
		}
	case <-g.closed:
		return 0, net.ErrClosed
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writes = append(g.writes, bytes.Clone(b))
	return len(b), nil
}

func (g *gated) SetWriteDeadline(time.Time) error { return nil }
func (g *gated) Close() error                     { g.once.Do(func() { close(g.closed) }); return nil }

func TestWritesGatherWhileOneIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated()
		w := coalesce(g)
		for _, s := range []string{"a", "b", "c", "d"} {
			n, err := w.Write([]byte(s))
			require.NoError(t, err)
			assert.Equal(t, 1, n)
			synctest.Wait() // the first is under way from here on
		}
		g.permits <- nil
		g.permits <- nil
		synctest.Wait()
		assert.Equal(t, [][]byte{[]byte("a"), []byte("bcd")}, g.writes)
		require.NoError(t, w.Close())
	})
}

func TestFullBufferMakesWritersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated()
		w := coalesce(g)
		_, err := w.Write(make([]byte, 10)) // taken by the flusher
		require.NoError(t, err)
		synctest.Wait()
		_, err = w.Write(make([]byte, coalesceLimit))
		require.NoError(t, err)
		wrote := make(chan struct{})
		go func() {
			_, _ = w.Write([]byte("x"))
			close(wrote)
		}()
		synctest.Wait()
		assert.False(t, isClosed(wrote), "the buffer is bounded")
		g.permits <- nil
		<-wrote
		g.permits <- nil
		g.permits <- nil
		require.NoError(t, w.Close())
	})
}

func TestErrorOfAWriteClosesTheConnectionAndReachesTheNextWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated()
		w := coalesce(g)
		_, err := w.Write([]byte("a"))
		require.NoError(t, err)
		broken := errors.New("broken")
		g.permits <- broken
		synctest.Wait()
		assert.True(t, isClosed(g.closed), "a reader must learn of it")
		_, err = w.Write([]byte("b"))
		require.ErrorIs(t, err, broken)
		require.ErrorIs(t, w.SetWriteDeadline(time.Time{}), broken)
		require.NoError(t, w.Close())
	})
}

func TestCloseLetsTheLastBytesLeaveButNotForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated()
		w := coalesce(g)
		_, err := w.Write([]byte("close frame"))
		require.NoError(t, err)
		go func() { g.permits <- nil }()
		require.NoError(t, w.Close())
		assert.Equal(t, [][]byte{[]byte("close frame")}, g.writes)
		_, err = w.Write([]byte("late"))
		require.ErrorIs(t, err, net.ErrClosed)

		g = newGated()
		w = coalesce(g)
		_, err = w.Write([]byte("never leaves"))
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, w.Close())
		assert.Equal(t, lastFlush, time.Since(began))
	})
}

func TestDeadlineThatIsPastRefusesTheWrite(t *testing.T) {
	g := newGated()
	w := coalesce(g)
	require.NoError(t, w.SetWriteDeadline(time.Now().Add(-time.Second)))
	_, err := w.Write([]byte("x"))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, w.Close())
}

func TestManyWritersBytesArriveWholeAndInOrder(t *testing.T) {
	a, b := net.Pipe()
	w := coalesce(a)
	const writers, each = 8, 500
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for n := range each {
				_, _ = w.Write([]byte{byte(i), byte(n >> 8), byte(n)})
			}
		})
	}
	go func() { wg.Wait(); _ = w.Close() }()
	all, err := io.ReadAll(b)
	require.NoError(t, err)
	require.Len(t, all, writers*each*3)
	next := make([]int, writers)
	for i := 0; i < len(all); i += 3 {
		n := int(all[i+1])<<8 | int(all[i+2])
		assert.Equal(t, next[all[i]], n)
		next[all[i]]++
	}
}

// sinkhole is a connection that takes all writes at once.
type sinkhole struct{ net.Conn }

func (sinkhole) Write(b []byte) (int, error)      { return len(b), nil }
func (sinkhole) SetWriteDeadline(time.Time) error { return nil }
func (sinkhole) Close() error                     { return nil }

// BenchmarkCoalescer writes frames of 300 bytes to a connection that takes no time.
func BenchmarkCoalescer(b *testing.B) {
	w := coalesce(sinkhole{})
	defer func() { _ = w.Close() }()
	frame := performative(0x14, 1, 289)
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.Write(frame); err != nil {
			b.Fatal(err)
		}
	}
}
