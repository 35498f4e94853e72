// Package integration tests the adapter against real brokers, RabbitMQ 4.3 and
// 4.0. A missing broker is a failure.
package integration

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
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
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/adapter/officialclient"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/proxy"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/retry"
)

// patience is how long a test waits for what should come soon.
const patience = 45 * time.Second

var brokers []*rabbitmq.Broker

func TestMain(m *testing.M) {
	flag.Parse()
	// The official client logs to the default logger, a line for each event that
	// these tests bring about.
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(run(m))
}

func run(m *testing.M) int {
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
	if code == 0 {
		// The official client's recovery sleeps for its back-off even when its
		// connection was closed during that time; only TestServeWaitsForRecovery has it on.
		if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/rabbitmq/rabbitmq-amqp-go-client/pkg/rabbitmqamqp.(*AmqpConnection).maybeReconnect")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// site is a virtual host that one test has to itself.
type site struct {
	own *client.Conn // for copies, if it is not conn
	*rabbitmq.Broker
	vhost string
	conn  *client.Conn // hopback's own, to declare and to look with
	proxy *proxy.Proxy // that the official client's connections go through
	addr  string       // of proxy
	// whole is held for reading while a connection is made, and for writing by
	// tests that cut connections. See dial.
	whole sync.RWMutex
}

var siteCount atomic.Int64

func forEachBroker(t *testing.T, test func(t *testing.T, s *site)) {
	t.Helper()
	t.Parallel()
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			s := &site{Broker: b, vhost: fmt.Sprintf("adapter-%x-%d", time.Now().UnixMilli(), siteCount.Add(1))}
			s.http(t, http.MethodPut, "/vhosts/"+s.vhost, nil)
			t.Cleanup(func() { s.http(t, http.MethodDelete, "/vhosts/"+s.vhost, nil) })
			var err error
			s.conn, err = client.Connect(within(t), s.url(), client.Config{Name: "observer-" + s.vhost, Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			t.Cleanup(func() {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				_ = s.conn.Close(ctx)
			})
			u, err := url.Parse(s.URL)
			require.NoError(t, err)
			s.proxy, err = proxy.New(u.Host)
			require.NoError(t, err)
			t.Cleanup(s.proxy.Close)
			s.addr = s.proxy.Addr()
			test(t, s)
		})
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (s *site) newer() bool { return s.Version != "4.0" }

func (s *site) url() string {
	u, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	u.Path = "/" + s.vhost
	return u.String()
}

// proxied is the same through the proxy.
func (s *site) proxied() string {
	u, err := url.Parse(s.url())
	if err != nil {
		panic(err)
	}
	u.Host = s.addr
	return u.String()
}

// dial connects without the official client's recovery. It isn't an
// Environment's NewConnection: version 1.0.0 has a data race between the end of
// that and the loss of the connection, which the race detector would report as
// ours. Dial has it, too, so no connection is cut before Dial has returned.
func (s *site) dial(ctx context.Context) (*rabbitmqamqp.AmqpConnection, error) {
	s.whole.RLock()
	defer s.whole.RUnlock()
	return rabbitmqamqp.Dial(ctx, s.proxied(), &rabbitmqamqp.AmqpConnOptions{RecoveryConfiguration: &rabbitmqamqp.RecoveryConfiguration{}})
}

// cut resets all connections of the official client.
func (s *site) cut() int {
	s.whole.Lock()
	defer s.whole.Unlock()
	return s.proxy.Cut()
}

// connection is one of the test's own, with the recovery given.
func (s *site) connection(t *testing.T, r rabbitmqamqp.RecoveryConfiguration) *rabbitmqamqp.AmqpConnection {
	t.Helper()
	conn, err := rabbitmqamqp.Dial(within(t), s.proxied(), &rabbitmqamqp.AmqpConnOptions{RecoveryConfiguration: &r})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// http calls the HTTP API and returns its answer.
func (s *site) http(t *testing.T, method, path string, reply any) {
	t.Helper()
	base, err := url.Parse(s.ManagementURL)
	require.NoError(t, err)
	user := base.User
	base.User = nil
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(base.String(), "/")+"/api"+path, bytes.NewReader(nil))
	require.NoError(t, err)
	password, _ := user.Password()
	req.SetBasicAuth(user.Username(), password)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.True(t, resp.StatusCode/100 == 2 || resp.StatusCode == http.StatusNotFound, "%s %s: %s %s", method, path, resp.Status, text)
	if reply != nil && resp.StatusCode/100 == 2 {
		require.NoError(t, json.Unmarshal(text, reply))
	}
}

// kill has the broker end all connections of the virtual host but the observer's,
// and returns how many it knew of: it lists new ones after some seconds.
func (s *site) kill(t *testing.T) int {
	t.Helper()
	s.whole.Lock()
	defer s.whole.Unlock()
	var list []struct {
		Name             string
		ClientProperties map[string]any `json:"client_properties"`
	}
	s.http(t, http.MethodGet, "/vhosts/"+s.vhost+"/connections", &list)
	n := 0
	for _, c := range list {
		if c.ClientProperties["product"] == "hopback" {
			continue
		}
		s.http(t, http.MethodDelete, "/connections/"+url.PathEscape(c.Name), nil)
		n++
	}
	return n
}

func (s *site) apply(t *testing.T, topology declare.Topology) {
	t.Helper()
	_, err := declare.Apply(within(t), s.conn.Management(), topology)
	require.NoError(t, err)
}

// work declares a work queue with all that the policy needs.
func (s *site) work(t *testing.T, policy retry.Policy, q declare.QuorumQueue) {
	t.Helper()
	topology, err := retry.Topology(policy, q)
	require.NoError(t, err)
	s.apply(t, topology)
}

// publish sends by the official client.
func (s *site) publish(t *testing.T, queue string, ms ...*client.Message) {
	t.Helper()
	conn := s.connection(t, rabbitmqamqp.RecoveryConfiguration{})
	defer func() { _ = conn.Close(within(t)) }()
	p, err := conn.NewPublisher(within(t), &rabbitmqamqp.QueueAddress{Queue: queue}, nil)
	require.NoError(t, err)
	for _, m := range ms {
		r, err := p.Publish(within(t), m)
		require.NoError(t, err)
		require.IsType(t, &rabbitmqamqp.StateAccepted{}, r.Outcome)
	}
	require.NoError(t, p.Close(within(t)))
}

// take consumes n messages of a queue by hopback's own consumer.
func (s *site) take(t *testing.T, queue string, n int) []*client.Message {
	t.Helper()
	got := make(chan *client.Message, n+100)
	stop := consumeWith(t, func(ctx context.Context) error {
		return s.conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message()
			return nil
		}), client.ConsumerConfig{Prefetch: 1})
	})
	defer stop()
	ms := make([]*client.Message, n)
	for i := range ms {
		ms[i] = next(t, got, "a message of "+queue)
	}
	return ms
}

