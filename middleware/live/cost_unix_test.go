//go:build unix

package live_test

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/live"
)

func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkQuestion is the CPU time of a question to 200 workers with 5,000 running handlers, of all of them together, of the
// broker in memory, and of the one who asks; and of as long without a question.
func BenchmarkQuestion(b *testing.B) {
	const workers, each = 200, 25
	s := newScene(b, hopbacktest.Config{MaxEvents: -1})
	for i := range workers {
		s.work(fmt.Sprint("host-", i), each, nil)
	}
	s.publish(workers*each, func(i int, m *client.Message) {
		m.Properties.MessageID = fmt.Sprintf("3f1c5a52-9d0e-4a57-8a6c-%012d", i)
		m.Properties.Subject, m.Properties.GroupID = new("order.placed"), new("tenant-17")
	})
	for f := s.ask(); len(f.Workers) < workers || handlers(f) < workers*each; f = s.ask() {
	}
	began, used := time.Now(), cpu(b)
	missing := 0
	for b.Loop() {
		missing += workers - len(s.ask().Workers)
	}
	took, used := time.Since(began), cpu(b)-used
	idle := cpu(b)
	time.Sleep(took)
	idle = cpu(b) - idle
	perQuestion := (used - idle) / time.Duration(b.N)
	b.ReportMetric(float64(perQuestion.Microseconds())/1000, "cpu-ms/question")
	b.ReportMetric(float64(missing)/float64(b.N), "missing/question")
	b.ReportMetric(float64(idle)/float64(took)*100, "%core-idle")
	b.ReportMetric(float64(perQuestion)/float64(2*time.Second)*100, "%core-at-2s")
	b.ReportMetric(float64(perQuestion)/float64(5*time.Second)*100, "%core-at-5s")
}

// BenchmarkWatch is the CPU time of 2 s of Watch, with as many workers and handlers; busy: all of them change in that time.
func BenchmarkWatch(b *testing.B) {
	const workers, each = 200, 25
	for _, busy := range []bool{false, true} {
		b.Run(fmt.Sprintf("busy=%v", busy), func(b *testing.B) {
			s := newScene(b, hopbacktest.Config{MaxEvents: -1})
			var all []client.Handler
			for i := range workers {
				all = append(all, s.work(fmt.Sprint("host-", i), each, nil).handler)
			}
			s.publish(workers*each, func(i int, m *client.Message) {
				m.Properties.MessageID = fmt.Sprintf("3f1c5a52-9d0e-4a57-8a6c-%012d", i)
				m.Properties.Subject, m.Properties.GroupID = new("order.placed"), new("tenant-17")
			})
			for f := s.ask(); len(f.Workers) < workers || handlers(f) < workers*each; f = s.ask() {
			}
			ctx, stop := context.WithCancel(b.Context())
			shows, missing := make(chan live.Fleet), 0
			ended := make(chan error, 1)
			go func() {
				ended <- live.Watch(ctx, s.conn, func(f live.Fleet) {
					select {
					case shows <- f:
					case <-ctx.Done():
					}
				})
			}()
			for range 12 { // by then the workers know how often
				<-shows
			}
			quick := client.NewDelivery("orders", client.NewMessage(nil))
			used := cpu(b)
			for b.Loop() {
				if busy {
					for _, h := range all {
						_ = h.Handle(context.WithValue(b.Context(), returns{}, true), quick)
					}
				}
				f := <-shows
				missing += workers - len(f.Workers) + each*workers - handlers(f)
			}
			used = cpu(b) - used
			stop()
			require.NoError(b, <-ended)
			idle, began := cpu(b), time.Now()
			time.Sleep(5 * time.Second)
			per := used/time.Duration(b.N) - (cpu(b)-idle)*2*time.Second/time.Since(began)
			b.ReportMetric(float64(per.Microseconds())/1000, "cpu-ms/2s")
			b.ReportMetric(float64(per)/float64(2*time.Second)*100, "%core")
			b.ReportMetric(float64(missing)/float64(b.N), "missing/show")
		})
	}
}

// BenchmarkHandle is what live adds to a handler's call.
func BenchmarkHandle(b *testing.B) {
	s := newScene(b, hopbacktest.Config{})
	h := live.With(s.conn, live.Config{})(client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }))
	d := client.NewDelivery("orders", client.NewMessage(nil))
	b.ReportAllocs()
	for b.Loop() {
		_ = h.Handle(b.Context(), d)
	}
}
