package hopbackotel_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	api "go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// A trace that another program has begun, and its parts.
const (
	foreign      = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	foreignTrace = "0af7651916cd43dd8448eb211c80319c"
	foreignSpan  = "b7ad6b7169203331"
)

// TestForeignTraceGoesOn from where W3C's draft and where RabbitMQ's Java client put it,
// through hops, the dead-letter queue and a replay.
func TestForeignTraceGoesOn(t *testing.T) {
	forEachStrategy(t, func(t *testing.T, version string, strategy retry.Strategy) {
		for name, put := range map[string]func(*client.Message){
			"property": func(m *client.Message) {
				m.ApplicationProperties = map[string]any{"traceparent": foreign, "tracestate": "vendor=1"}
			},
			"annotation": func(m *client.Message) {
				m.Annotations = map[any]any{"x-opt-traceparent": foreign, "x-opt-tracestate": "vendor=1"}
			},
		} {
			for _, c := range []struct{ oneTrace, byMove bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
				oneTrace := c.oneTrace
				synctest.Test(t, func(t *testing.T) {
					l := newLab()
					broker := hopbacktest.Start(t, hopbacktest.Config{Version: version})
					theirs, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet}) // no instrument
					require.NoError(t, err)
					cfg := l.config(t, hopbackotel.Config{OneTrace: oneTrace})
					cfg.Dial = broker.Dial
					conn, err := client.Connect(t.Context(), broker.URL(), cfg)
					require.NoError(t, err)
					p := policy
					p.Strategy, p.MaxRetries, p.ReplayByMove = strategy, 1, c.byMove
					before := 2
					if c.byMove && strategy == retry.StrategyRepublish {
						before, p.RetryIf = 1, func(error) bool { return false } // a copy's counter can't be moved back
					}
					up := false
					shop := open(t, t.Context(), conn, p, func(context.Context, *client.Delivery) error {
						if up {
							return nil
						}
						return errBank
					})
					pub, err := client.NewPublisher[*client.Message](t.Context(), theirs, address.Queue("orders"), client.PublisherConfig{})
					require.NoError(t, err)
					m := order("o-1")
					put(m)
					require.NoError(t, pub.Publish(t.Context(), m))
					time.Sleep(time.Minute)
					synctest.Wait()
					require.Len(t, broker.Queue("orders.dead").Messages(), 1)
					up = true
					d, err := desk.New(theirs, desk.Config{})
					require.NoError(t, err)
					report, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
					require.NoError(t, err)
					require.EqualValues(t, 1, report.Replayed)
					require.Equal(t, c.byMove, report.Moved == 1)
					time.Sleep(time.Minute)
					synctest.Wait()
					shop.stop()
					require.NoError(t, conn.Close(t.Context()))
					require.NoError(t, theirs.Close(t.Context()))

					var attempts []trace.SpanContext
					for _, x := range l.history().spans {
						if !strings.HasPrefix(x.Name, "process") {
							continue
						}
						require.Equal(t, foreignTrace, x.Links[0].SpanContext.TraceID().String(), "%s %v", name, oneTrace)
						require.Equal(t, foreignSpan, x.Links[0].SpanContext.SpanID().String())
						require.Equal(t, "vendor=1", x.Links[0].SpanContext.TraceState().String())
						if len(attempts) > 0 {
							require.Equal(t, attempts[len(attempts)-1].SpanID(), x.Links[1].SpanContext.SpanID(), "the attempt before")
						}
						require.Equal(t, oneTrace, x.SpanContext.TraceID().String() == foreignTrace)
						require.Equal(t, oneTrace, x.Parent.IsValid())
						attempts = append(attempts, x.SpanContext)
					}
					require.Len(t, attempts, before+1, "one after the replay")
				})
			}
		}
	})
}

// TestContextThatSomebodyHasSetStays: the publish span is linked to it.
func TestContextThatSomebodyHasSetStays(t *testing.T) {
	for _, propagator := range []propagation.TextMapPropagator{nil, propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})} {
		synctest.Test(t, func(t *testing.T) {
			l := newLab()
			broker, pub, done := published(t, l, hopbackotel.Config{Propagator: propagator})
			m := order("o-1")
			m.ApplicationProperties = map[string]any{"traceparent": foreign}
			require.NoError(t, pub.Publish(t.Context(), m))
			require.NoError(t, pub.PublishAll(t.Context(), []*client.Message{m}))
			got := broker.Queue("receipts").Messages()
			require.Len(t, got, 2)
			for i := range got {
				require.Equal(t, map[string]any{"traceparent": foreign}, got[i].ApplicationProperties)
			}
			done()
			links := 0
			for _, x := range l.history().spans {
				for _, to := range x.Links {
					if to.SpanContext.TraceID().String() == foreignTrace {
						links++
					}
				}
			}
			require.Equal(t, 2, links)
		})
	}
}

