package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/stream"
)

// The node dies that leads a stream, and that its publisher and its consumer are connected
// to. Both go on with another replica: nothing that was confirmed is missing, and the
// consumer handles each offset once, in order. Then each node is restarted.
func TestAStreamGoesOnAfterANodeIsKilled(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		log := declare.Stream{Name: "log"}
		setup := connect(t, c, c.Nodes[0])
		_, err := declare.Apply(t.Context(), setup.Management(), declare.Topology{Queues: []declare.Queue{log}})
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = declare.DeleteQueue(context.Background(), setup.Management(), log.Name) })
		var first string
		poll(t, "the stream has a leader", func() bool { first = leader(t, c.Nodes[0], log.Name); return first != "" })
		led := nodeNamed(t, c, first)
		conn := connect(t, c, led, func(cfg *client.Config) { cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil)) })
		require.Equal(t, led.Name, conn.Broker().Node)

		var mu sync.Mutex
		handled, next, last := map[int]int{}, uint64(0), time.Time{}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		consumed := make(chan error, 1)
		go func() {
			consumed <- stream.Consume(ctx, conn, log.Name, client.JSON(func(ctx context.Context, n int) error {
				d, _ := client.DeliveryFrom(ctx)
				offset, _ := stream.OffsetOf(d)
				mu.Lock()
				defer mu.Unlock()
				assert.Equal(t, next, offset, "in order, and each once")
				next, last = offset+1, time.Now()
				handled[n]++
				return nil
			}), stream.Config{Consumer: "all", Offsets: &stream.MemoryStore{}})
		}()
		publisher, err := client.NewPublisher[int](t.Context(), conn, log.Address(), client.PublisherConfig{})
		require.NoError(t, err)
		accepted, unknown := map[int]bool{}, 0
		stop, published := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(published)
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond): // paces the flow
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				if publisher.Publish(ctx, n) == nil {
					accepted[n] = true
				} else {
					unknown++
				}
				cancel()
			}
		}()
		resumes := func() time.Duration {
			t.Helper()
			since := time.Now()
			// A message that the broker leaves unanswered is sent again after half a minute, and the
			// cluster needs time to elect a leader.
			poll(t, "messages are handled", func() bool {
				select {
				case err := <-consumed:
					require.FailNow(t, "the consumer has ended", "%v", err)
				default:
				}
				mu.Lock()
				defer mu.Unlock()
				return last.After(since)
			})
			return time.Since(since)
		}
		resumes()

		require.NoError(t, led.Kill(t.Context()))
		killed := time.Now()
		poll(t, "another leader", func() bool { l := leader(t, other(c, led), log.Name); return l != "" && l != led.Name })
		elected := time.Since(killed)
		took := resumes()
		assert.NotEqual(t, led.Name, conn.Broker().Node)
		require.NoError(t, led.Start(t.Context()))
		require.NoError(t, c.AwaitAll(t.Context()))
		if long {
			for _, n := range c.Nodes {
				require.NoError(t, n.Kill(t.Context()))
				require.NoError(t, n.Start(t.Context()))
				require.NoError(t, c.AwaitAll(t.Context()))
				resumes()
			}
		}
		close(stop)
		<-published
		poll(t, "all that was confirmed is handled", func() bool {
			mu.Lock()
			defer mu.Unlock()
			for n := range accepted {
				if handled[n] == 0 {
					return false
				}
			}
			return true
		})
		cancel()
		require.NoError(t, <-consumed)
		t.Logf("REPORT cluster %s, stream: %d confirmed, %d unknown, offset %d; a leader %.1f s after the kill, consuming %.2f s after that",
			c.Version, len(accepted), unknown, next, elected.Seconds(), took.Seconds())
	})
}

