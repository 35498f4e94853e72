package dashboards_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbackotel"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/integration/service"
	"github.com/hopback/hopback/retry"
)

// A service is one that a Prometheus scrapes: one consumer with retries, and a publisher,
// on a separate broker.
type aService struct {
	queue   string
	broker  *hopbacktest.Broker
	conn    *client.Conn
	control *client.Control
	metrics *httptest.Server
	publish func(t *testing.T, body string)
	batch   func(t *testing.T, n int) // of messages whose handlers take a while
}

var errFails = errors.New("fails")

// start starts a service whose handler does what a message's body says.
func start(t *testing.T, queue string) *aService {
	t.Helper()
	s := &aService{queue: queue, control: &client.Control{}, broker: hopbacktest.Start(t, hopbacktest.Config{})}
	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry))
	require.NoError(t, err)
	provider := metric.NewMeterProvider(metric.WithReader(reader))
	s.metrics = httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(func() {
		s.metrics.Close()
		assert.NoError(t, provider.Shutdown(context.Background()))
	})
	cfg := client.Config{Dial: s.broker.Dial}
	require.NoError(t, hopbackotel.Instrument(&cfg, hopbackotel.Config{MeterProvider: provider}))
	s.conn, err = client.Connect(t.Context(), s.broker.URL(), cfg)
	require.NoError(t, err)
	policy := retry.Policy{MaxRetries: 2, Backoff: retry.Delays(200 * time.Millisecond)}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: queue})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	p, err := client.NewPublisher[string](t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	s.publish = func(t *testing.T, body string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if err := p.Publish(ctx, body); err != nil && !errors.Is(err, client.ErrNotSent) && !errors.Is(err, client.ErrOutcomeUnknown) {
			require.NoError(t, err)
		}
	}
	s.batch = func(t *testing.T, n int) {
		t.Helper()
		require.NoError(t, p.PublishAll(t.Context(), slices.Repeat([]string{"takes a while"}, n)))
	}
	ctx, stop := context.WithCancel(context.Background())
	ended, finish := make(chan error, 1), make(chan struct{})
	go func() {
		ended <- s.conn.Consume(ctx, queue, retry.With(policy)(client.JSON(func(_ context.Context, body string) error {
			switch body {
			case "hangs":
				<-finish
			case "takes a while":
				time.Sleep(10 * time.Millisecond)
			case "fails":
				return errFails
			case "fails for good":
				return retry.Permanent(errFails)
			}
			return nil
		})), client.ConsumerConfig{Control: s.control, Concurrency: 4, Prefetch: 16, Grace: time.Millisecond})
	}()
	t.Cleanup(func() {
		close(finish)
		stop()
		<-ended
		_ = s.conn.Close(context.Background())
	})
	return s
}

// quick makes the rules' times short, so that a test doesn't wait for minutes.
func quick(rules string) string {
	rules = regexp.MustCompile(`for: \d+m`).ReplaceAllString(rules, "for: 1s")
	rules = regexp.MustCompile(`\[\d+m\]`).ReplaceAllString(rules, "[6s]")
	rules = regexp.MustCompile(`offset \d+m`).ReplaceAllString(rules, "offset 6s")
	rules = strings.ReplaceAll(rules, "> 300", "> 2")
	return strings.ReplaceAll(rules, "> 60", "> 1")
}

// firing is an alert that fires.
type firing struct{ name, queue, instance string }

func alerts(t *testing.T, at string) (all []firing) {
	t.Helper()
	var answer struct {
		Data struct {
			Alerts []struct {
				State  string
				Labels map[string]string
			}
		}
	}
	get(t, at+"/api/v1/alerts", &answer)
	for _, a := range answer.Data.Alerts {
		if a.State == "firing" {
			all = append(all, firing{a.Labels["alertname"], a.Labels["messaging_destination_name"], a.Labels["instance"]})
		}
	}
	return all
}

func get(t *testing.T, at string, into any) {
	t.Helper()
	answer, err := http.Get(at)
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode, "%s: %s", at, text)
	require.NoError(t, json.Unmarshal(text, into))
}

