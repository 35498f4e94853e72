// Package interop tests what hopback does for workers that are written with other clients:
// amqp091-go over AMQP 0-9-1, go-amqp, the official client and qpid-proton over AMQP 1.0. Its
// tests run with RabbitMQ 4.3 and 4.0. A missing broker is a failure. Tests with qpid-proton are
// skipped where it isn't installed and can't be. The engine of internal/amqp meets proton without
// a broker, too. It belongs to the module bench, so that these clients aren't among what hopback needs.
package interop

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/retry"
)

const patience = 60 * time.Second

var brokers []*rabbitmq.Broker

// parallel is how many tests run at once. They mostly wait for brokers and for each other's clients.
const parallel = "6"

func TestMain(m *testing.M) {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		_ = flag.Set("test.parallel", parallel)
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the official client's
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if brokers, err = rabbitmq.Need(ctx, os.Stderr, "4.3", "4.0"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	for _, b := range brokers {
		if err := b.Release(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

// site is a virtual host that one test has to itself.
type site struct {
	*rabbitmq.Broker
	url  *url.URL
	conn *client.Conn
}

func forEachBroker(t *testing.T, test func(t *testing.T, s *site)) {
	t.Helper()
	t.Parallel()
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			u, err := url.Parse(b.URL)
			require.NoError(t, err)
			vhost := "foreign-" + strings.ToLower(rand.Text())
			u.Path = "/" + vhost
			s := &site{Broker: b, url: u}
			s.http(t, http.MethodPut, "/api/vhosts/"+vhost)
			t.Cleanup(func() { s.http(t, http.MethodDelete, "/api/vhosts/"+vhost) })
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			s.conn, err = client.Connect(ctx, u.String(), client.Config{Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			t.Cleanup(func() { _ = s.conn.Close(context.Background()) })
			test(t, s)
		})
	}
}

func (s *site) http(t *testing.T, method, path string) {
	t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, s.ManagementURL+path, nil)
	require.NoError(t, err)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}).Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	require.Less(t, resp.StatusCode, 300, "%s %s", method, path)
}

// consume runs a consumer of ours until the test ends.
func (s *site) consume(t *testing.T, queue string, h client.Handler, cfg client.ConsumerConfig) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.conn.Consume(ctx, queue, h, cfg) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
}

func poll(t *testing.T, what string, yes func() bool) {
	t.Helper()
	for began := time.Now(); !yes(); time.Sleep(20 * time.Millisecond) {
		require.Less(t, time.Since(began), patience, what)
	}
}

// attempts has the times and counts of each message's attempts, by body.
type attempts struct {
	mu    sync.Mutex
	times map[string][]time.Time
}

func (a *attempts) of(body string) []time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.times[body]
}

var errNotYet = errors.New("not yet")

// task fails as often as the body says: "name:2".
func (a *attempts) task(body []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times[string(body)] = append(a.times[string(body)], time.Now())
	var fails int
	_, count, _ := strings.Cut(string(body), ":")
	_, _ = fmt.Sscan(count, &fails)
	if len(a.times[string(body)]) <= fails {
		return errNotYet
	}
	return nil
}