// A replica may have less of a stream than a consumer has handled, for example after the leader's node has died. That is
// no reason to take the consumer's position for wrong: it continues when the replica has caught up, or on another node.
func TestAReplicaThatLagsStopsNoConsumer(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		setup := connect(t, c, c.Nodes[0])
		_, err := declare.Apply(t.Context(), setup.Management(), declare.Topology{Queues: []declare.Queue{declare.Stream{Name: "lagging"}}})
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = declare.DeleteQueue(context.Background(), setup.Management(), "lagging") })
		var first string
		poll(t, "all replicas are up", func() bool {
			var q queueInfo
			first = leader(t, c.Nodes[0], "lagging")
			return first != "" && get(t, c.Nodes[0], "/queues/%2F/lagging", &q) == nil && len(q.Online) == len(c.Nodes)
		})
		led := nodeNamed(t, c, first)
		behind := other(c, led)
		publisher, err := client.NewPublisher[int](t.Context(), setup, address.Queue("lagging"), client.PublisherConfig{})
		require.NoError(t, err)
		publish := func(from, to int) {
			t.Helper()
			for n := from; n < to; n++ {
				require.NoError(t, publisher.Publish(t.Context(), n))
			}
		}
		var mu sync.Mutex
		var handled []int
		store := &stream.MemoryStore{}
		consume := func(first *rabbitmq.Node, logger *slog.Logger, edit ...func(*client.Config)) (until func(int)) {
			t.Helper()
			conn := connect(t, c, first, edit...)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				ended <- stream.Consume(ctx, conn, "lagging", client.JSON(func(_ context.Context, n int) error {
					mu.Lock()
					defer mu.Unlock()
					handled = append(handled, n)
					return nil
				}), stream.Config{Consumer: "all", Offsets: store, Logger: logger})
			}()
			return func(n int) {
				t.Helper()
				poll(t, "messages are handled", func() bool {
					select {
					case err := <-ended:
						require.FailNow(t, "the consumer has ended", "%v", err)
					default:
					}
					mu.Lock()
					defer mu.Unlock()
					return len(handled) == n
				})
				cancel()
				require.NoError(t, <-ended)
				mu.Lock()
				defer mu.Unlock()
				for i, n := range handled {
					require.Equal(t, i, n, "each once, in order")
				}
			}
		}
		lag := func() (stop func()) {
			t.Helper()
			out, err := led.Eval(t.Context(), fmt.Sprintf(`Self = self(), spawn(fun() ->
				Readers = [P || {_, P, _, _} <- supervisor:which_children(osiris_replica_reader_sup), is_pid(P),
					lists:any(fun(X) -> is_pid(X) andalso node(X) =:= '%s' end, tuple_to_list(sys:get_state(P)))],
				[erlang:suspend_process(P) || P <- Readers], register(lagger, self()), Self ! {readers, length(Readers)},
				receive stop -> ok end end), receive {readers, N} -> N after 30000 -> none end.`, behind.Name))
			require.NoError(t, err)
			require.Equal(t, "1", strings.TrimSpace(string(out)), "what sends the stream to the replica is suspended")
			return func() {
				t.Helper()
				_, err := led.Eval(t.Context(), "lagger ! stop, ok.")
				require.NoError(t, err)
			}
		}
		quiet := slog.New(slog.DiscardHandler)
		publish(0, 10)
		consume(behind, quiet)(10)

		catchUp := lag()
		publish(10, 20)
		consume(led, quiet)(20)
		waiting := make(chan string, 1000)
		log := slog.New(slog.NewTextHandler(lines(waiting), nil))
		until := consume(behind, log, func(cfg *client.Config) { cfg.Endpoints = nil })
		poll(t, "the consumer waits for the replica", func() bool {
			select {
			case line := <-waiting:
				return strings.Contains(line, "may be behind the others")
			default:
				return false
			}
		})
		publish(20, 30)
		catchUp()
		until(30)

		catchUp = lag()
		publish(30, 40)
		consume(led, quiet)(40)
		publish(40, 50)
		consume(behind, quiet)(50) // from another node
		catchUp()
	})
}

// lines has each line that is logged.
type lines chan<- string

func (l lines) Write(b []byte) (int, error) {
	select {
	case l <- string(b):
	default:
	}
	return len(b), nil
}