// length is how many messages are ready in a queue.
func (s *site) length(t *testing.T, queue string) int {
	t.Helper()
	info, err := declare.Inspect(within(t), s.conn.Management(), queue)
	require.NoError(t, err)
	return int(info.Messages)
}

// consumeWith runs a consumer until stop is called, which wants its result to be
// nil, or the test ends.
func consumeWith(t *testing.T, consume func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- consume(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			assert.NoError(t, err)
		case <-time.After(patience):
			t.Error("the consumer doesn't end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// official runs Serve, with a connection and a consumer that are replaced when they are lost.
func (s *site) official(t *testing.T, queue string, credits int32, h client.Handler, cfg officialclient.Config) (stop func()) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.RecoveryPatience = 1 // dial has none
	return consumeWith(t, func(ctx context.Context) error {
		for ctx.Err() == nil {
			if err := s.serve(ctx, queue, credits, h, cfg); err != nil && !errors.Is(err, client.ErrConnectionLost) {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
		return nil
	})
}

func (s *site) serve(ctx context.Context, queue string, credits int32, h client.Handler, cfg officialclient.Config) error {
	conn, err := s.dial(ctx)
	if err != nil {
		return lost(ctx, err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	consumer, err := conn.NewConsumer(ctx, queue, &rabbitmqamqp.ConsumerOptions{InitialCredits: credits})
	if err != nil {
		return lost(ctx, err)
	}
	if err = officialclient.Serve(ctx, cmp.Or(s.own, s.conn), consumer, queue, h, cfg); err == nil {
		closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = consumer.Close(closing)
	}
	return err
}

func lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("%w: %w", client.ErrConnectionLost, err)
}

func next[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.Fail(t, "didn't come: "+what)
		panic("unreachable")
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, patience, 50*time.Millisecond, what)
}
