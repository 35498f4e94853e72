package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/rabbitmq"
)

const patience = time.Minute

// ask returns false until Prometheus answers with the JSON that is wanted.
func ask(at string, into any) bool {
	answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(at)
	if err != nil {
		return false
	}
	defer func() { _ = answer.Body.Close() }()
	return answer.StatusCode == http.StatusOK && json.NewDecoder(answer.Body).Decode(into) == nil
}

// "run prometheus" brings a Prometheus with the rules of hopbackotel/dashboards, which
// scrapes the command and the broker, and ends it with the command.
func TestRunWithPrometheus(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Setenv("HOPBACK_PROMETHEUS_URL", "") // one of our own
	dir := t.TempDir()
	var stdout, stderr bytes.Buffer
	ended := make(chan int, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	script := `echo "$HOPBACK_PROMETHEUS_URL $HOPBACK_URL" >$0/urls.new && mv $0/urls.new $0/urls; until [ -e $0/done ]; do sleep 0.1; done; exit 7`
	go func() {
		ended <- execute(ctx, []string{"run", "4.3", "prometheus", "--", "sh", "-c", script, dir}, &stdout, &stderr)
	}()
	var urls []string
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(filepath.Join(dir, "urls"))
		urls = strings.Fields(string(text))
		return err == nil || len(ended) > 0
	}, 5*time.Minute, 50*time.Millisecond)
	require.Len(t, urls, 2, "the command has begun")
	prometheus := urls[0]

	conn, err := client.Connect(ctx, urls[1], client.Config{})
	require.NoError(t, err)
	queue := fmt.Sprintf("run with \"prometheus\" %x", time.Now().UnixNano())
	_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: queue, DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	defer func() {
		_, err := declare.DeleteQueue(context.Background(), conn.Management(), queue)
		assert.NoError(t, err)
		assert.NoError(t, conn.Close(context.Background()))
	}()
	p, err := client.NewPublisher[string](ctx, conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(ctx, []string{"a", "b", "c"}))

	query := "rabbitmq_detailed_queue_messages_ready{queue=" + label(queue) + "} == 3"
	require.Eventually(t, func() bool {
		var answer struct{ Data struct{ Result []any } }
		return ask(prometheus+"/api/v1/query?query="+url.QueryEscape(query), &answer) && len(answer.Data.Result) == 1
	}, patience, 100*time.Millisecond, "Prometheus has the queue's depth")

	var rules struct {
		Data struct {
			Groups []struct{ Rules []struct{ Name string } }
		}
	}
	require.True(t, ask(prometheus+"/api/v1/rules", &rules))
	alerts, err := os.ReadFile("../../../../hopbackotel/dashboards/alerts.yml")
	require.NoError(t, err)
	var want, got []string
	for _, m := range regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(string(alerts), -1) {
		want = append(want, m[1])
	}
	for _, g := range rules.Data.Groups {
		for _, r := range g.Rules {
			got = append(got, r.Name)
		}
	}
	require.NotEmpty(t, want)
	assert.Equal(t, want, got)

	var targets struct {
		Data struct {
			ActiveTargets []struct {
				ScrapePool, ScrapeURL, Health string
			}
		}
	}
	require.True(t, ask(prometheus+"/api/v1/targets", &targets))
	found := map[string]string{}
	for _, x := range targets.Data.ActiveTargets {
		found[x.ScrapePool] = x.ScrapeURL
		if x.ScrapePool == "rabbitmq" {
			assert.Equal(t, "up", x.Health)
		}
	}
	assert.Equal(t, "http://127.0.0.1:9464/metrics", found["service"])
	assert.Contains(t, found, "rabbitmq")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "done"), nil, 0o600))
	assert.Equal(t, 7, <-ended, "%s", &stderr)
	assert.Contains(t, stderr.String(), "Prometheus at "+prometheus)
	var gone struct{}
	assert.False(t, ask(prometheus+"/api/v1/targets", &gone), "it has ended")
}

// What the management API doesn't answer isn't shown as an empty broker.
func TestQueuesWithoutABroker(t *testing.T) {
	broken := httptest.NewServer(http.NotFoundHandler())
	defer broken.Close()
	for management, want := range map[string]int{"": http.StatusServiceUnavailable, broken.URL: http.StatusBadGateway, "http://127.0.0.1:1": http.StatusBadGateway} {
		w := httptest.NewRecorder()
		(&queues{management: management}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics/detailed", nil))
		assert.Equal(t, want, w.Code, management)
	}
}
