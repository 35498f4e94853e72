package hopbackotel_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	noopmetric "go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/live"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/rpc"
)

// TestMetricsOfRetriesAndDeaths with each strategy: one order fails three times and succeeds,
// another is declined.
func TestMetricsOfRetriesAndDeaths(t *testing.T) {
	forEachStrategy(t, func(t *testing.T, version string, strategy retry.Strategy) {
		synctest.Test(t, func(t *testing.T) {
			l := newLab()
			broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
			cfg := l.config(t, hopbackotel.Config{})
			cfg.Dial = broker.Dial
			conn, err := client.Connect(t.Context(), broker.URL(), cfg)
			require.NoError(t, err)
			p := policy
			p.Strategy = strategy
			stuck := make(chan struct{})
			shop := open(t, t.Context(), conn, p, func(ctx context.Context, d *client.Delivery) error {
				switch id := d.Message().Properties.MessageID; {
				case id == "declined":
					return client.DeadLetter{Reason: "declined"}
				case id == "stuck":
					<-stuck
				case retry.Attempt(ctx) < 4:
					time.Sleep(50 * time.Millisecond)
					return fmt.Errorf("charge: %w", context.DeadlineExceeded)
				}
				return nil
			})
			pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, pub.PublishAll(t.Context(), []*client.Message{order("o-1"), order("declined")}))
			time.Sleep(30 * time.Second)
			require.NoError(t, pub.PublishAll(t.Context(), []*client.Message{order("stuck"), order("o-2")}))
			require.Error(t, pub.Publish(t.Context(), &client.Message{Annotations: map[any]any{"bad": 1}}))
			time.Sleep(30 * time.Second)
			synctest.Wait()

			points := l.metrics(t)
			reason := string(strategy)
			late := "3: 0.000"
			if strategy == retry.StrategyNative {
				late = "3: 0.003"
			}
			for name, want := range map[string]string{
				"messaging.client.sent.messages{orders,publish}":                 "4",
				"messaging.client.sent.messages{*argument.Error,orders,publish}": "1",
				"messaging.client.consumed.messages{orders,process}":             "6",
				"messaging.process.duration{timeout,orders,process}":             "3: 0.150",
				"messaging.process.duration{declined,orders,process}":            "1: 0.000",
				"messaging.process.duration{orders,process}":                     "1: 0.000",
				"messaging.client.operation.duration{orders,settle}":             "5: 0.000",
				"hopback.retries{timeout," + reason + ",orders}":                 "3",
				"hopback.deaths{declined,orders}":                                "1",
				"hopback.retry.lateness{" + reason + ",orders}":                  late,
				"hopback.handling{orders}":                                       "1",
				"hopback.handling.oldest{orders}":                                "30.000",
				"hopback.unsettled{orders}":                                      "2",
				"hopback.ready{orders}":                                          "1",
				"hopback.forwarding{orders}":                                     "0",
				"hopback.forwarding.stalled{orders}":                             "0",
				"hopback.idle{orders}":                                           "30.000",
				"hopback.unconfirmed{orders}":                                    "0",
				"hopback.queued{orders}":                                         "0",
				"hopback.publishers{orders}":                                     "1",
				"hopback.consumers{true,orders}":                                 "1",
				"hopback.connections{}":                                          "1",
				"hopback.connections.blocked{}":                                  "0",
				"hopback.connections.lost{}":                                     "0",
				"hopback.reconnects{}":                                           "0",
				"hopback.blocked.time{}":                                         "0.000",
			} {
				assert.Equal(t, want, points[name], name)
			}
			_, settled, _ := strings.Cut(points["hopback.settlement.range{}"], ": ")
			assert.GreaterOrEqual(t, seconds(t, settled), 5.0, "all that were settled, and replies of the management")
			require.Contains(t, points, "hopback.sessions{}")

			broker.SetMemoryAlarm(true)
			time.Sleep(5 * time.Second)
			require.Equal(t, "1", l.metrics(t)["hopback.connections.blocked{}"])
			broker.SetMemoryAlarm(false)
			close(stuck)
			time.Sleep(time.Minute)
			for _, c := range broker.Connections() {
				c.Cut()
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			shop.stop()
			require.NoError(t, conn.Close(t.Context()))
			points = l.metrics(t)
			for name, want := range map[string]string{
				"hopback.connections.lost{}": "1", "hopback.reconnects{}": "1", "hopback.connections{}": "0",
			} {
				assert.Equal(t, want, points[name], name)
			}
			require.NotContains(t, points, "hopback.handling{orders}", "no consumer lives")
			require.InDelta(t, 5, seconds(t, points["hopback.blocked.time{}"]), 0.1, "it stays when the Conn is closed")
		})
	})
}

