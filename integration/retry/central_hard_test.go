package retry_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// retrier starts "hopback retry run" in a separate process.
func retrier(t *testing.T, s *suite.Site, file string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := suite.Command()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), bin, append([]string{"retry", "run", file}, args...)...)
	c.Env = append(os.Environ(), "HOPBACK_URL="+s.AMQPURL(), "HOPBACK_MANAGEMENT_URL=none")
	logged := &notified{}
	c.Stderr = logged
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("hopback retry run, %v: %s", c.ProcessState, logged)
		}
	})
	return c
}

// terminate has a retrier end in an orderly way, once it has begun: before that it would end
// with 130.
func terminate(t *testing.T, c *exec.Cmd) {
	t.Helper()
	suite.Poll(t, "the retrier has begun", func() bool { return strings.Contains(c.Stderr.(*notified).String(), "hopback: retrying") })
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
}

// notified is what a process has said, to be read while it speaks.
type notified struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *notified) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *notified) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// advance waits until there are enough attempts, as long as there are more and more.
func advance(t *testing.T, r *suite.Rejections, enough func(done, all int) bool) {
	t.Helper()
	for before, since := -1, time.Now(); ; time.Sleep(20 * time.Millisecond) {
		done, all := r.Counts()
		if enough(done, all) {
			return
		}
		if all != before {
			before, since = all, time.Now()
		}
		require.Less(t, time.Since(since), suite.Patience, "no attempt since; %d attempts, %d have come a third time", all, done)
	}
}

const hardFile = `
retry: {delays: [100ms, 200ms], max-retries: 2}
central:
work-queues: {orders: }
`

// The process is killed again and again, with -9, while messages fail twice. None is
// lost, none is given up, none comes twice, and each is retried as often as the policy says.
func TestCentralIsKilledAgainAndAgain(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n, kills := suite.Sized(1000, 20_000), suite.Sized(4, 30)
		conn, _ := s.Connect(t)
		file := suite.YAML(t, hardFile)
		s.Shell(t).Run(suite.ExitDone, "apply", file)
		suite.Load(t, conn, "orders", n, func(int, *client.Message) {})
		r := &suite.Rejections{Seen: map[string]*[3]int{}}
		for range 2 {
			s.Peer(t).Rejecting("orders", r)
		}
		began := time.Now()
		killed := 0
		total := 3 * n // attempts, without duplicates
		for killed < kills {
			c := retrier(t, s, file)
			before := r.Retried()
			step := n/(kills+5) + rand.IntN(2*n/(kills+5))
			advance(t, r, func(done, _ int) bool { return r.Retried() >= before+step || done == n })
			if done, _ := r.Counts(); done == n {
				break
			}
			require.NoError(t, c.Process.Kill())
			_ = c.Wait()
			killed++
		}
		last := retrier(t, s, file)
		advance(t, r, func(done, _ int) bool { return done == n })
		for _, q := range []string{"orders", "failed_queue", "delay_100ms", "delay_200ms"} {
			suite.Poll(t, q+" is empty", func() bool { return suite.Ready(t, conn, q) == 0 })
		}
		terminate(t, last)
		require.NoError(t, last.Wait(), "it drains, and ends with 0")
		for _, q := range []string{"orders.dead", "failed_queue.dead", "parking_queue", "failed_queue"} {
			assert.Zero(t, suite.Ready(t, conn, q), q)
		}
		r.Mu.Lock()
		defer r.Mu.Unlock()
		assert.Len(t, r.Seen, n)
		assert.Zero(t, r.More)
		twice := 0
		for body, of := range r.Seen {
			require.Positive(t, of[0], body)
			require.Positive(t, of[1], body)
			require.Positive(t, of[2], body)
			if *of != [3]int{1, 1, 1} {
				twice++
			}
		}
		assert.GreaterOrEqual(t, killed, kills/2)
		assert.Zero(t, twice, "a message is moved once or not at all")
		suite.Report(t, s, "%d messages, %d kills in %v: none lost, each retried twice; %d of them have duplicates, %d attempts in place of %d",
			n, killed, time.Since(began).Round(time.Millisecond), twice, r.All, total)
	})
}