// A context that can't be read is replaced, and baggage alone is none.
func TestWhatIsNoContextIsReplaced(t *testing.T) {
	both := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	for _, propagator := range []propagation.TextMapPropagator{nil, both} {
		synctest.Test(t, func(t *testing.T) {
			l := newLab()
			broker, pub, done := published(t, l, hopbackotel.Config{Propagator: propagator})
			ctx := both.Extract(t.Context(), propagation.MapCarrier{"baggage": "tenant=1"})
			ctx, span := l.tracer().Start(ctx, "checkout")
			zero := "00-" + strings.Repeat("0", 32) + "-" + strings.Repeat("0", 16) + "-01"
			given := []map[string]any{
				{"traceparent": "rubbish"}, {"traceparent": zero, "tracestate": "a=b"}, {"traceparent": strings.ToUpper(foreign)}, {"baggage": "tenant=42"},
			}
			for _, properties := range given {
				m := order("o-1")
				m.ApplicationProperties = properties
				require.NoError(t, pub.Publish(ctx, m))
				require.NoError(t, pub.PublishAll(ctx, []*client.Message{m}))
			}
			hidden := order("o-1") // the annotation is read first
			hidden.Annotations = map[any]any{"x-opt-traceparent": "rubbish"}
			require.NoError(t, pub.Publish(ctx, hidden))
			span.End()
			got := broker.Queue("receipts").Messages()
			require.Len(t, got, 2*len(given)+1)
			for i := range got {
				p := got[i].ApplicationProperties
				parent, _ := p["traceparent"].(string)
				require.Contains(t, parent, span.SpanContext().TraceID().String(), "%d", i)
				require.NotEqual(t, "a=b", p["tracestate"])
				if i/2 == 3 {
					require.Equal(t, "tenant=42", p["baggage"], "the sender's own stays")
				} else if propagator != nil {
					require.Equal(t, "tenant=1", p["baggage"])
				}
			}
			done()
		})
	}
}

// The program's propagator is the default, also when it is set behind Instrument.
func TestTheGlobalPropagatorIsTheDefault(t *testing.T) {
	defer api.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator())
	for _, early := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			both := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
			api.SetTextMapPropagator(propagation.NewCompositeTextMapPropagator())
			if early {
				api.SetTextMapPropagator(both)
			}
			l := newLab()
			broker := hopbacktest.Start(t, hopbacktest.Config{})
			cfg := l.config(t, hopbackotel.Config{})
			cfg.Dial = broker.Dial
			api.SetTextMapPropagator(both)
			conn, err := client.Connect(t.Context(), broker.URL(), cfg)
			require.NoError(t, err)
			shop := open(t, t.Context(), conn, policy, func(context.Context, *client.Delivery) error { return nil })
			pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("receipts"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, pub.Publish(both.Extract(t.Context(), propagation.MapCarrier{"baggage": "tenant=42"}), order("o-1")))
			got := broker.Queue("receipts").Messages()
			require.Len(t, got, 1)
			require.Equal(t, "tenant=42", got[0].ApplicationProperties["baggage"])
			require.NotEmpty(t, got[0].ApplicationProperties["traceparent"])
			shop.stop()
			require.NoError(t, conn.Close(t.Context()))
		})
	}
}

// published has a publisher to a queue that nobody consumes.
func published(t *testing.T, l *lab, c hopbackotel.Config) (*hopbacktest.Broker, *client.Publisher[*client.Message], func()) {
	t.Helper()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	cfg := l.config(t, c)
	cfg.Dial = broker.Dial
	conn, err := client.Connect(t.Context(), broker.URL(), cfg)
	require.NoError(t, err)
	shop := open(t, t.Context(), conn, policy, func(context.Context, *client.Delivery) error { return nil })
	pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("receipts"), client.PublisherConfig{})
	require.NoError(t, err)
	return broker, pub, func() {
		shop.stop()
		require.NoError(t, conn.Close(t.Context()))
	}
}