// TestHandlersOfSeveralConsumers of a queue are counted together, and the first of them is
// the oldest, whichever connection has it.
func TestHandlersOfSeveralConsumers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := l.config(t, hopbackotel.Config{})
		cfg.Dial = broker.Dial
		release := make(chan struct{})
		stuck := func(context.Context, *client.Delivery) error { <-release; return nil }
		var shops []*shop
		var conns []*client.Conn
		for range 2 {
			conn, err := client.Connect(t.Context(), broker.URL(), cfg)
			require.NoError(t, err)
			conns = append(conns, conn)
			shops = append(shops, open(t, t.Context(), conn, policy, stuck))
		}
		points := l.metrics(t)
		require.Equal(t, []string{"0", "0.000"}, []string{points["hopback.handling{orders}"], points["hopback.handling.oldest{orders}"]})
		pub, err := client.NewPublisher[*client.Message](t.Context(), conns[0], address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		for range 2 { // one for each consumer, which has one handler
			require.NoError(t, pub.Publish(t.Context(), order("o")))
			time.Sleep(10 * time.Second)
		}
		points = l.metrics(t)
		require.Equal(t, []string{"2", "20.000"}, []string{points["hopback.handling{orders}"], points["hopback.handling.oldest{orders}"]})
		close(release)
		synctest.Wait()
		points = l.metrics(t)
		require.Equal(t, []string{"0", "0.000"}, []string{points["hopback.handling{orders}"], points["hopback.handling.oldest{orders}"]})
		for i, s := range shops {
			s.stop()
			require.NoError(t, conns[i].Close(t.Context()))
		}
	})
}

func seconds(t *testing.T, s string) float64 {
	var f float64
	_, err := fmt.Sscan(s, &f)
	require.NoError(t, err)
	return f
}

// TestMillionRoutingKeys: the number of series is bounded, no matter which names messages carry.
// The calls are those that a Conn makes.
func TestMillionRoutingKeys(t *testing.T) {
	l := newLab(sdktrace.WithSampler(sdktrace.NeverSample()))
	in := l.config(t, hopbackotel.Config{MaxNames: 50}).Instrument
	n := 1_000_000
	if raced || testing.Short() {
		n = 20_000
	}
	ctx := context.Background()
	began := time.Now()
	for i := range n {
		name := fmt.Sprintf("name-%d", i)
		m := &client.Message{Properties: &client.Properties{}}
		to, err := address.Exchange("shop", name).Build()
		require.NoError(t, err)
		m.Properties.To = &to
		in.Publish(ctx, instrument.NewSending(address.Address{}, m)).Published(nil)
	}
	t.Logf("REPORT %d routing keys: %v a message", n, time.Since(began)/time.Duration(n))
	for i := range 2000 {
		name := fmt.Sprintf("name-%d", i)
		in.Publish(ctx, instrument.NewSending(address.Queue(name), &client.Message{})).Published(errors.New(name))
		_, h := in.Handle(ctx, client.NewDelivery(name, &client.Message{Annotations: map[any]any{"x-opt-hopback-attempt": foreign + ";1;1;" + name}}))
		h.Decided(instrument.Decision{Kind: instrument.DecisionRetry, Reason: name, Err: errors.New(name)})
		h.Handled(errors.New(name))
		h.Settling(instrument.Settlement{Kind: instrument.SettlementModified, DeadLetter: true, Reason: name})
		h.Settled(nil)
	}
	series := map[string]int{}
	for name := range l.metrics(t) {
		series[name[:strings.IndexByte(name, '{')]]++
	}
	t.Logf("REPORT series: %v", series)
	for name, n := range series {
		// Where queues and lanes are both beyond the bound, each of them has one more.
		assert.LessOrEqual(t, n, 2*51, name)
	}
	require.NotEmpty(t, series)
}

