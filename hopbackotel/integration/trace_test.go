package integration

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const (
	foreignTrace = "0af7651916cd43dd8448eb211c80319c"
	foreign      = "00-" + foreignTrace + "-b7ad6b7169203331-01"
)

// row is an attempt as it should be.
type row struct {
	attempt     int64
	asked, next float64 // seconds
	failed      bool
	outcome     string
}

// TestOrderThatFailsThrice and succeeds: every attempt is a span that links to the creation
// and to the attempt before, whichever way the message waits. In memory the times are
// exact; here a retry is early by no more than the clock is uncertain, and late by less than the
// machine's delays.
func TestOrderThatFailsThrice(t *testing.T) {
	forEachBroker(t, func(t *testing.T, version, url string) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && version == "4.0" {
				continue
			}
			waits := map[retry.Strategy]string{retry.StrategyRepublish: "accepted", retry.StrategyDeadLetter: "modified", retry.StrategyNative: "modified"}[strategy]
			for _, oneTrace := range []bool{false, true} {
				name := string(strategy)
				if oneTrace {
					name += ", one trace"
				}
				t.Run(name, func(t *testing.T) {
					p := retry.Policy{MaxRetries: 3, Backoff: retry.Delays(300*time.Millisecond, 600*time.Millisecond, 300*time.Millisecond), Strategy: strategy, Names: retry.Names{Prefix: strings.ReplaceAll(name, ", ", "-") + "."}}
					queue := "orders " + name
					l := connect(t, url, hopbackotel.Config{OneTrace: oneTrace})
					handled := make(chan struct{})
					l.consume(t, queue, p, func(ctx context.Context, _ *client.Delivery) error {
						if retry.Attempt(ctx) < 4 {
							return errors.New("the bank is down")
						}
						close(handled)
						return nil
					})
					pub, err := client.NewPublisher[*client.Message](within(t), l.conn, address.Queue(queue), client.PublisherConfig{})
					require.NoError(t, err)
					ctx, span := l.traces.Tracer("the program").Start(within(t), "checkout")
					require.NoError(t, pub.Publish(ctx, client.NewMessage([]byte("an order"))))
					span.End()
					await(t, handled)
					l.close(t)

					spans := l.spans.GetSpans()
					creation := named(spans, "publish "+queue)
					require.Len(t, creation, 1)
					attempts, settles := named(spans, "process "+queue), named(spans, "settle "+queue)
					require.Len(t, attempts, 4)
					require.Len(t, settles, 4)
					if strategy == retry.StrategyRepublish {
						require.Len(t, named(spans, "publish "+p.Names.Prefix+"retry_exchange:"), 3)
					}
					for i, want := range []row{
						{1, 0, 0.3, true, waits}, {2, 0.3, 0.6, true, waits}, {3, 0.6, 0.3, true, waits}, {4, 0.3, 0, false, "accepted"},
					} {
						x := attempts[i]
						assert.Equal(t, want.attempt, value(x, "hopback.attempt").AsInt64())
						assert.Equal(t, want.failed, x.Status.Code == codes.Error)
						assert.Equal(t, want.outcome, value(settles[i], "hopback.outcome").AsString())
						assert.Equal(t, x.SpanContext.SpanID(), settles[i].Parent.SpanID())
						assert.Equal(t, creation[0].SpanContext.SpanID(), x.Links[0].SpanContext.SpanID())
						assert.Equal(t, oneTrace, x.SpanContext.TraceID() == creation[0].SpanContext.TraceID())
						assert.Equal(t, trace.SpanKindConsumer, x.SpanKind)
						if want.next > 0 {
							assert.Equal(t, "retry", value(x, "hopback.decision").AsString())
							assert.Equal(t, string(strategy), value(x, "hopback.strategy").AsString())
							assert.Equal(t, want.next, value(x, "hopback.delay.asked").AsFloat64())
						}
						if i == 0 {
							assert.Len(t, x.Links, 1)
							continue
						}
						assert.Equal(t, attempts[i-1].SpanContext.SpanID(), x.Links[1].SpanContext.SpanID())
						assert.Equal(t, want.asked, value(x, "hopback.attempt.delay.asked").AsFloat64())
						had := value(x, "hopback.attempt.delay.had").AsFloat64()
						t.Logf("REPORT %s on %s: attempt %d was to wait %v s and has waited %.3f s", name, version, want.attempt, want.asked, had)
						early := 0.002 // times in messages are whole milliseconds
						if strategy == retry.StrategyNative {
							early = 0.1 // the broker's clock is known to within the time that a message takes to come back
						}
						assert.GreaterOrEqual(t, had, want.asked-early)
						assert.Less(t, had, want.asked+patience.Seconds())
						assert.Less(t, attempts[i-1].EndTime, x.StartTime)
					}
				})
			}
		}
	})
}