// TestBatch: a span for the creation of each message, and one for sending them, which
// links to the others.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		_, pub, done := published(t, l, hopbackotel.Config{})
		ctx, span := l.tracer().Start(t.Context(), "checkout")
		bad := order("bad")
		bad.Annotations = map[any]any{"no x": 1}
		require.Error(t, pub.PublishAll(ctx, []*client.Message{order("a"), bad, order("b")}))
		span.End()
		done()
		s := l.history()
		require.Equal(t, []string{
			"0s-0s trace 1: checkout (internal) []",
			"0s-0s trace 1: create receipts (producer) in checkout []",
			"0s-0s trace 1: create receipts (producer) in checkout []",
			"0s-0s trace 1: create receipts (producer) in checkout []",
			"0s-0s trace 1: publish receipts (client) in checkout -> create receipts -> create receipts -> create receipts [error.type=*argument.Error] failed: " + s.spans[4].Status.Description,
		}, s.lines)
		require.Contains(t, s.spans[4].Status.Description, "1 of 3 messages were not accepted")
		for _, x := range s.spans[1:] {
			require.Contains(t, x.Attributes, semconv.ServerAddress("rabbitmq.memory"), x.Name)
		}
		points := l.metrics(t)
		require.Equal(t, "2", points["messaging.client.sent.messages{receipts,publish}"])
		require.Equal(t, "1", points["messaging.client.sent.messages{*argument.Error,receipts,publish}"])
	})
}

// TestBaggageReachesTheHandler by a propagator that carries it.
func TestBaggageReachesTheHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		both := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
		s := failThreeTimesInMemory(t, "4.3.6", retry.StrategyDeadLetter, hopbackotel.Config{Propagator: both})
		require.Equal(t, expected(retry.StrategyDeadLetter, false), s.lines)

		broker := hopbacktest.Start(t, hopbacktest.Config{})
		cfg := l.config(t, hopbackotel.Config{Propagator: both})
		cfg.Dial = broker.Dial
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		got := map[string]string{}
		shop := open(t, t.Context(), conn, policy, func(ctx context.Context, _ *client.Delivery) error {
			both.Inject(ctx, propagation.MapCarrier(got))
			return nil
		})
		pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		ctx := both.Extract(t.Context(), propagation.MapCarrier{"baggage": "tenant=42"})
		require.NoError(t, pub.Publish(ctx, order("o-1")))
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, "tenant=42", got["baggage"])
		shop.stop()
		require.NoError(t, conn.Close(t.Context()))
	})
}

// TestLogRecordsBearTheSpan: those of a handler, and those of the client about a delivery.
func TestLogRecordsBearTheSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLab()
		broker := hopbacktest.Start(t, hopbacktest.Config{})
		var out bytes.Buffer
		log := slog.New(hopbackotel.LogHandler(slog.NewJSONHandler(&out, nil)))
		cfg := l.config(t, hopbackotel.Config{})
		cfg.Dial, cfg.Logger = broker.Dial, log
		conn, err := client.Connect(t.Context(), broker.URL(), cfg)
		require.NoError(t, err)
		shop := open(t, t.Context(), conn, policy, func(ctx context.Context, _ *client.Delivery) error {
			log.With("a", 1).WithGroup("g").InfoContext(ctx, "charging")
			return retry.Permanent(errors.New("no such card"))
		})
		pub, err := client.NewPublisher[*client.Message](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
		require.NoError(t, err)
		require.NoError(t, pub.Publish(t.Context(), order("o-1")))
		time.Sleep(time.Second)
		synctest.Wait()
		shop.stop()
		require.NoError(t, conn.Close(t.Context()))
		var span trace.SpanContext
		for _, x := range l.history().spans {
			if strings.HasPrefix(x.Name, "process") {
				span = x.SpanContext
			}
		}
		require.True(t, span.IsValid())
		found := 0
		for line := range strings.Lines(out.String()) {
			var r map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &r))
			in := r
			switch r["msg"] {
			case "charging":
				in = r["g"].(map[string]any)
			case "hopback: a message is dead-lettered":
			default:
				require.NotContains(t, r, "trace_id")
				continue
			}
			found++
			require.Equal(t, span.TraceID().String(), in["trace_id"])
			require.Equal(t, span.SpanID().String(), in["span_id"])
		}
		require.Equal(t, 2, found, out.String())
		log.Info("without a ctx")
	})
}