// channel091 is a channel of amqp091-go.
func (s *site) channel091(t *testing.T) *amqp091.Channel {
	t.Helper()
	conn, err := amqp091.Dial(s.url.String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	require.NoError(t, err)
	return ch
}

// by091 is a worker of amqp091-go, which calls handle with each delivery.
func (s *site) by091(t *testing.T, queue string, handle func(ch *amqp091.Channel, d amqp091.Delivery)) {
	t.Helper()
	ch := s.channel091(t)
	require.NoError(t, ch.Qos(100, 0, false))
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	require.NoError(t, err)
	go func() {
		for d := range deliveries {
			handle(ch, d)
		}
	}()
}

// byGoAMQP is a worker of go-amqp, which rejects.
func (s *site) byGoAMQP(t *testing.T, queue string, a *attempts) {
	t.Helper()
	password, _ := s.url.User.Password()
	conn, err := amqp.Dial(t.Context(), "amqp://"+s.url.Host, &amqp.ConnOptions{HostName: "vhost:" + s.url.Path[1:], SASLType: amqp.SASLTypePlain(s.url.User.Username(), password)})
	require.NoError(t, err)
	session, err := conn.NewSession(t.Context(), nil)
	require.NoError(t, err)
	r, err := session.NewReceiver(t.Context(), "/queues/"+queue, &amqp.ReceiverOptions{Credit: 100})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); _ = conn.Close() })
	go func() {
		for {
			m, err := r.Receive(ctx, nil)
			if err != nil {
				return
			}
			if a.task(m.GetData()) != nil {
				_ = r.RejectMessage(ctx, m, nil)
			} else {
				_ = r.AcceptMessage(ctx, m)
			}
		}
	}()
}

// byOfficial is a worker of the official client, which discards with annotations.
func (s *site) byOfficial(t *testing.T, queue string, a *attempts) {
	t.Helper()
	env := rabbitmqamqp.NewEnvironment(s.url.String(), nil)
	conn, err := env.NewConnection(t.Context())
	require.NoError(t, err)
	consumer, err := conn.NewConsumer(t.Context(), queue, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); _ = env.CloseConnections(context.Background()) })
	go func() {
		for {
			d, err := consumer.Receive(ctx)
			if err != nil {
				return
			}
			if err := a.task(d.Message().GetData()); err != nil {
				_ = d.DiscardWithAnnotations(ctx, amqp.Annotations{"x-error": err.Error()})
			} else {
				_ = d.Accept(ctx)
			}
		}
	}()
}

// Workers of three clients do no more than reject. Central brings back what they reject as
// the decorator does: as often, as late, and into the same lanes.
func TestWorkersOfThreeClientsAreRetried(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(100*time.Millisecond, 200*time.Millisecond, 400*time.Millisecond)}
		forms := []string{"decorator", "amqp091-nack", "go-amqp-rejected", "official-discard"}
		decorated, err := retry.Topology(policy, declare.QuorumQueue{Name: forms[0]})
		require.NoError(t, err)
		cfg := retry.CentralConfig{Queues: forms[1:]}
		var work []declare.QuorumQueue
		for _, q := range forms[1:] {
			work = append(work, declare.QuorumQueue{Name: q})
		}
		central, err := retry.CentralTopology(policy, cfg, work...)
		require.NoError(t, err)
		for _, topology := range []declare.Topology{decorated, central} {
			_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
			require.NoError(t, err)
		}
		seen := map[string]*attempts{}
		for _, f := range forms {
			seen[f] = &attempts{times: map[string][]time.Time{}}
		}
		s.consume(t, "failed_queue", retry.Central(policy, cfg), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
		s.consume(t, forms[0], retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			return seen[forms[0]].task(d.Message().GetData())
		})), client.ConsumerConfig{})
		s.by091(t, forms[1], func(_ *amqp091.Channel, d amqp091.Delivery) {
			if seen[forms[1]].task(d.Body) != nil {
				_ = d.Nack(false, false)
			} else {
				_ = d.Ack(false)
			}
		})
		s.byGoAMQP(t, forms[2], seen[forms[2]])
		s.byOfficial(t, forms[3], seen[forms[3]])

		want := map[string]int{"ok:0": 1, "once:1": 2, "twice:2": 3, "three times:3": 4, "always:9": 4}
		ch := s.channel091(t)
		for _, f := range forms {
			for b := range want {
				require.NoError(t, ch.Publish("", f, false, false, amqp091.Publishing{Body: []byte(b), DeliveryMode: 2, MessageId: b, Headers: amqp091.Table{"tenant": "acme"}}))
			}
		}
		var table strings.Builder
		for _, f := range forms {
			dead := s.dead(t, f)
			d := retry.DeadLetterOf(dead)
			fmt.Fprintf(&table, "\n%-17s", f)
			for _, b := range []string{"ok:0", "once:1", "twice:2", "three times:3", "always:9"} {
				poll(t, f+" "+b, func() bool { return len(seen[f].of(b)) >= want[b] })
				at := seen[f].of(b)
				assert.Len(t, at, want[b], "%s %s", f, b)
				fmt.Fprintf(&table, " | %s %d", b, len(at))
				for i := 1; i < len(at); i++ {
					asked, had := []time.Duration{100, 200, 400}[i-1]*time.Millisecond, at[i].Sub(at[i-1])
					assert.GreaterOrEqual(t, had, asked-2*time.Millisecond, "%s %s", f, b)
					fmt.Fprintf(&table, " %d", had.Milliseconds())
				}
			}
			fmt.Fprintf(&table, " %s", d.Reason)
			assert.Equal(t, retry.ReasonExhausted, d.Reason, f)
			assert.Equal(t, 3, d.Retries, f)
			assert.Equal(t, [3]string{f, "", f}, [3]string{d.Queue, d.Exchange, d.RoutingKey})
			assert.Equal(t, "always:9", dead.Properties.MessageID)
			assert.Equal(t, "acme", dead.ApplicationProperties["tenant"])
			switch f {
			case "decorator", "official-discard":
				assert.Equal(t, errNotYet.Error(), d.Error)
			default:
				assert.Contains(t, d.Error, "without giving a reason")
			}
		}
		t.Logf("REPORT %s: attempts, and delays in ms:%s", s.FullVersion, &table)
	})
}