// TestForeignTraceGoesOn through hops, the dead-letter queue and a replay, by a copy and by
// the broker's move.
func TestForeignTraceGoesOn(t *testing.T) {
	forEachBroker(t, func(t *testing.T, version, url string) {
		for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
			if strategy == retry.StrategyNative && version == "4.0" {
				continue
			}
			for where, put := range map[string]func(*client.Message){
				"property":   func(m *client.Message) { m.ApplicationProperties = map[string]any{"traceparent": foreign} },
				"annotation": func(m *client.Message) { m.Annotations = map[any]any{"x-opt-traceparent": foreign} },
			} {
				for _, byMove := range []bool{false, true} {
					kind := map[bool]string{false: "copy", true: "move"}[byMove]
					t.Run(strings.Join([]string{string(strategy), where, kind}, ", "), func(t *testing.T) {
						name := string(strategy) + where + kind
						p := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond), Strategy: strategy, ReplayByMove: byMove, Names: retry.Names{Prefix: name + "."}}
						deaths := 2 // the attempt that the message dies of
						if byMove && strategy == retry.StrategyRepublish {
							deaths, p.RetryIf = 1, func(error) bool { return false } // a copy's counter can't be moved back
						}
						queue := "orders " + name
						l := connect(t, url, hopbackotel.Config{OneTrace: where == "annotation"})
						dead, handled := make(chan struct{}), make(chan struct{})
						calls := 0
						l.consume(t, queue, p, func(context.Context, *client.Delivery) error {
							if calls++; calls > deaths {
								close(handled)
								return nil
							}
							if calls == deaths {
								close(dead)
							}
							return errors.New("the bank is down")
						})
						theirs, err := client.Connect(within(t), url, client.Config{Logger: quiet})
						require.NoError(t, err)
						defer func() { assert.NoError(t, theirs.Close(within(t))) }()
						pub, err := client.NewPublisher[*client.Message](within(t), theirs, address.Queue(queue), client.PublisherConfig{})
						require.NoError(t, err)
						m := client.NewMessage([]byte("an order"))
						put(m)
						require.NoError(t, pub.Publish(within(t), m))
						await(t, dead)
						d, err := desk.New(theirs, desk.Config{Logger: quiet})
						require.NoError(t, err)
						require.Eventually(t, func() bool {
							report, err := d.Replay(within(t), desk.ReplayConfig{Queue: p.Names.DeadLetterQueue(queue), All: true})
							if err != nil || report.Replayed == 0 {
								return false
							}
							assert.EqualValues(t, 1, report.Replayed)
							assert.Equal(t, byMove, report.Moved == 1)
							return true
						}, patience, 50*time.Millisecond, "it is in the dead-letter queue soon")
						await(t, handled)
						l.close(t)
						attempts := named(l.spans.GetSpans(), "process "+queue)
						require.Len(t, attempts, deaths+1)
						for i, x := range attempts {
							assert.Equal(t, foreignTrace, x.Links[0].SpanContext.TraceID().String())
							assert.Equal(t, where == "annotation", x.SpanContext.TraceID().String() == foreignTrace)
							if i > 0 {
								assert.Equal(t, attempts[i-1].SpanContext.SpanID(), x.Links[1].SpanContext.SpanID())
							}
						}
					})
				}
			}
		}
	})
}

// lab is a program with OpenTelemetry's SDK and a connection.
type lab struct {
	spans  *tracetest.InMemoryExporter
	traces *sdktrace.TracerProvider
	conn   *client.Conn
	stop   func()
}

func connect(t *testing.T, url string, c hopbackotel.Config) *lab {
	t.Helper()
	l := &lab{spans: tracetest.NewInMemoryExporter()}
	l.traces = sdktrace.NewTracerProvider(sdktrace.WithSyncer(l.spans))
	c.TracerProvider = l.traces
	cfg := client.Config{Logger: quiet}
	require.NoError(t, hopbackotel.Instrument(&cfg, c))
	var err error
	l.conn, err = client.Connect(within(t), url, cfg)
	require.NoError(t, err)
	return l
}

func (l *lab) consume(t *testing.T, queue string, p retry.Policy, h client.HandlerFunc) {
	t.Helper()
	topology, err := retry.Topology(p, declare.QuorumQueue{Name: queue})
	require.NoError(t, err)
	_, err = declare.Apply(within(t), l.conn.Management(), topology)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.conn.Consume(ctx, queue, retry.With(p)(h), client.ConsumerConfig{}) }()
	l.stop = func() {
		cancel()
		assert.NoError(t, <-ended)
	}
}

func (l *lab) close(t *testing.T) {
	l.stop()
	require.NoError(t, l.conn.Close(within(t)))
}

func named(all tracetest.SpanStubs, prefix string) (some tracetest.SpanStubs) {
	for _, x := range all {
		if strings.HasPrefix(x.Name, prefix) {
			some = append(some, x)
		}
	}
	return some
}

func value(x tracetest.SpanStub, key attribute.Key) (v attribute.Value) {
	for _, kv := range x.Attributes {
		if kv.Key == key {
			v = kv.Value
		}
	}
	return v
}

func await(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		require.Fail(t, "it didn't come")
	}
}
