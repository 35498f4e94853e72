package integration

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
	"github.com/hopback/hopback/retry"
)

// retrier starts "hopback retry run", a process of its own.
func (s *site) retrier(t *testing.T, file string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := command()
	require.NoError(t, err)
	c := exec.CommandContext(t.Context(), bin, append([]string{"retry", "run", file}, args...)...)
	c.Env = append(os.Environ(), "HOPBACK_URL="+s.url(), "HOPBACK_MANAGEMENT_URL=none")
	said := &told{}
	c.Stderr = said
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("hopback retry run, %v: %s", c.ProcessState, said)
		}
	})
	return c
}

// terminate has a retrier end in an orderly way, once it has begun: before that it would end
// with 130.
func terminate(t *testing.T, c *exec.Cmd) {
	t.Helper()
	poll(t, "the retrier has begun", func() bool { return strings.Contains(c.Stderr.(*told).String(), "hopback: retrying") })
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
}

// told is what a process has said, to be read while it speaks.
type told struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *told) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *told) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// rejections are what a worker sees of messages that fail twice: by body, how often each
// number of retries came.
type rejections struct {
	mu   sync.Mutex
	seen map[string]*[3]int
	more int // attempts beyond the policy's
	done int // messages that came a third time
	all  int
	// first counts the attempts that were no retries.
	first int
}

func (r *rejections) next(body string, retries int) (again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all++
	if r.seen[body] == nil {
		r.seen[body] = new([3]int)
	}
	if retries > 2 {
		r.more++
		return false
	}
	r.seen[body][retries]++
	if retries == 0 {
		r.first++
	}
	if retries == 2 && r.seen[body][2] == 1 {
		r.done++
	}
	return retries < 2
}

func (r *rejections) counts() (done, all int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.done, r.all
}

// retried is how many attempts were retries.
func (r *rejections) retried() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all - r.first
}

// advance waits until there are enough attempts, as long as there are more and more.
func advance(t *testing.T, r *rejections, enough func(done, all int) bool) {
	t.Helper()
	for before, since := -1, time.Now(); ; time.Sleep(20 * time.Millisecond) {
		done, all := r.counts()
		if enough(done, all) {
			return
		}
		if all != before {
			before, since = all, time.Now()
		}
		require.Less(t, time.Since(since), patience, "no attempt since; %d attempts, %d have come a third time", all, done)
	}
}

// rejecting is a worker, without hopback, that rejects what has less than two retries.
func (p *peer) rejecting(queue string, r *rejections) {
	p.byHand(queue, func(l *amqp.Receiver, m *amqp.Message) error {
		if r.next(string(m.GetData()), retry.Count(m)) {
			return l.RejectMessage(context.Background(), m, nil)
		}
		return l.AcceptMessage(context.Background(), m)
	})
}

const hardFile = `
retry: {delays: [100ms, 200ms], max-retries: 2}
central:
work-queues: {orders: }
`

// The process is killed again and again, with -9, amid messages that fail twice. None is
// lost, none is given up, none comes twice, and each is retried as often as the policy says.
func TestCentralIsKilledAgainAndAgain(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		n, kills := sized(1000, 20_000), sized(4, 30)
		conn, _ := s.connect(t)
		file := yaml(t, hardFile)
		s.shell(t).run(exitDone, "apply", file)
		load(t, conn, "orders", n, func(int, *client.Message) {})
		r := &rejections{seen: map[string]*[3]int{}}
		for range 2 {
			s.peer(t).rejecting("orders", r)
		}
		began := time.Now()
		killed := 0
		total := 3 * n // attempts, without duplicates
		for killed < kills {
			c := s.retrier(t, file)
			before := r.retried()
			step := n/(kills+5) + rand.IntN(2*n/(kills+5))
			advance(t, r, func(done, _ int) bool { return r.retried() >= before+step || done == n })
			if done, _ := r.counts(); done == n {
				break
			}
			require.NoError(t, c.Process.Kill())
			_ = c.Wait()
			killed++
		}
		last := s.retrier(t, file)
		advance(t, r, func(done, _ int) bool { return done == n })
		for _, q := range []string{"orders", "failed_queue", "delay_100ms", "delay_200ms"} {
			poll(t, q+" is empty", func() bool { return ready(t, conn, q) == 0 })
		}
		terminate(t, last)
		require.NoError(t, last.Wait(), "it drains, and ends with 0")
		for _, q := range []string{"orders.dead", "failed_queue.dead", "parking_queue", "failed_queue"} {
			assert.Zero(t, ready(t, conn, q), q)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		assert.Len(t, r.seen, n)
		assert.Zero(t, r.more)
		twice := 0
		for body, of := range r.seen {
			require.Positive(t, of[0], body)
			require.Positive(t, of[1], body)
			require.Positive(t, of[2], body)
			if *of != [3]int{1, 1, 1} {
				twice++
			}
		}
		assert.GreaterOrEqual(t, killed, kills/2)
		assert.Zero(t, twice, "a message is moved once or not at all")
		report(t, s, "%d messages, %d kills in %v: none lost, each retried twice; %d of them have duplicates, %d attempts in place of %d",
			n, killed, time.Since(began).Round(time.Millisecond), twice, r.all, total)
	})
}