// dead takes the one dead letter of a work queue.
func (s *site) dead(t *testing.T, queue string) *client.Message {
	t.Helper()
	got := make(chan *client.Message, 10)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.conn.Consume(ctx, queue+".dead", client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message()
			return nil
		}), client.ConsumerConfig{})
	}()
	defer func() {
		cancel()
		assert.NoError(t, <-done)
	}()
	select {
	case m := <-got:
		return m
	case <-time.After(patience):
		require.FailNow(t, "no dead letter in "+queue+".dead")
		return nil
	}
}

// A worker over AMQP 0-9-1 publishes to the failed queue itself, with the headers that it
// has received and those with the reason, and counts in another header. A header that starts
// with "x-" is an annotation here. The count is kept, no matter who has written it.
func TestWorkersThatPublishTheirFailuresAreRetried(t *testing.T) {
	for _, counter := range []string{"count", "x-retry-count", "x-attempts"} {
		t.Run(counter, func(t *testing.T) {
			forEachBroker(t, func(t *testing.T, s *site) {
				policy := retry.Policy{
					MaxRetries: 3, Backoff: retry.Delays(50 * time.Millisecond),
					Rules: []retry.ErrorRule{{If: retry.OnHeader("kind", "fatal"), Do: retry.ActionDeadLetter}},
				}
				cfg := retry.CentralConfig{Queues: []string{"orders"}, Counter: counter, ReasonKey: "reason", TextKey: "x-exception", TypeKey: "x-exception-type"}
				topology, err := retry.CentralTopology(policy, cfg, declare.QuorumQueue{Name: "orders"})
				require.NoError(t, err)
				_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
				require.NoError(t, err)
				s.consume(t, "failed_queue", retry.Central(policy, cfg), client.ConsumerConfig{Prefetch: 1000, NoIsolation: true})
				var mu sync.Mutex
				var counts []any
				s.by091(t, "orders", func(ch *amqp091.Channel, d amqp091.Delivery) {
					mu.Lock()
					counts = append(counts, d.Headers[counter])
					mu.Unlock()
					headers := d.Headers
					if headers == nil {
						headers = amqp091.Table{}
					}
					headers["reason"], headers["x-exception"], headers["x-exception-type"] = "timeout", "gateway timed out", "TimeoutError"
					// The name of the queue as routing key, as a dead letter has it.
					err := ch.Publish("given_up_exchange", "orders", false, false, amqp091.Publishing{Headers: headers, Body: d.Body, DeliveryMode: 2, MessageId: d.MessageId})
					if err == nil {
						_ = d.Ack(false)
					}
				})
				ch := s.channel091(t)
				require.NoError(t, ch.Publish("", "orders", false, false, amqp091.Publishing{Body: []byte("a"), DeliveryMode: 2, MessageId: "a", Headers: amqp091.Table{counter: "1"}}))
				d := retry.DeadLetterOf(s.dead(t, "orders"))
				assert.Equal(t, [5]string{"exhausted", "3", "gateway timed out", "TimeoutError", "orders"}, [5]string{string(d.Reason), fmt.Sprint(d.Retries), d.Error, d.ErrorType, d.Queue})
				mu.Lock()
				assert.Equal(t, []string{"1", "2", "3"}, []string{fmt.Sprint(counts[0]), fmt.Sprint(counts[1]), fmt.Sprint(counts[2])})
				assert.Len(t, counts, 3)
				counts = nil
				mu.Unlock()

				require.NoError(t, ch.Publish("", "orders", false, false, amqp091.Publishing{Body: []byte("b"), DeliveryMode: 2, Headers: amqp091.Table{"kind": "fatal"}}))
				d = retry.DeadLetterOf(s.dead(t, "orders"))
				assert.Equal(t, retry.ReasonPermanent, d.Reason)
				assert.Zero(t, d.Retries)
			})
		})
	}
}

