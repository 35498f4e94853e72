package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// held is a handler that runs until a test ends it.
type held struct {
	mu      sync.Mutex
	running []chan error
	workers map[string]int // deliveries of each goroutine
}

var (
	errGoexit = errors.New("end the goroutine")
	errPanic  = errors.New("panic")
)

func (h *held) handle(context.Context, *Delivery) error {
	end := make(chan error)
	h.mu.Lock()
	h.running = append(h.running, end)
	if h.workers == nil {
		h.workers = map[string]int{}
	}
	h.workers[goroutine()]++
	h.mu.Unlock()
	switch err := <-end; err {
	case errGoexit:
		runtime.Goexit()
		return nil
	case errPanic:
		panic("boom")
	default:
		return err
	}
}

// goroutine names the one that calls it.
func goroutine() string {
	b := make([]byte, 64)
	id, _, _ := strings.Cut(strings.TrimPrefix(string(b[:runtime.Stack(b, false)]), "goroutine "), " ")
	return id
}

func (h *held) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.running)
}

// end has one of the running handlers end.
func (h *held) end(err error) {
	h.mu.Lock()
	i := rand.N(len(h.running))
	end := h.running[i]
	h.running = append(h.running[:i], h.running[i+1:]...)
	h.mu.Unlock()
	end <- err
}

// As many handlers run as there are deliveries, up to Concurrency: at once, regardless of what handlers do,
// and across lost links.
func TestAsManyHandlersRunAsThereAreDeliveries(t *testing.T) {
	for _, concurrency := range []int{1, 2, 7, 64} {
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				h := &held{}
				k := startConsumer(b, ConsumerConfig{Concurrency: concurrency, Prefetch: 200, NoIsolation: true, Grace: time.Hour}, h.handle)
				unfinished, published := 0, 0
				var old []chan error // handlers of earlier links, which hold their slots
				for range 600 {
					switch n := rand.N(20); {
					case n < 8:
						more := rand.N(min(3*concurrency, 150-unfinished) + 1)
						b.Publish(linktest.Numbered(fmt.Sprint("m", published, "-"), more)...)
						unfinished += more
						published++
					case n == 8: // all that is unfinished comes again
						h.mu.Lock()
						old = append(old, h.running...)
						h.running = nil
						h.mu.Unlock()
						b.Kill(linktest.ErrFakeLink)
						time.Sleep(time.Minute)
					case n < 12:
						for range rand.N(len(old) + 1) {
							old[0] <- []error{nil, errGoexit, errPanic}[rand.N(3)]
							old = old[1:]
						}
					default:
						for range rand.N(h.count() + 1) {
							h.end([]error{nil, nil, nil, DeadLetter{}, errGoexit, errPanic}[rand.N(6)])
							unfinished--
						}
					}
					synctest.Wait()
					require.Equal(t, min(concurrency-len(old), unfinished), h.count())
				}
				for _, end := range old {
					end <- nil
				}
				synctest.Wait()
				for h.count() > 0 {
					h.end(nil)
					synctest.Wait()
				}
				require.NoError(t, k.end())
			})
		})
	}
}

// A handler of an earlier link keeps its slot. The others are used.
func TestHandlersOfAnEarlierLinkLeaveTheOtherSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		h := &held{}
		k := startConsumer(b, ConsumerConfig{Concurrency: 3, Prefetch: 200, NoIsolation: true, Grace: time.Hour}, h.handle)
		b.Publish("old-1", "old-2")
		synctest.Wait()
		h.mu.Lock()
		old := h.running
		h.running = nil
		h.mu.Unlock()
		require.Len(t, old, 2)
		b.Kill(linktest.ErrFakeLink)
		time.Sleep(time.Minute)
		for range 100 { // both come again
			synctest.Wait()
			require.Equal(t, 1, h.count(), "one slot is left")
			b.Publish("new")
			h.end(nil)
		}
		close(old[0])
		synctest.Wait()
		require.Equal(t, 2, h.count())
		close(old[1])
		synctest.Wait()
		for h.count() > 0 {
			h.end(nil)
			synctest.Wait()
		}
		require.NoError(t, k.end())
	})
}

// Deliveries that come one at a time are handled by one worker, even if there are many.
func TestTheWorkerThatHasBecomeIdleLastIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		h := &held{}
		k := startConsumer(b, ConsumerConfig{Concurrency: 50, Prefetch: 100}, h.handle)
		one := func(n int) (workers int) {
			h.workers = nil
			for range n {
				b.Publish("m")
				synctest.Wait()
				require.Equal(t, 1, h.count())
				h.end(nil)
				synctest.Wait()
			}
			return len(h.workers)
		}
		assert.Equal(t, 1, one(100))
		b.Publish(linktest.Numbered("burst", 100)...)
		synctest.Wait()
		require.Equal(t, 50, h.count())
		for h.count() > 0 {
			h.end(nil)
			synctest.Wait()
		}
		assert.Equal(t, 1, one(100))
		require.NoError(t, k.end())
	})
}

// Handlers that return at once need few workers, however many are allowed. The test runs on
// one processor: with two, a busy machine can suspend the thread of a worker that has just
// taken a delivery, and the workers rightly call another one each time.
func TestQuickHandlersNeedFewWorkers(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		var workers sync.Map
		k := startConsumer(b, ConsumerConfig{Concurrency: 256, Prefetch: 256}, func(context.Context, *Delivery) error {
			workers.LoadOrStore(goroutine(), true)
			return nil
		})
		for i := range 100 {
			b.Publish(linktest.Numbered(fmt.Sprint(i, "-"), 256)...)
			synctest.Wait()
		}
		require.NoError(t, k.end())
		assert.Len(t, b.History("accept"), 25_600)
		n := 0
		workers.Range(func(any, any) bool { n++; return true })
		t.Log(n)
		if !underRace { // which shuffles goroutines
			assert.Less(t, n, 16)
		}
	})
}