// TestHostileMessages: a message with any content is handled, and its span is valid.
func TestHostileMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, value := range []any{
			"", "x", ";;;", foreign, foreign + ";1;1;", foreign + ";9223372036854775807;1;lane", foreign + ";-9223372036854775808;1;lane", foreign + ";1;-1;lane",
			foreign + ";1;9223372036854775807;lane", "00-00000000000000000000000000000000-0000000000000000-00;1;1;x", strings.Repeat(foreign, 1000),
			strings.ToUpper(foreign) + ";1;1;x", "ff" + foreign[2:] + ";1;1;x", foreign + "-more;1;1;x", "00-" + strings.Repeat("é", 26) + ";1;1;x", foreign + ";1;1;\xff",
			nil, 1, []byte(foreign), []any{foreign}, map[any]any{"a": 1},
		} {
			for _, o := range []hopbackotel.Config{{}, {OneTrace: true}} {
				l := newLab()
				in := l.config(t, o).Instrument
				m := &client.Message{
					Annotations:           map[any]any{"x-opt-hopback-attempt": value, "x-opt-traceparent": value, "x-exchange": value, "x-routing-key": value, 7: value},
					ApplicationProperties: map[string]any{"traceparent": value, "tracestate": value, retry.CountProperty: value},
					Properties:            &client.Properties{MessageID: value, CorrelationID: value},
				}
				ctx, h := in.Handle(t.Context(), client.NewDelivery("\xff", m))
				require.True(t, trace.SpanContextFromContext(ctx).IsValid())
				for _, err := range []error{nil, errors.New("\xff"), endless{}, silent{}, (*endless)(nil), retry.After(time.Second, nil), client.DeadLetter{}, errors.Join(endless{}, endless{})} {
					h.Decided(instrument.Decision{Kind: instrument.DecisionRetry, Err: err})
				}
				h.Handled(endless{})
				h.Settling(instrument.Settlement{})
				h.Settled(silent{})
				require.Len(t, l.spans.GetSpans(), 2)
			}
		}
	})
}

// endless unwraps to itself.
type endless struct{}

func (e endless) Error() string { return "endless" }
func (e endless) Unwrap() error { return e }

// silent has an Error that panics, and can't be compared.
type silent []int

func (silent) Error() string { panic("silent") }

// TestBadConfigs are refused before anything is set.
func TestBadConfigs(t *testing.T) {
	cfg := client.Config{}
	var bad *argument.Error
	require.ErrorAs(t, hopbackotel.Instrument(nil, hopbackotel.Config{}), &bad)
	require.ErrorAs(t, hopbackotel.Instrument(&cfg, hopbackotel.Config{MaxNames: -1}), &bad)
	require.Nil(t, cfg.Instrument)
	require.NoError(t, hopbackotel.Instrument(&cfg, hopbackotel.Config{}), "the global providers")
	require.ErrorAs(t, hopbackotel.Instrument(&cfg, hopbackotel.Config{}), &bad)
}

// TestWithoutAnSDK nothing is injected, and nothing fails.
func TestWithoutAnSDK(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := client.Config{Dial: broker.Dial, Logger: quiet}
		require.NoError(t, hopbackotel.Instrument(&cfg, hopbackotel.Config{TracerProvider: nooptrace.NewTracerProvider(), MeterProvider: noopmetric.NewMeterProvider()}))
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		attempts := 0
		p := policy
		p.Strategy = retry.StrategyNative
		shop := open(t, t.Context(), conn, p, func(_ context.Context, d *client.Delivery) error {
			assert.Nil(t, d.Property("traceparent"))
			assert.Nil(t, d.Annotation("x-opt-hopback-attempt"))
			if attempts++; attempts < 3 {
				return errBank
			}
			return nil
		})
		pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, pub.Publish(t.Context(), order("o-1")))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, 3, attempts)
		shop.stop()
		require.NoError(t, conn.Close(t.Context()))
	})
}

// Of a message that isn't sampled; of go-amqp and the client nothing is counted.
func TestAllocations(t *testing.T) {
	l := newLab(sdktrace.WithSampler(sdktrace.NeverSample()))
	in := l.config(t, hopbackotel.Config{}).Instrument
	ctx := context.Background()
	to := address.Queue("orders")
	message := &client.Message{Properties: &client.Properties{MessageID: "o-1"}, Data: [][]byte{[]byte("body")}}
	publish := func() {
		m := *message
		in.Publish(ctx, instrument.NewSending(to, &m)).Published(nil)
	}
	published := *message
	in.Publish(ctx, instrument.NewSending(to, &published)).Published(nil)
	require.Contains(t, published.ApplicationProperties, "traceparent")
	d := client.NewDelivery("orders", &published)
	consume := func() {
		_, h := in.Handle(ctx, d)
		h.Handled(nil)
		h.Settling(instrument.Settlement{Kind: instrument.SettlementAccepted})
		h.Settled(nil)
	}
	// m of publish is one of these, the Sending another, and two are a map. A Conn doesn't
	// make these for each message (TestAllocationsOfProperties of package client). The client
	// makes one more for each delivery.
	sent, handled := testing.AllocsPerRun(1000, publish)-4, testing.AllocsPerRun(1000, consume)+1
	t.Logf("REPORT allocations of traces that aren't sampled: %v to publish, %v to consume", sent, handled)
	if !raced {
		require.LessOrEqual(t, sent+handled, 10.0, "for a message that is published and consumed")
	}
}

