package suite

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/stream"
)

// StreamOf declares a stream, and publishes n numbers from 0 on to it.
func StreamOf(t *testing.T, conn *client.Conn, name string, n int, edit ...func(int, *client.Message)) {
	t.Helper()
	Apply(t, conn, declare.Topology{Queues: []declare.Queue{declare.Stream{Name: name, MaxLengthBytes: 1 << 30, MaxAge: time.Hour}}})
	FillStream(t, conn, name, 0, n, edit...)
}

// FillStream publishes the numbers from first to end-1.
func FillStream(t *testing.T, conn *client.Conn, name string, first, end int, edit ...func(int, *client.Message)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience*time.Duration(1+(end-first)/1000))
	defer cancel()
	p := Publisher[int](t, conn, address.Queue(name))
	var all []int
	for i := first; i < end; i++ {
		all = append(all, i)
	}
	require.NoError(t, p.PublishAll(ctx, all, edit...))
	require.NoError(t, p.Close(ctx))
}

// Reading is a consumer of numbers.
type Reading struct {
	t    *testing.T
	got  chan int
	Stop func() error
	Log  *Logbook

	ended <-chan struct{} // closed when the consumer has returned
}

// Attached waits until it has attached.
func (r *Reading) Attached() {
	r.t.Helper()
	Poll(r.t, "it is attached", func() bool { return len(r.Log.With("a stream consumer is attached")) > 0 })
}

func HandleStream(t *testing.T, conn *client.Conn, name string, cfg stream.Config, got chan int, h client.Handler) *Reading {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done, ended := make(chan error, 1), make(chan struct{})
	r := &Reading{t: t, got: got, Log: NewLogbook(t), ended: ended}
	cfg.Logger = slog.New(r.Log)
	go func() {
		done <- stream.Consume(ctx, conn, name, h, cfg)
		close(ended)
	}()
	r.Stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(2 * Patience):
			return errors.New("the stream's consumer doesn't end")
		}
	})
	t.Cleanup(func() { _ = r.Stop() })
	return r
}

// Until returns what comes up to and with the number last.
func (r *Reading) Until(last int) (all []int) {
	r.t.Helper()
	patience := time.NewTimer(Patience)
	defer patience.Stop()
	for {
		select {
		case n := <-r.got:
			all = append(all, n)
			if n == last {
				return all
			}
			patience.Reset(Patience)
			continue
		case <-r.ended:
			require.FailNow(r.t, "the consumer has ended", "up to %d, behind %v: %v", last, all[max(0, len(all)-3):], r.Stop())
		case <-patience.C:
			require.FailNow(r.t, "nothing came within "+Patience.String(), "up to %d, behind %v", last, all[max(0, len(all)-3):])
		}
	}
}