// Two instances share the work: no message comes twice for that, and both have their part.
func TestCentralInTwoInstances(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		n := suite.Sized(1500, 20_000)
		conn, _ := s.Connect(t)
		file := suite.YAML(t, hardFile)
		s.Shell(t).Run(suite.ExitDone, "apply", file)
		suite.Load(t, conn, "orders", n, func(int, *client.Message) {})
		first, second := retrier(t, s, file), retrier(t, s, file)
		suite.AwaitConsumers(t, conn, "failed_queue", 2)
		r := &suite.Rejections{Seen: map[string]*[3]int{}}
		for range 2 {
			s.Peer(t).Rejecting("orders", r)
		}
		began := time.Now()
		stopped := atomic.Bool{}
		advance(t, r, func(done, all int) bool {
			if all > 3*n/2 && stopped.CompareAndSwap(false, true) {
				// One of them drains in between.
				terminate(t, first)
			}
			return done == n
		})
		took := time.Since(began)
		require.NoError(t, first.Wait())
		terminate(t, second)
		require.NoError(t, second.Wait())
		_, all := r.Counts()
		assert.Equal(t, 3*n, all, "none twice")
		assert.Zero(t, r.More)
		suite.Report(t, s, "%d messages failed twice with two instances, and one of these drained, in %v; none twice", n, took.Round(time.Millisecond))
	})
}

// A queue moves from the decorator to Central and back, live: its arguments stay, the
// counts are kept, and both kinds of workers are on it at once.
func TestQueueMovesToCentralAndBack(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		policy := retry.Policy{MaxRetries: 4, Backoff: retry.Delays(100 * time.Millisecond)}
		conn, _ := s.Connect(t)
		hopback := s.Shell(t)
		const old = "retry: {delays: [100ms], max-retries: 4}\nwork-queues: {orders: {delivery-limit: 5}}\n"
		hopback.Run(suite.ExitDone, "apply", suite.YAML(t, old))
		a := newAttempts()
		var retries sync.Map // body: the counts that its attempts saw
		var last atomic.Int64
		see := func(m *client.Message) int {
			body := string(m.GetData())
			seen, _ := retries.LoadOrStore(body, &sync.Map{})
			seen.(*sync.Map).Store(retry.Count(m), true)
			if retry.Count(m) == policy.MaxRetries {
				last.Add(1)
			}
			return a.next(body)
		}
		var decorated atomic.Int64
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			decorated.Add(1)
			see(d.Message())
			return errNotYet
		})), client.ConsumerConfig{Prefetch: 1})
		stop := make(chan struct{})
		var sent atomic.Int64
		var wg sync.WaitGroup
		p := suite.Publisher[string](t, conn, address.Queue("orders"))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
				if sent.Load()-last.Load() < 500 { // the trial isn't one of backlogs
					suite.Publish(t, p, fmt.Sprintf("m%d", sent.Add(1)))
				}
			}
		})
		suite.Poll(t, "the decorator works", func() bool { return decorated.Load() > 20 })

		file := suite.YAML(t, old+"central:\n")
		group := hopback
		group.Group = "retry"
		// Before take-over both ways are open, which the guards don't allow.
		hopback.Run(suite.ExitDone, "apply", file)
		out := group.Run(suite.ExitNo, "run", file)
		assert.Contains(t, out.Stderr, `topology check "failed-queue"`)
		assert.Contains(t, out.Stderr, "take-over")
		assert.Contains(t, group.Run(suite.ExitDone, "take-over", file).Stdout, "1 work queue: orders.")
		process := retrier(t, s, file)
		suite.AwaitConsumers(t, conn, "failed_queue", 1)
		var rejected atomic.Int64
		s.Peer(t).ByHand("orders", func(r *amqp.Receiver, m *amqp.Message) error {
			rejected.Add(1)
			see(m)
			return r.RejectMessage(context.Background(), m, nil)
		})
		before := decorated.Load()
		suite.Poll(t, "both kinds of workers work", func() bool { return rejected.Load() > 100 && decorated.Load() > before+100 })
		close(stop)
		wg.Wait()
		n, attempts := int(sent.Load()), int64(0)
		// RabbitMQ may hand over a dead letter twice, so the number of dead letters alone doesn't say
		// that none is in flight. One that is rejected during hand-back dies without Central.
		var quiet time.Time
		suite.Poll(t, "all are given up", func() bool {
			ended := 0
			retries.Range(func(_, seen any) bool {
				if _, last := seen.(*sync.Map).Load(policy.MaxRetries); last {
					ended++
				}
				return true
			})
			handled := decorated.Load() + rejected.Load()
			if ended < n || suite.Ready(t, conn, "orders.dead") < n || suite.Ready(t, conn, "orders") > 0 || suite.Ready(t, conn, "failed_queue") > 0 || handled != attempts {
				quiet, attempts = time.Now(), handled
			}
			return time.Since(quiet) > 2*time.Second
		})
		group.Run(suite.ExitDone, "hand-back", file)
		terminate(t, process)
		require.NoError(t, process.Wait())

		dead := s.Peer(t).Take("orders.dead", suite.Ready(t, conn, "orders.dead"))
		ids := map[string]int{}
		for _, m := range dead {
			d := retry.DeadLetterOf(m)
			ids[string(m.GetData())]++
			assert.Equal(t, retry.ReasonExhausted, d.Reason)
			assert.Equal(t, 4, d.Retries)
			assert.Equal(t, "orders", d.Queue)
		}
		assert.Len(t, ids, n)
		five, more := 0, 0
		for body := range ids {
			seen, _ := retries.Load(body)
			count := 0
			seen.(*sync.Map).Range(func(k, _ any) bool { count++; assert.LessOrEqual(t, k.(int), 4); return true })
			if count == 5 {
				five++
			}
			if len(a.of(body)) > 5 {
				more++
			}
		}
		assert.Equal(t, n, five, "attempts with the counts 0 to 4 each, over all workers")
		// Back: what dies now is in the dead-letter queue without Central.
		s.Peer(t).Put("orders", amqp.NewMessage([]byte("last")))
		suite.Poll(t, "it is dead", func() bool { return suite.Ready(t, conn, "orders.dead") == 1 })
		assert.Zero(t, suite.Ready(t, conn, "failed_queue"))
		suite.Report(t, s, "%d messages over a queue with both kinds of workers: %d attempts by the decorator, %d rejections; each has five attempts, and %d more", n, decorated.Load(), rejected.Load(), more)
	})
}

