package vnet

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var addresses = Config{Client: "127.0.0.1:40000", Server: "127.0.0.1:5672"}

func TestBytesArriveInOrderAndBehindThemEOF(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe(addresses)
		assert.Equal(t, "127.0.0.1:5672", a.RemoteAddr().String())
		assert.Equal(t, "tcp", b.LocalAddr().Network())
		sent := bytes.Repeat([]byte("0123456789"), 100_000) // four windows
		go func() {
			for part := sent; len(part) > 0; {
				n := min(len(part), 70_001)
				_, err := a.Write(part[:n])
				assert.NoError(t, err)
				part = part[n:]
			}
			assert.NoError(t, a.Close())
		}()
		got, err := io.ReadAll(b)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(sent, got))
		n, err := b.Read(make([]byte, 1))
		assert.Zero(t, n)
		assert.Equal(t, io.EOF, err)
		_, err = b.Write([]byte("late"))
		require.ErrorIs(t, err, syscall.EPIPE)
		_, err = a.Write(nil)
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = a.Read(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)
	})
}

func TestWriterWaitsForRoomAndDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe(addresses)
		began := time.Now()
		require.NoError(t, a.SetWriteDeadline(began.Add(time.Minute)))
		n, err := a.Write(make([]byte, window+1))
		assert.Equal(t, window, n)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		var netErr net.Error
		require.ErrorAs(t, err, &netErr)
		assert.True(t, netErr.Timeout())
		assert.Equal(t, time.Minute, time.Since(began))
		require.NoError(t, a.SetWriteDeadline(time.Time{}))
		go func() {
			time.Sleep(time.Second)
			_, _ = b.Read(make([]byte, 10))
		}()
		n, err = a.Write([]byte("x"))
		assert.Equal(t, 1, n)
		require.NoError(t, err)
		assert.Equal(t, time.Minute+time.Second, time.Since(began))
	})
}

func TestReadDeadlineHoldsForAReadThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe(addresses)
		began := time.Now()
		require.NoError(t, b.SetDeadline(began.Add(time.Hour)))
		go func() {
			time.Sleep(time.Second)
			assert.NoError(t, b.SetReadDeadline(began.Add(time.Minute)))
		}()
		_, err := b.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		assert.Equal(t, time.Minute, time.Since(began))
		_, err = b.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "it is past")
		require.NoError(t, b.SetReadDeadline(time.Time{}))
		_, _ = a.Write([]byte("x"))
		n, err := b.Read(make([]byte, 1))
		assert.Equal(t, 1, n)
		require.NoError(t, err)
		require.NoError(t, b.SetDeadline(time.Time{}))
	})
}

func TestResetDropsWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe(addresses)
		_, _ = a.Write([]byte("x"))
		waiting := make(chan error)
		go func() {
			_, err := a.Read(make([]byte, 1))
			waiting <- err
		}()
		synctest.Wait()
		b.Reset()
		require.ErrorIs(t, <-waiting, syscall.ECONNRESET)
		_, err := b.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		_, err = a.Write([]byte("x"))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		_, err = a.Read(make([]byte, 1))
		require.True(t, errors.Is(err, syscall.ECONNRESET))
	})
}

func TestLatencyKeepsTheOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		delay := 2 * time.Second
		cfg := addresses
		cfg.Latency = func() time.Duration { return delay }
		a, b := Pipe(cfg)
		began := time.Now()
		_, _ = a.Write([]byte("slow"))
		delay = time.Second
		_, _ = a.Write([]byte("fast"))
		delay = 5 * time.Second
		_ = a.Close()
		buffer := make([]byte, 8)
		n, err := b.Read(buffer)
		require.NoError(t, err)
		assert.Equal(t, "slowfast", string(buffer[:n]))
		assert.Equal(t, 2*time.Second, time.Since(began))
		_, err = b.Read(buffer)
		assert.Equal(t, io.EOF, err)
		assert.Equal(t, 5*time.Second, time.Since(began))
	})
}
