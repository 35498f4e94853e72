package partition

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/client"
)

// Each worker hears at most 64 beats or so in a second, however many workers a group has. All know all others, and
// notice when one is gone.
func TestManyWorkersSendFewerBeats(t *testing.T) {
	for _, n := range []int{10, 100} {
		synctest.Test(t, func(t *testing.T) {
			workers := make([]*worker, n)
			stops := make([]chan struct{}, n)
			var beats atomic.Int64
			sent := make(chan beat, 10*n)
			ctx, cancel := context.WithCancel(t.Context())
			for i := range workers {
				workers[i] = newWorker(Group{Name: "orders"}, client.HandlerFunc(nil), Config{Worker: string(rune('a'+i%26)) + string(rune('a'+i/26)), Concurrency: 1}, slog.New(slog.DiscardHandler))
				stops[i] = make(chan struct{})
				go workers[i].loop(ctx, stops[i])
				go func() {
					for {
						select {
						case b := <-workers[i].beats:
							sent <- b
						case <-stops[i]:
							return
						}
					}
				}()
			}
			all := make(chan struct{})
			go func() { // the exchange
				defer close(all)
				for b := range sent {
					beats.Add(1)
					for _, w := range workers {
						w.do(func() { w.hear(b) })
					}
				}
			}()
			known := func(w *worker) (n int) {
				done := make(chan struct{})
				w.do(func() {
					for _, m := range w.members.all {
						if !m.left {
							n++
						}
					}
					close(done)
				})
				<-done
				return n
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			before := beats.Load()
			time.Sleep(time.Minute)
			synctest.Wait()
			inAMinute := beats.Load() - before
			assert.LessOrEqual(t, inAMinute, int64(60*min(n, maxBeats+maxBeats/8)))
			assert.GreaterOrEqual(t, inAMinute, int64(60*min(n, maxBeats/2)))
			for _, w := range workers {
				assert.Equal(t, n-1, known(w))
			}

			every := make(chan int, 1)
			workers[1].do(func() { every <- int(workers[1].members.every()) })
			close(stops[0]) // it is gone without a word
			time.Sleep(2*gone*time.Duration(<-every) + time.Second)
			for _, w := range workers[1:] {
				assert.Equal(t, n-2, known(w))
			}
			for _, stop := range stops[1:] {
				close(stop)
			}
			synctest.Wait()
			cancel()
			close(sent)
			<-all
		})
	}
}