// The command refuses what it can't use, and prints policies.
func TestCommandRetry(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		hopback := s.Shell(t)
		hopback.Group = "retry"
		hopback.Run(suite.ExitUsage, "run")
		assert.Contains(t, hopback.Run(suite.ExitUsage, "run", suite.YAML(t, "work-queues: {orders: }")).Stderr, "central")
		file := suite.YAML(t, "retry: {delays: [100ms], max-retries: 1}\ncentral: {queues: [legacy]}\n")
		hopback.Run(suite.ExitUsage, "run", "--waive", "nothing", file)
		assert.Contains(t, hopback.Run(suite.ExitNo, "run", file).Stderr, "failed_queue")
		bad := hopback
		bad.Env = map[string]string{"HOPBACK_URL": "amqp://guest:guest@127.0.0.1:1/"}
		bad.Run(suite.ExitUnknown, "run", file)

		// A queue that exists, and a policy for it.
		s.HTTP(t, "PUT", "/queues/"+s.VHost+"/legacy", map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "quorum"}}, nil)
		topology := s.Shell(t)
		topology.Run(suite.ExitDone, "apply", file)
		out := hopback.Run(suite.ExitNo, "run", file)
		assert.Contains(t, out.Stderr, `topology check "dead-letter" failed at queue "legacy"`)
		commands := hopback.Run(suite.ExitDone, "policies", "--vhost", s.VHost, file).Stdout
		assert.Contains(t, commands, `rabbitmqctl set_policy --vhost '`+s.VHost+`' --apply-to quorum_queues --priority 10 'hopback-legacy' '^legacy$' '{"dead-letter-exchange":"dead_letter_exchange","dead-letter-routing-key":"legacy","dead-letter-strategy":"at-least-once","overflow":"reject-publish"}'`)
		s.HTTP(t, "PUT", "/policies/"+s.VHost+"/hopback-legacy", map[string]any{"pattern": "^legacy$", "apply-to": "quorum_queues", "priority": 10, "definition": map[string]any{
			"dead-letter-exchange": "dead_letter_exchange", "dead-letter-routing-key": "legacy", "dead-letter-strategy": "at-least-once", "overflow": "reject-publish",
		}}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := hopback.Start(ctx, suite.ExitDone, "run", file)
		suite.AwaitConsumers(t, conn, "failed_queue", 1)
		a := newAttempts()
		s.Peer(t).ByHand("legacy", func(r *amqp.Receiver, m *amqp.Message) error {
			a.next(string(m.GetData()))
			return r.RejectMessage(ctx, m, nil)
		})
		s.Peer(t).Put("legacy", amqp.NewMessage([]byte("a")))
		m := s.Peer(t).Take("legacy.dead", 1)[0]
		assert.Equal(t, retry.ReasonExhausted, retry.DeadLetterOf(m).Reason)
		assert.Len(t, a.of("a"), 2)
		cancel()
		log := suite.Await(t, done, "the command").Stderr
		assert.Contains(t, log, "hopback: retrying")
		assert.Contains(t, log, "hopback: drained")
	})
}