// Counters are observed, so each Instrument tells its own numbers; the provider adds them
// up.
func TestMetricsOfTwoInstrumentsAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		for range 2 {
			cfg := l.config(t, hopbackotel.Config{})
			cfg.Dial = broker.Dial
			conn, err := client.Connect(t.Context(), broker.URL(), cfg)
			require.NoError(t, err)
			defer func() { require.NoError(t, conn.Close(context.Background())) }()
			_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
			require.NoError(t, err)
			pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, pub.Publish(t.Context(), order("o-1")))
			require.NoError(t, pub.Publish(t.Context(), order("o-2")))
		}
		assert.Equal(t, "4", l.metrics(t)["messaging.client.sent.messages{orders,publish}"])
		assert.Equal(t, "4", l.metrics(t)["messaging.client.sent.messages{orders,publish}"], "once more")
	})
}

// A requester and the calls that wait for it are measured by its address.
func TestMetricsOfRequesters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := l.config(t, hopbackotel.Config{})
		cfg.Dial = broker.Dial
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close(context.Background())) }()
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "sums", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		q, err := rpc.NewRequester[int, int](t.Context(), conn, address.Queue("sums"), rpc.RequesterConfig{})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = q.Call(ctx, 1)
		}()
		synctest.Wait()
		points := l.metrics(t)
		require.Equal(t, "1", points["hopback.requesters{true,sums}"], "%v", points)
		require.Equal(t, "0", points["hopback.requesters{false,sums}"])
		require.Equal(t, "1", points["hopback.calls{sums}"])
		cancel()
		<-done
		require.NoError(t, q.Close(t.Context()))
		require.NotContains(t, l.metrics(t), "hopback.calls{sums}")
	})
}

// A worker's partitions are those that it handles; the sum over all workers is 1 for each.
func TestMetricsOfPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		group := partition.Group{Name: "orders", Partitions: 4}
		labs := []*lab{newLab(), newLab()}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, len(labs))
		for i, l := range labs {
			cfg := l.config(t, hopbackotel.Config{})
			cfg.Dial = broker.Dial
			conn, err := client.Connect(t.Context(), broker.URL(), cfg)
			require.NoError(t, err)
			defer func() { require.NoError(t, conn.Close(context.Background())) }()
			topology, err := group.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
			require.NoError(t, err)
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()})
			_, err = declare.Apply(t.Context(), conn.Management(), topology)
			require.NoError(t, err)
			go func() {
				done <- partition.Consume(ctx, conn, group, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), partition.Config{Worker: fmt.Sprint("w", i)})
			}()
		}
		time.Sleep(10 * time.Second)
		owned := 0
		for _, queue := range group.Queues() {
			name := "hopback.partitions{" + queue + "}"
			values := []string{labs[0].metrics(t)[name], labs[1].metrics(t)[name]}
			assert.ElementsMatch(t, []string{"0", "1"}, values, queue)
			if values[0] == "1" {
				owned++
			}
		}
		assert.Equal(t, 2, owned)
		stop()
		for range labs {
			require.NoError(t, <-done)
		}
	})
}

// Package live counts the handlers that run for too long, by queue, while the consumer runs.
func TestMetricsOfStuckHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := l.config(t, hopbackotel.Config{})
		cfg.Dial = broker.Dial
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		release := make(chan struct{})
		h := live.With(conn, live.Config{StuckAfter: time.Minute})(client.HandlerFunc(func(context.Context, *client.Delivery) error { <-release; return nil }))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- conn.Consume(ctx, "orders", h, client.ConsumerConfig{Concurrency: 2}) }()
		pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		for _, want := range []string{"0", "1", "2"} { // the second comes 50 s after the first
			require.NoError(t, pub.Publish(t.Context(), order("o")))
			time.Sleep(50 * time.Second)
			require.Equal(t, want, l.metrics(t)["hopback.handling.stuck{orders}"])
		}
		close(release)
		synctest.Wait()
		require.Equal(t, "0", l.metrics(t)["hopback.handling.stuck{orders}"])
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, conn.Close(t.Context()))
	})
}
