package consume_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
)

// A worker process that a poison message kills is the test binary itself: with this
// variable set it consumes from the URL there and runs no test.
const poisonedWorkerURL = "HOPBACK_TEST_POISONED_WORKER"

func init() {
	if url := os.Getenv(poisonedWorkerURL); url != "" {
		if err := poisonedWorker(url); err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// poisonedWorker consumes until its stdin ends, and says on stdout what it handles,
// by id and delivery count. The message with the id 0 kills it, as an exhausted
// memory or a bug in C would: with all that it has prefetched.
func poisonedWorker(url string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	conn, err := client.Connect(ctx, url, client.Config{})
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	handler := client.JSON(func(ctx context.Context, o suite.Order) error {
		d, _ := client.DeliveryFrom(ctx)
		fmt.Println("handle", o.ID, d.DeliveryCount())
		if o.ID != 0 {
			return nil
		}
		if d.DeliveryCount() < 2 { // until it is a suspect, it has neighbours
			for {
				info, err := declare.Inspect(ctx, conn.Management(), "orders")
				if err != nil {
					return err
				}
				if info.Messages == 0 {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	})
	policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}
	return conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{Prefetch: 64})
}

// A message that kills its worker takes the delivery counts of all that was
// prefetched with it along, twice. Then it is handled alone: it reaches the
// delivery limit, and the others don't.
func TestPoisonMessageTakesNoNeighbourToTheDeadLetterQueue(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const neighbours, limit = 30, 5
		conn, _ := s.Connect(t)
		policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: limit})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for id := range neighbours + 1 {
			suite.Publish(t, p, suite.Order{ID: id})
		}

		handled := map[int]int{} // neighbours, by how often
		counts := map[int]int{}  // their delivery counts
		var poison []int         // the poison's
		crashes := 0
		began := time.Now()
		for len(handled) < neighbours || len(poison) <= limit {
			require.LessOrEqual(t, crashes, limit+1, "the poison message is delivered beyond its limit")
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			defer cancel()
			worker := exec.CommandContext(ctx, os.Args[0])
			worker.Env = append(os.Environ(), poisonedWorkerURL+"="+s.AMQPURL())
			worker.Stderr = os.Stderr
			stdin, err := worker.StdinPipe()
			require.NoError(t, err)
			stdout, err := worker.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, worker.Start())
			for lines := bufio.NewScanner(stdout); lines.Scan(); {
				var id, count int
				if _, err := fmt.Sscanf(lines.Text(), "handle %d %d", &id, &count); err != nil {
					t.Errorf("the worker says %q", lines.Text())
					continue
				}
				if id == 0 {
					poison = append(poison, count)
				} else {
					handled[id]++
					counts[count]++
				}
				if len(handled) == neighbours && len(poison) > limit {
					_ = stdin.Close() // it drains
				}
			}
			if err := worker.Wait(); err != nil {
				require.Contains(t, err.Error(), "killed")
				crashes++
			}
		}
		assert.Equal(t, []int{0, 1, 2, 3, 4, 5}, poison, "the poison's delivery counts: a limit of 5 allows 6 deliveries")
		for id, n := range handled {
			assert.Equal(t, 1, n, "message %d", id)
		}
		assert.Equal(t, map[int]int{2: neighbours}, counts, "no neighbour was there at the later crashes")
		dead := s.Peer(t).Take("orders.dead", 1)[0]
		assert.JSONEq(t, `{"id": 0}`, string(dead.GetData()))
		assert.Equal(t, retry.ReasonDeliveryLimit, retry.DeadLetterOf(dead).Reason)
		for _, q := range []string{"orders", "orders.dead", "parking_queue"} {
			assert.Zero(t, suite.Ready(t, conn, q), q)
		}
		suite.Report(t, s, "%d crashes, neighbours' delivery counts %v, all over in %v", crashes, counts, time.Since(began).Round(10*time.Millisecond))
	})
}

// Failures that handlers report make nobody a suspect, however many they are.
func TestReportedFailuresAreHandledSideBySide(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const concurrency, failures = 4, 6
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: 50}))
		var mu sync.Mutex
		together := map[uint32]chan struct{}{} // closed when all are in the handler with that count
		inside := map[uint32]int{}
		done := make(chan struct{}, concurrency)
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(ctx context.Context, d *client.Delivery) error {
			n := d.DeliveryCount()
			mu.Lock()
			if together[n] == nil {
				together[n] = make(chan struct{})
			}
			all := together[n]
			if inside[n]++; inside[n] == concurrency {
				close(all)
			}
			mu.Unlock()
			select {
			case <-all:
			case <-ctx.Done(): // the test is over: they weren't together
				return nil
			}
			if n < failures {
				return errors.New("again") // requeued as failed
			}
			done <- struct{}{}
			return nil
		}), client.ConsumerConfig{Concurrency: concurrency, Grace: time.Second})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for id := range concurrency {
			suite.Publish(t, p, suite.Order{ID: id})
		}
		for range concurrency {
			suite.Await(t, done, "a message that failed six times next to three others")
		}
	})
}

// A consumer begins with one credit, to see whether what comes is a suspect. It gets
// the rest with the first message, and not only when that is settled.
func TestCleanStartCostsOneRoundTripAtMost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const messages, rounds = 64, 5
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		took := map[bool][]time.Duration{}
		for n := range 2 * rounds {
			without := n%2 == 0
			for id := range messages {
				suite.Publish(t, p, suite.Order{ID: id})
			}
			began := time.Now()
			received := make(chan time.Time, messages)
			first := make(chan struct{})
			stop := suite.Consume(t, conn, "orders", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
				<-first
				received <- d.Received()
				return nil
			}), client.ConsumerConfig{Prefetch: messages, NoIsolation: without})
			// While the first is handled, all others come.
			suite.Poll(t, "everything is prefetched", func() bool { return suite.Ready(t, conn, "orders") == 0 })
			close(first)
			var last time.Time
			for range messages {
				last = suite.Await(t, received, "a message")
			}
			took[without] = append(took[without], last.Sub(began))
			require.NoError(t, stop())
		}
		suite.Report(t, s, "start to the last of %d messages received: %s; without quarantine: %s", messages, suite.Spread(took[false]), suite.Spread(took[true]))
	})
}
