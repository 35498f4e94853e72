//go:build unix

package live_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
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
	s := newScene(b, hopbacktest.Config{MaxEvents: -1})
	s.workMany()
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

const workers, each = 200, 25

// workMany starts workers, and waits until all of their handlers run.
func (s *scene) workMany() (all []client.Handler) {
	for i := range workers {
		all = append(all, s.work(fmt.Sprint("host-", i), each, nil).handler)
	}
	s.publish(workers*each, func(i int, m *client.Message) {
		m.Properties.MessageID = fmt.Sprintf("3f1c5a52-9d0e-4a57-8a6c-%012d", i)
		m.Properties.Subject, m.Properties.GroupID = new("order.placed"), new("tenant-17")
	})
	for f := s.ask(); len(f.Workers) < workers || handlers(f) < workers*each; f = s.ask() {
	}
	return all
}

// watchMany watches until stop is called. By the time it returns, the workers know how often to answer.
func (s *scene) watchMany() (shows chan live.Fleet, stop func()) {
	ctx, cancel := context.WithCancel(s.Context())
	shows = make(chan live.Fleet)
	ended := make(chan error, 1)
	go func() {
		ended <- live.Watch(ctx, s.conn, func(f live.Fleet) {
			select {
			case shows <- f:
			case <-ctx.Done():
			}
		})
	}()
	for range 12 {
		<-shows
	}
	return shows, func() {
		cancel()
		require.NoError(s, <-ended)
	}
}

// changeAll changes the state of all workers.
func (s *scene) changeAll(all []client.Handler) {
	quick := client.NewDelivery(s.queue, client.NewMessage(nil))
	for _, h := range all {
		_ = h.Handle(context.WithValue(s.Context(), returns{}, true), quick)
	}
}

// BenchmarkWatch is the CPU time of 2 s of Watch, with as many workers and handlers; busy: all of them change in that time.
func BenchmarkWatch(b *testing.B) {
	for _, busy := range []bool{false, true} {
		b.Run(fmt.Sprintf("busy=%v", busy), func(b *testing.B) {
			s := newScene(b, hopbacktest.Config{MaxEvents: -1})
			all := s.workMany()
			shows, stop := s.watchMany()
			missing := 0
			used := cpu(b)
			for b.Loop() {
				if busy {
					s.changeAll(all)
				}
				f := <-shows
				missing += workers - len(f.Workers) + each*workers - handlers(f)
			}
			used = cpu(b) - used
			stop()
			idle, began := cpu(b), time.Now()
			time.Sleep(5 * time.Second)
			per := used/time.Duration(b.N) - (cpu(b)-idle)*2*time.Second/time.Since(began)
			b.ReportMetric(float64(per.Microseconds())/1000, "cpu-ms/2s")
			b.ReportMetric(float64(per)/float64(2*time.Second)*100, "%core")
			b.ReportMetric(float64(missing)/float64(b.N), "missing/show")
		})
	}
}

// BenchmarkWatchOnRabbitMQ is what Watch adds to the CPU time of the real RabbitMQ of HOPBACK_URL, and to that of the workers
// with the one who watches; busy: all workers change every 2 s. Each pass takes six minutes, with and without Watch for a
// minute each:
//
//	go run ./integration/rabbitmq/cmd/broker run 4.3 -- go test ./middleware/live -run '^$' -bench OnRabbitMQ -benchtime 2x -timeout 30m
func BenchmarkWatchOnRabbitMQ(b *testing.B) {
	target := os.Getenv("HOPBACK_URL")
	if target == "" {
		b.Skip("HOPBACK_URL names no RabbitMQ")
	}
	s := &scene{TB: b, log: &lockedBuffer{}, url: target, queue: "hopback-benchmark-" + strings.ToLower(rand.Text())}
	s.declare()
	defer func() {
		_, err := declare.DeleteQueue(context.Background(), s.conn.Management(), s.queue)
		require.NoError(b, err)
	}()
	all := s.workMany()
	pid := pidOfBroker(b, target)
	time.Sleep(90 * time.Second) // a RabbitMQ that has just started is busy
	type cost struct{ broker, workers time.Duration }
	const lasts = time.Minute
	spent := map[string]cost{}
	missing, shown := 0, 0
	for b.Loop() {
		for _, phase := range []string{"calm", "calm-watched", "busy", "busy-watched"} {
			shows, stop := make(chan live.Fleet), func() {}
			watched, busy := strings.HasSuffix(phase, "-watched"), strings.HasPrefix(phase, "busy")
			if watched {
				shows, stop = s.watchMany()
			}
			before := cost{brokerCPU(b, pid), cpu(b)}
			for end, tick := time.Now().Add(lasts), time.NewTicker(2*time.Second); time.Now().Before(end); {
				select {
				case f := <-shows:
					shown++
					missing += workers - len(f.Workers) + each*workers - handlers(f)
				case <-tick.C:
					if busy {
						s.changeAll(all)
					}
				}
			}
			sum := spent[phase]
			spent[phase] = cost{sum.broker + brokerCPU(b, pid) - before.broker, sum.workers + cpu(b) - before.workers}
			if stop(); watched {
				time.Sleep(50 * time.Second) // until the workers stop to answer
			}
		}
	}
	percent := func(d time.Duration) float64 { return float64(d) / float64(lasts) / float64(b.N) * 100 }
	for _, of := range []string{"calm", "busy"} {
		with, without := spent[of+"-watched"], spent[of]
		b.ReportMetric(percent(without.broker), "%core-broker-unwatched-"+of)
		b.ReportMetric(percent(without.workers), "%core-workers-unwatched-"+of)
		b.ReportMetric(percent(with.broker-without.broker), "%core-broker-"+of)
		b.ReportMetric(percent(with.workers-without.workers), "%core-workers-"+of)
	}
	b.ReportMetric(float64(missing)/float64(shown), "missing/show")
}

// pidOfBroker finds the RabbitMQ of this machine that listens on a URL's port, by /proc.
func pidOfBroker(b *testing.B, target string) string {
	at, err := url.Parse(target)
	require.NoError(b, err)
	port, err := strconv.Atoi(cmp.Or(at.Port(), "5672"))
	require.NoError(b, err)
	listening := map[string]bool{}
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, _ := os.ReadFile(name)
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			if len(fields) > 9 && strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", port)) && fields[3] == "0A" {
				listening["socket:["+fields[9]+"]"] = true
			}
		}
	}
	sockets, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, name := range sockets {
		if to, err := os.Readlink(name); err == nil && listening[to] {
			return strings.Split(name, "/")[2]
		}
	}
	b.Fatalf("no process of this machine that this one may see listens on port %d", port)
	return ""
}

// brokerCPU is the CPU time of a RabbitMQ of this machine.
func brokerCPU(b *testing.B, pid string) (used time.Duration) {
	const perSecond = 100 // USER_HZ, on all of Linux's platforms
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	require.NoError(b, err)
	_, rest, found := strings.Cut(string(text), "(beam.smp) ")
	fields := strings.Fields(rest)
	require.True(b, found && len(fields) > 12, "process %s is no RabbitMQ", pid)
	for _, ticks := range fields[11:13] { // utime and stime are the 14th and 15th in all
		n, err := strconv.Atoi(ticks)
		require.NoError(b, err)
		used += time.Duration(n) * time.Second / perSecond
	}
	return used
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