// Two instances share the work: no message comes twice for that, and both have their part.
func TestCentralInTwoInstances(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		n := sized(1500, 20_000)
		conn, _ := s.connect(t)
		file := yaml(t, hardFile)
		s.shell(t).run(exitDone, "apply", file)
		load(t, conn, "orders", n, func(int, *client.Message) {})
		first, second := s.retrier(t, file), s.retrier(t, file)
		awaitConsumers(t, conn, "failed_queue", 2)
		r := &rejections{seen: map[string]*[3]int{}}
		for range 2 {
			s.peer(t).rejecting("orders", r)
		}
		began := time.Now()
		stopped := atomic.Bool{}
		advance(t, r, func(done, all int) bool {
			if all > 3*n/2 && stopped.CompareAndSwap(false, true) {
				// One of them drains amid that.
				terminate(t, first)
			}
			return done == n
		})
		took := time.Since(began)
		require.NoError(t, first.Wait())
		terminate(t, second)
		require.NoError(t, second.Wait())
		_, all := r.counts()
		assert.Equal(t, 3*n, all, "none twice")
		assert.Zero(t, r.more)
		report(t, s, "%d messages failed twice by two instances, one of which drained, in %v; none twice", n, took.Round(time.Millisecond))
	})
}

// A queue moves from the decorator to Central and back, live: its arguments stay, the
// counts are kept, and both kinds of workers are on it at once.
func TestQueueMovesToCentralAndBack(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 4, Backoff: retry.Delays(100 * time.Millisecond)}
		conn, _ := s.connect(t)
		hopback := s.shell(t)
		const old = "retry: {delays: [100ms], max-retries: 4}\nwork-queues: {orders: {delivery-limit: 5}}\n"
		hopback.run(exitDone, "apply", yaml(t, old))
		a := newAttempts()
		var retries sync.Map // body: the counts that its attempts saw
		see := func(m *client.Message) int {
			body := string(m.GetData())
			seen, _ := retries.LoadOrStore(body, &sync.Map{})
			seen.(*sync.Map).Store(retry.Count(m), true)
			return a.next(body)
		}
		var decorated atomic.Int64
		consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			decorated.Add(1)
			see(d.Message())
			return errNotYet
		})), client.ConsumerConfig{Prefetch: 1})
		stop := make(chan struct{})
		var sent atomic.Int64
		var wg sync.WaitGroup
		p := publisher[string](t, conn, address.Queue("orders"))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					publish(t, p, fmt.Sprintf("m%d", sent.Add(1)))
				}
			}
		})
		poll(t, "the decorator works", func() bool { return decorated.Load() > 20 })

		file := yaml(t, old+"central:\n")
		group := hopback
		group.group = "retry"
		// Before take-over both ways are open, which the guards don't allow.
		hopback.run(exitDone, "apply", file)
		out := group.run(exitNo, "run", file)
		assert.Contains(t, out.stderr, `guard "failed-queue"`)
		assert.Contains(t, out.stderr, "take-over")
		assert.Contains(t, group.run(exitDone, "take-over", file).stdout, "1 work queues: orders.")
		process := s.retrier(t, file)
		awaitConsumers(t, conn, "failed_queue", 1)
		var rejected atomic.Int64
		s.peer(t).byHand("orders", func(r *amqp.Receiver, m *amqp.Message) error {
			rejected.Add(1)
			see(m)
			return r.RejectMessage(context.Background(), m, nil)
		})
		before := decorated.Load()
		poll(t, "both kinds of workers work", func() bool { return rejected.Load() > 100 && decorated.Load() > before+100 })
		close(stop)
		wg.Wait()
		n := int(sent.Load())
		poll(t, "all are given up", func() bool { return ready(t, conn, "orders.dead") >= n })
		group.run(exitDone, "hand-back", file)
		terminate(t, process)
		require.NoError(t, process.Wait())

		dead := s.peer(t).take("orders.dead", ready(t, conn, "orders.dead"))
		ids := map[string]int{}
		for _, m := range dead {
			d := retry.DeathOf(m)
			ids[string(m.GetData())]++
			assert.Equal(t, retry.ReasonExhausted, d.Reason)
			assert.Equal(t, 4, d.Retries)
			assert.Equal(t, "orders", d.Queue)
		}
		assert.Len(t, ids, n)
		five := 0
		for body := range ids {
			seen, _ := retries.Load(body)
			count := 0
			seen.(*sync.Map).Range(func(k, _ any) bool { count++; assert.LessOrEqual(t, k.(int), 4); return true })
			if count == 5 && len(a.of(body)) == 5 {
				five++
			}
		}
		assert.Equal(t, n, five, "five attempts with the counts 0 to 4 each, whoever has had them")
		// Back: what dies now is in the dead-letter queue without Central.
		s.peer(t).put("orders", amqp.NewMessage([]byte("last")))
		poll(t, "it is dead", func() bool { return ready(t, conn, "orders.dead") == 1 })
		assert.Zero(t, ready(t, conn, "failed_queue"))
		report(t, s, "%d messages over a queue with both kinds of workers: %d attempts by the decorator, %d rejections; each has five attempts and one dead letter", n, decorated.Load(), rejected.Load())
	})
}