func file(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

// provocations are what makes each alert fire, in a separate service.
var provocations = map[string]func(t *testing.T, s *aService){
	"HopbackDeadWithoutRetry": func(t *testing.T, s *aService) { s.publish(t, "fails for good") },
	"HopbackRetriesLate": func(t *testing.T, s *aService) {
		// Retries come back while the consumer is paused.
		s.publish(t, "fails")
		resume := s.control.Pause()
		time.Sleep(2 * time.Second)
		resume()
	},
	"HopbackOldestWaits": func(t *testing.T, s *aService) {
		s.control.Pause()
		s.publish(t, "waits")
	},
	"HopbackBlocked": func(t *testing.T, s *aService) {
		s.broker.SetMemoryAlarm(true)
		s.publish(t, "waits")
	},
	"HopbackNoProgress": func(t *testing.T, s *aService) { s.publish(t, "hangs") },
	"HopbackNoLink": func(t *testing.T, s *aService) {
		_, _ = declare.DeleteQueue(t.Context(), s.conn.Management(), s.queue) // which is gone the second time
	},
	"HopbackForwardsWait": func(t *testing.T, s *aService) {
		_ = declare.DeleteExchange(t.Context(), s.conn.Management(), "retry_exchange")
		s.publish(t, "fails")
	},
}

// Each query of the dashboard has a result, each alert fires where it is provoked, and
// none elsewhere.
func TestDashboardAndAlertsWithARealPrometheus(t *testing.T) {
	rules := file(t, "alerts.yml")
	var names []string
	for _, m := range regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(rules, -1) {
		names = append(names, m[1])
	}
	require.Len(t, provocations, len(names), "each alert has a provocation")

	well := start(t, "well")
	services := map[string]*aService{"": well}
	targets := []string{strings.TrimPrefix(well.metrics.URL, "http://")}
	instances := map[string]string{}
	for _, name := range names {
		require.Contains(t, provocations, name)
		s := start(t, "queue-of-"+name)
		services[name] = s
		host := strings.TrimPrefix(s.metrics.URL, "http://")
		targets = append(targets, host)
		instances[name] = host
	}
	// A queue that always has messages, but none waits for long.
	busy := start(t, "busy")
	services["busy"] = busy
	targets = append(targets, strings.TrimPrefix(busy.metrics.URL, "http://"))
	// The brokers are in memory. What a real one shows has these names and labels:
	// TestFamiliesOfRabbitMQ.
	rabbit := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var ready, unacked strings.Builder
		for _, s := range services {
			n := s.broker.Queue(s.queue).Counts()
			fmt.Fprintf(&ready, "rabbitmq_detailed_queue_messages_ready{vhost=\"/\",queue=%q} %d\n", s.queue, n.Ready)
			fmt.Fprintf(&unacked, "rabbitmq_detailed_queue_messages_unacked{vhost=\"/\",queue=%q} %d\n", s.queue, n.Unacknowledged)
		}
		_, _ = io.WriteString(w, "# TYPE rabbitmq_detailed_queue_messages_ready gauge\n"+ready.String()+"# TYPE rabbitmq_detailed_queue_messages_unacked gauge\n"+unacked.String())
	}))
	defer rabbit.Close()
	config, err := json.Marshal(map[string]any{
		"global":     map[string]any{"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
		"rule_files": []string{"alerts.yml"},
		"scrape_configs": []any{
			map[string]any{"job_name": "service", "static_configs": []any{map[string]any{"targets": targets}}},
			map[string]any{"job_name": "rabbitmq", "static_configs": []any{map[string]any{"targets": []string{strings.TrimPrefix(rabbit.URL, "http://")}}}},
		},
	})
	require.NoError(t, err)
	server, err := service.Prometheus(t.Context(), os.Stderr, string(config), map[string]string{"alerts.yml": quick(rules)})
	require.NoError(t, err)
	defer func() { assert.NoError(t, server.Close()) }()

	// work is done by the service that is well, all the time.
	work := func() {
		for _, body := range []string{"succeeds", "fails"} {
			well.publish(t, body)
		}
		if busy.broker.Queue(busy.queue).Counts().Ready < 200 {
			busy.batch(t, 400)
		}
	}
	until := func(what string, done func() bool) {
		t.Helper()
		for end := time.Now().Add(2 * time.Minute); !done(); {
			require.True(t, time.Now().Before(end), "%s: %v", what, alerts(t, server.URL))
			work()
			time.Sleep(100 * time.Millisecond)
		}
	}

	for _, q := range queries(t) {
		until(q, func() bool {
			var answer struct {
				Data struct{ Result []struct{ Value []any } }
			}
			get(t, server.URL+"/api/v1/query?query="+url.QueryEscape(q), &answer)
			return slices.ContainsFunc(answer.Data.Result, func(r struct{ Value []any }) bool { return r.Value[1] != "NaN" })
		})
	}
	require.Empty(t, alerts(t, server.URL), "nothing is wrong yet")

	for _, name := range names {
		s := services[name]
		until(name, func() bool {
			provocations[name](t, s)
			return slices.ContainsFunc(alerts(t, server.URL), func(f firing) bool {
				return f.name == name && (f.queue == s.queue || f.instance == instances[name])
			})
		})
	}
	var depth struct {
		Data struct{ Result []struct{ Value []any } }
	}
	get(t, server.URL+"/api/v1/query?query="+url.QueryEscape(`min_over_time(rabbitmq_detailed_queue_messages_ready{queue="busy"}[5s]) > 0`), &depth)
	require.NotEmpty(t, depth.Data.Result, "messages wait in the busy queue")
	for _, f := range alerts(t, server.URL) {
		assert.NotEqual(t, busy.queue, f.queue, "%v fires where none waits for long", f)
		assert.NotEqual(t, well.queue, f.queue, "%v fires where all is well", f)
		assert.NotEqual(t, targets[0], f.instance, "%v fires where all is well", f)
	}
}

