package hopbackotel_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

// lab is a program with OpenTelemetry's SDK.
type lab struct {
	spans  *tracetest.InMemoryExporter
	traces *sdktrace.TracerProvider
	reader *sdkmetric.ManualReader
	meters *sdkmetric.MeterProvider
}

func newLab(opts ...sdktrace.TracerProviderOption) *lab {
	l := &lab{spans: tracetest.NewInMemoryExporter(), reader: sdkmetric.NewManualReader()}
	l.traces = sdktrace.NewTracerProvider(append([]sdktrace.TracerProviderOption{sdktrace.WithSyncer(l.spans)}, opts...)...)
	l.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(l.reader))
	return l
}

// config is a client's with the lab's instrument.
func (l *lab) config(t testing.TB, c hopbackotel.Config) client.Config {
	t.Helper()
	c.TracerProvider, c.MeterProvider = l.traces, l.meters
	cfg := client.Config{Logger: quiet}
	require.NoError(t, hopbackotel.Instrument(&cfg, c))
	return cfg
}

// tracer is that of another part of the program.
func (l *lab) tracer() trace.Tracer { return l.traces.Tracer("the program") }

// metrics returns all points, by metric and attributes, as text.
func (l *lab) metrics(t testing.TB) map[string]string {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, l.reader.Collect(context.Background(), &all))
	points := map[string]string{}
	put := func(name string, set attribute.Set, format string, args ...any) {
		var attrs []string
		for _, kv := range set.ToSlice() {
			if kv.Key != "messaging.system" && kv.Key != "messaging.operation.type" {
				attrs = append(attrs, kv.Value.String())
			}
		}
		points[name+"{"+strings.Join(attrs, ",")+"}"] = fmt.Sprintf(format, args...)
	}
	for _, s := range all.ScopeMetrics {
		for _, m := range s.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					put(m.Name, p.Attributes, "%d", p.Value)
				}
			case metricdata.Sum[float64]:
				for _, p := range d.DataPoints {
					put(m.Name, p.Attributes, "%.3f", p.Value)
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					put(m.Name, p.Attributes, "%.3f", p.Value)
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					put(m.Name, p.Attributes, "%d: %.3f", p.Count, p.Sum)
				}
			case metricdata.Histogram[int64]:
				for _, p := range d.DataPoints {
					put(m.Name, p.Attributes, "%d: %d", p.Count, p.Sum)
				}
			default:
				t.Fatalf("%s is a %T", m.Name, d)
			}
		}
	}
	return points
}

// history is the spans of a message as text, a line for each, in the order of their begin.
type history struct {
	lines []string
	spans tracetest.SpanStubs
	names map[trace.SpanID]string
}

func (l *lab) history() history {
	s := history{spans: l.spans.GetSpans(), names: map[trace.SpanID]string{}}
	sort.SliceStable(s.spans, func(i, j int) bool {
		a, b := s.spans[i], s.spans[j]
		if !a.StartTime.Equal(b.StartTime) {
			return a.StartTime.Before(b.StartTime)
		}
		return rank(a) < rank(b)
	})
	traces := map[trace.TraceID]int{}
	for _, x := range s.spans {
		s.names[x.SpanContext.SpanID()] = short(x)
	}
	for _, x := range s.spans {
		if traces[x.SpanContext.TraceID()] == 0 {
			traces[x.SpanContext.TraceID()] = len(traces) + 1
		}
		began := x.StartTime.Sub(s.spans[0].StartTime)
		line := fmt.Sprintf("%v-%v trace %d: %s (%s)", began.Round(time.Millisecond), x.EndTime.Sub(s.spans[0].StartTime).Round(time.Millisecond), traces[x.SpanContext.TraceID()], x.Name, x.SpanKind)
		if x.Parent.IsValid() {
			line += " in " + s.name(x.Parent)
		}
		for _, link := range x.Links {
			what := ""
			for _, kv := range link.Attributes {
				what = kv.Value.AsString() + " "
			}
			line += " -> " + what + s.name(link.SpanContext)
		}
		var attrs []string
		for _, kv := range x.Attributes {
			if k := string(kv.Key); strings.HasPrefix(k, "hopback.") || k == "error.type" {
				attrs = append(attrs, strings.TrimPrefix(k, "hopback.")+"="+kv.Value.String())
			}
		}
		slices.Sort(attrs)
		line += " [" + strings.Join(attrs, " ") + "]"
		if x.Status.Code == codes.Error {
			line += " failed: " + x.Status.Description
		}
		s.lines = append(s.lines, line)
	}
	return s
}

// rank orders spans that begin at the same time.
func rank(x tracetest.SpanStub) int {
	for i, name := range []string{"checkout", "create", "publish", "process", "settle"} {
		if strings.HasPrefix(x.Name, name) {
			return i
		}
	}
	return 9
}

// short names a span: an attempt by its number.
func short(x tracetest.SpanStub) string {
	for _, kv := range x.Attributes {
		if kv.Key == "hopback.attempt" {
			return "attempt " + kv.Value.String()
		}
	}
	return x.Name
}

func (s history) name(sc trace.SpanContext) string {
	if name := s.names[sc.SpanID()]; name != "" {
		return name
	}
	return sc.SpanID().String()
}

// shop is a work queue, its handler and what becomes of an order.
type shop struct {
	conn   *client.Conn
	policy retry.Policy
	ended  chan error
	stop   func()
}

var policy = retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, 2*time.Second, 4*time.Second), Worker: "w"}

// open declares the queue "orders" and "receipts", and consumes the former.
func open(t testing.TB, ctx context.Context, conn *client.Conn, p retry.Policy, h client.HandlerFunc) *shop {
	t.Helper()
	topology, err := retry.Topology(p, declare.QuorumQueue{Name: "orders"})
	require.NoError(t, err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	require.NoError(t, err)
	_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "receipts", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	s := &shop{conn: conn, policy: p, ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(ctx)
	go func() { s.ended <- conn.Consume(ctx, "orders", retry.With(p)(h), client.ConsumerConfig{}) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-s.ended)
	})
	require.Eventually(t, func() bool { c := conn.Stats().Consumers; return len(c) > 0 && c[0].Up }, 45*time.Second, 5*time.Millisecond)
	return s
}

func order(id string) *client.Message {
	m := client.NewMessage([]byte("an order"))
	m.Properties.MessageID = id
	return m
}