// The command refuses what it can't use, and prints policies.
func TestCommandRetry(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		conn, _ := s.connect(t)
		hopback := s.shell(t)
		hopback.group = "retry"
		hopback.run(exitUsage, "run")
		assert.Contains(t, hopback.run(exitUsage, "run", yaml(t, "work-queues: {orders: }")).stderr, "central")
		file := yaml(t, "retry: {delays: [100ms], max-retries: 1}\ncentral: {queues: [legacy]}\n")
		hopback.run(exitUsage, "run", "--waive", "nothing", file)
		assert.Contains(t, hopback.run(exitNo, "run", file).stderr, "failed_queue")
		bad := hopback
		bad.env = map[string]string{"HOPBACK_URL": "amqp://guest:guest@127.0.0.1:1/"}
		bad.run(exitUnknown, "run", file)

		// A queue that exists, and a policy for it.
		s.http(t, "PUT", "/queues/"+s.vhost+"/legacy", map[string]any{"durable": true, "arguments": map[string]any{"x-queue-type": "quorum"}}, nil)
		topology := s.shell(t)
		topology.run(exitDone, "apply", file)
		out := hopback.run(exitNo, "run", file)
		assert.Contains(t, out.stderr, `guard "dead-letter" at queue "legacy"`)
		commands := hopback.run(exitDone, "policies", "--vhost", s.vhost, file).stdout
		assert.Contains(t, commands, `rabbitmqctl set_policy --vhost '`+s.vhost+`' --apply-to quorum_queues --priority 10 'hopback-legacy' '^legacy$' '{"dead-letter-exchange":"dead_letter_exchange","dead-letter-routing-key":"legacy","dead-letter-strategy":"at-least-once","overflow":"reject-publish"}'`)
		s.http(t, "PUT", "/policies/"+s.vhost+"/hopback-legacy", map[string]any{"pattern": "^legacy$", "apply-to": "quorum_queues", "priority": 10, "definition": map[string]any{
			"dead-letter-exchange": "dead_letter_exchange", "dead-letter-routing-key": "legacy", "dead-letter-strategy": "at-least-once", "overflow": "reject-publish",
		}}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := hopback.start(ctx, exitDone, "run", file)
		awaitConsumers(t, conn, "failed_queue", 1)
		a := newAttempts()
		s.peer(t).byHand("legacy", func(r *amqp.Receiver, m *amqp.Message) error {
			a.next(string(m.GetData()))
			return r.RejectMessage(ctx, m, nil)
		})
		s.peer(t).put("legacy", amqp.NewMessage([]byte("a")))
		m := s.peer(t).take("legacy.dead", 1)[0]
		assert.Equal(t, retry.ReasonExhausted, retry.DeathOf(m).Reason)
		assert.Len(t, a.of("a"), 2)
		cancel()
		log := await(t, done, "the command").stderr
		assert.Contains(t, log, "hopback: retrying")
		assert.Contains(t, log, "hopback: drained")
	})
}
