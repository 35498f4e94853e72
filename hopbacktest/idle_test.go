package hopbacktest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/retry"
)

// What an idle consumer may hold once it has rested, of idleConsumers in one process.
const (
	// with a consumer that has handled messages
	idleGoroutines = 2.1 // of each consumer
	idleKilobytes  = 40  // of heap and stacks, of each consumer
	idleMebibytes  = 64  // of memory, of the whole process
	// with one whose messages have failed, so that it has published retry copies. The checks of
	// retry.With leave a larger stack.
	retriedKilobytes = 60
	retriedMebibytes = 118
)

// idleWeight is what the process idleConsumersIn holds.
type idleWeight struct{ Goroutines, Kilobytes, Mebibytes float64 }

// childEnv tells a copy of the test binary to be a broker, or the consumers of one.
const childEnv = "HOPBACKTEST_CHILD"

// childMain runs in place of the tests. It returns false in a process that isn't a child.
func childMain() bool {
	var err error
	switch what, url, _ := strings.Cut(os.Getenv(childEnv), " "); what {
	case "":
		return false
	case "broker":
		err = brokerChild()
	default:
		var w idleWeight
		if w, err = idleConsumersIn(url, what == "retried"); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(w)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

func childOf(ctx context.Context, what string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+what, "GOGC=100") // as a user has it
	cmd.Stderr = os.Stderr
	return cmd
}

// brokerChild serves until standard input ends.
func brokerChild() error {
	b, err := hopbacktest.New(hopbacktest.Config{MaxEvents: -1})
	if err != nil {
		return err
	}
	defer b.Close()
	url, err := b.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(url)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// A process of idleConsumers consumers that wait is small. The broker is in another one.
func TestIdleConsumersHoldLittle(t *testing.T) {
	if explore.UnderRace {
		t.Skip("memory is measured without the race detector")
	}
	for _, c := range []struct {
		name string
		most idleWeight
	}{
		{"handled", idleWeight{idleGoroutines, idleKilobytes, idleMebibytes}},
		{"retried", idleWeight{idleGoroutines, retriedKilobytes, retriedMebibytes}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			broker := childOf(ctx, "broker")
			in, err := broker.StdinPipe()
			require.NoError(t, err)
			out, err := broker.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, broker.Start())
			defer func() {
				assert.NoError(t, in.Close())
				assert.NoError(t, broker.Wait())
			}()
			url, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)

			printed, err := childOf(ctx, c.name+" "+strings.TrimSpace(url)).Output()
			require.NoError(t, err)
			var w idleWeight
			require.NoError(t, json.Unmarshal(printed, &w))
			t.Logf("REPORT %d idle consumers: %.2f goroutines and %.1f kB each, %.1f MiB the whole process", idleConsumers, w.Goroutines, w.Kilobytes, w.Mebibytes)
			// What the connections have comes on top: less than half a goroutine each.
			assert.LessOrEqual(t, w.Goroutines, c.most.Goroutines+0.5)
			if !underRace { // which takes extra memory
				assert.LessOrEqual(t, w.Kilobytes, c.most.Kilobytes)
				assert.LessOrEqual(t, w.Mebibytes, c.most.Mebibytes)
			}
		})
	}
}