// A worker over AMQP 0-9-1 republishes with a header that counts, and the next attempt is a
// decorated worker's. RabbitMQ shows a header that begins with "x-" as an annotation, and
// any other as an application property. The decorator continues from the count, and a worker
// over AMQP 0-9-1 reads on from the decorator's.
func TestDecoratorGoesOnFromTheHeaderOfARepublishingWorker(t *testing.T) {
	for name, c := range map[string]struct{ header, arrives, next any }{
		"number": {int32(2), int32(2), int64(3)},
		"long":   {int64(2), int64(2), int64(3)},
		"text":   {"2", "2", "3"},
	} {
		t.Run(name, func(t *testing.T) {
			forEachBroker(t, func(t *testing.T, s *site) {
				policy := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(50 * time.Millisecond)}
				topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders"})
				require.NoError(t, err)
				_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
				require.NoError(t, err)
				seen := make(chan *client.Message, 10)
				s.consume(t, "orders", retry.With(policy)(client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
					seen <- d.Message()
					return errNotYet
				})), client.ConsumerConfig{})
				ch := s.channel091(t)
				require.NoError(t, ch.Publish("", "orders", false, false, amqp091.Publishing{
					Body: []byte("a"), DeliveryMode: 2, Headers: amqp091.Table{retry.CountProperty: c.header, "tenant": "acme"},
				}))
				var dead amqp091.Delivery
				poll(t, "it is dead", func() bool {
					var has bool
					dead, has, err = ch.Get("orders.dead", true)
					require.NoError(t, err)
					return has
				})
				require.Len(t, seen, 2, "the third attempt, and the last")
				first, last := <-seen, <-seen
				assert.Equal(t, c.arrives, first.Annotations[retry.CountProperty])
				assert.NotContains(t, first.ApplicationProperties, retry.CountProperty)
				assert.Equal(t, "acme", first.ApplicationProperties["tenant"])
				assert.Equal(t, 2, retry.Count(first))
				assert.NotContains(t, last.Annotations, retry.CountProperty)
				assert.Equal(t, c.next, last.ApplicationProperties[retry.CountProperty])
				assert.Equal(t, c.next, dead.Headers[retry.CountProperty], "what a worker over AMQP 0-9-1 reads")
				assert.Equal(t, "exhausted", dead.Headers[string(client.AnnotationReason)])
			})
		})
	}
}