// queries returns those of the dashboard, with its variables filled in.
func queries(t *testing.T) (all []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(file(t, "dashboard.json")), &dashboard))
	for _, p := range dashboard.Panels {
		for _, q := range p.Targets {
			all = append(all, strings.NewReplacer("$queue", ".*", "$__rate_interval", "10s").Replace(q.Expr))
		}
	}
	require.NotEmpty(t, all)
	return all
}

// Prometheus' own tool accepts the files as they are.
func TestPrometheusAcceptsTheFiles(t *testing.T) {
	tool, err := exec.LookPath("promtool")
	if err != nil {
		server, err := service.Prometheus(t.Context(), os.Stderr, "{}", nil)
		require.NoError(t, err)
		require.NoError(t, server.Close())
		if tool, err = exec.LookPath("promtool"); err != nil {
			t.Skip("no promtool: the Prometheus of the environment is another machine's")
		}
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"check", "config", "prometheus.yml"}} {
		out, err := exec.Command(tool, args...).CombinedOutput()
		assert.NoError(t, err, "%s", out)
	}
	assert.FileExists(t, filepath.Join("grafana", "dashboards.yml"))
}

// The names and labels that the rules use are those of RabbitMQ's plugin.
func TestFamiliesOfRabbitMQ(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("it takes a minute: set HOPBACK_LONG=1")
	}
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			b, err := rabbitmq.Own(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			defer func() { assert.NoError(t, b.Release(context.Background())) }()
			require.NoError(t, b.EnablePlugin(t.Context(), "rabbitmq_prometheus"))
			conn, err := client.Connect(t.Context(), b.URL, client.Config{})
			require.NoError(t, err)
			defer func() { assert.NoError(t, conn.Close(context.Background())) }()
			_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()}}})
			require.NoError(t, err)
			p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("orders"), client.PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, p.PublishAll(t.Context(), []string{"a", "b", "c"}))
			// The port isn't published, so a shell next to the broker asks.
			path := regexp.MustCompile(`metrics_path: (\S+)`).FindStringSubmatch(file(t, "prometheus.yml"))[1]
			family := regexp.MustCompile(`family: \[(\w+)\]`).FindStringSubmatch(file(t, "prometheus.yml"))[1]
			script := `exec 3<>/dev/tcp/127.0.0.1/15692; printf 'GET ` + path + `?family=` + family + ` HTTP/1.0\r\n\r\n' >&3; cat <&3`
			var answer []byte
			shows := func(line string) func() bool {
				return func() bool {
					answer, _ = b.Exec(t.Context(), "bash", "-c", script)
					return strings.Contains(string(answer), line)
				}
			}
			assert.Eventually(t, shows(`rabbitmq_detailed_queue_messages_ready{vhost="/",queue="orders"} 3`), time.Minute, 100*time.Millisecond, "%s", answer)
			assert.Eventually(t, shows(`rabbitmq_detailed_queue_messages_unacked{vhost="/",queue="orders"} 0`), time.Minute, 100*time.Millisecond, "%s", answer)
		})
	}
}