// idleConsumersIn starts consumers on a hundred queues, has them handle five messages each,
// and weighs this process when they wait for more. With retried each message fails once,
// and its copy waits at the broker from then on.
func idleConsumersIn(url string, retried bool) (w idleWeight, err error) {
	const queues, messages = idleConsumers / 10, 5 * idleConsumers
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Hour), Strategy: retry.StrategyRepublish}
	base := weigh()

	var up, handled atomic.Int64
	allUp, allHandled := make(chan struct{}), make(chan struct{})
	conn, err := client.Connect(ctx, url, client.Config{Logger: quiet, OnEvent: func(e client.Event) {
		if e.Kind == client.EventUp && e.Op == "consume" && up.Add(1) == idleConsumers {
			close(allUp)
		}
	}})
	if err != nil {
		return w, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.Background())) }()
	var work []declare.QuorumQueue
	for i := range queues {
		work = append(work, declare.QuorumQueue{Name: fmt.Sprintf("work-%d", i), DeliveryLimit: 20})
	}
	topology, err := retry.Topology(policy, work...)
	if err != nil {
		return w, err
	}
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return w, err
	}
	var h client.Handler = client.HandlerFunc(func(context.Context, *client.Delivery) error {
		if handled.Add(1) == messages {
			close(allHandled)
		}
		if retried {
			return errDeclined
		}
		return nil
	})
	if retried {
		h = retry.With(policy)(h)
	}
	var consuming sync.WaitGroup
	defer consuming.Wait()
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, idleConsumers)
	for i := range idleConsumers {
		consuming.Go(func() { ended <- conn.Consume(running, work[i%queues].Name, h, client.ConsumerConfig{}) })
	}
	if err := awaitConsumers(ctx, allUp, ended, "they consume"); err != nil {
		return w, err
	}
	if err := feed(ctx, url, work, messages/queues); err != nil {
		return w, err
	}
	if err := awaitConsumers(ctx, allHandled, ended, "all is handled"); err != nil {
		return w, err
	}
	for _, q := range work {
		for {
			info, err := declare.Inspect(ctx, conn.Management(), q.Name)
			if err != nil {
				return w, err
			}
			if info.Messages == 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	// Consumers rest after a while.
	for rested := time.Now().Add(time.Minute); float64(runtime.NumGoroutine()) > base.Goroutines+(idleGoroutines+0.5)*idleConsumers && time.Now().Before(rested); {
		time.Sleep(100 * time.Millisecond)
	}
	now := weigh()
	return idleWeight{(now.Goroutines - base.Goroutines) / idleConsumers, (now.Kilobytes - base.Kilobytes) / idleConsumers, now.Mebibytes}, nil
}

func awaitConsumers(ctx context.Context, done <-chan struct{}, ended <-chan error, what string) error {
	select {
	case <-done:
		return nil
	case err := <-ended:
		return fmt.Errorf("before %s a consumer ended: %w", what, err)
	case <-ctx.Done():
		return fmt.Errorf("before %s: %w", what, ctx.Err())
	}
}

// feed publishes by a connection that is closed again, so that it isn't weighed.
func feed(ctx context.Context, url string, work []declare.QuorumQueue, each int) error {
	conn, err := client.Connect(ctx, url, client.Config{Logger: quiet})
	if err != nil {
		return err
	}
	for _, q := range work {
		p, err := client.NewPublisher[[]byte](ctx, conn, address.Queue(q.Name), client.PublisherConfig{Codec: client.RawCodec{}})
		if err != nil {
			return errors.Join(err, conn.Close(ctx))
		}
		bodies := make([][]byte, each)
		for i := range bodies {
			bodies[i] = make([]byte, 256)
		}
		if err := errors.Join(p.PublishAll(ctx, bodies), p.Close(ctx)); err != nil {
			return errors.Join(err, conn.Close(ctx))
		}
	}
	return conn.Close(ctx)
}

// weigh measures this process once its goroutines and its heap don't shrink any more.
func weigh() idleWeight {
	var least idleWeight
	for i := range 40 {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		now := idleWeight{float64(runtime.NumGoroutine()), float64(m.HeapAlloc+m.StackInuse) / 1000, residentMebibytes(&m)}
		if i > 0 && now.Goroutines >= least.Goroutines && now.Kilobytes > 0.999*least.Kilobytes {
			break
		}
		least = now
		time.Sleep(50 * time.Millisecond)
	}
	return least
}

// residentMebibytes is the memory of this process as the kernel counts it. Where that can't
// be read, it is what the runtime has.
func residentMebibytes(m *runtime.MemStats) float64 {
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		if _, after, ok := strings.Cut(string(b), "VmRSS:"); ok {
			if kib, err := strconv.ParseFloat(strings.Fields(after)[0], 64); err == nil {
				return kib / 1024
			}
		}
	}
	return float64(m.Sys-m.HeapReleased) / (1 << 20)
}
