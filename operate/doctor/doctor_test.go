package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
)

// found are the findings, each as "severity rule resource".
func found(r doctor.Report) []string {
	all := []string{}
	for _, g := range r.Groups {
		for _, f := range g.Findings {
			all = append(all, fmt.Sprintf("%s %s %s", f.Severity, f.Rule, f.Resource))
		}
	}
	return all
}

func examine(t *testing.T, f *fakeAPI) doctor.Report {
	t.Helper()
	r, err := doctor.From(t.Context(), serve(t, f, httpapi.Config{}), doctor.Options{})
	require.NoError(t, err)
	for _, request := range f.requests {
		assert.True(t, strings.HasPrefix(request, "GET "), request)
	}
	assert.Len(t, f.requests, int(r.Requests))
	return r
}

// The faults that a single running broker can't have. Those that one can have are in
// integration/doctor.
func TestDoctorExaminesAnAPI(t *testing.T) {
	t.Parallel()
	with := func(change func(f *fakeAPI)) *fakeAPI {
		f := cluster()
		f.queues = []object{queue("orders", nil)}
		change(f)
		return f
	}
	onOrders := func(more object) *fakeAPI {
		return with(func(f *fakeAPI) { f.queues = []object{queue("orders", more)} })
	}
	onNode := func(more object) *fakeAPI {
		return with(func(f *fakeAPI) {
			for k, v := range more {
				f.nodes[1][k] = v
			}
		})
	}
	healthy := `warning no-delivery-limit queue "orders"` // the queue's one fault, so that none is quiet by accident
	for _, tt := range []struct {
		finds string
		api   *fakeAPI
		says  string
	}{
		{`error memory-alarm node "b"`, onNode(object{"mem_alarm": true}), "blocked"},
		{`error disk-alarm node "b"`, onNode(object{"disk_free_alarm": true}), "40960 MiB free"},
		{`error node-down node "b"`, onNode(object{"running": false}), "doesn't run"},
		{`error partition node "b"`, onNode(object{"partitions": []string{"c"}}), `"c"`},
		{`note disk-limit node "b"`, onNode(object{"disk_free_limit": 50_000_000}), "50 MB"},
		{`warning returned-without-end queue "orders"`, onOrders(object{"message_stats": object{"redeliver_details": object{"rate": 250.0}, "ack_details": object{"rate": 3.0}}}), "doesn't count what basic.nack"},
		{`note default-queue-type queue "brief"`, with(func(f *fakeAPI) {
			f.defaultType = "quorum"
			f.queues = append(f.queues, queue("brief", object{"type": "classic", "auto_delete": true, "arguments": object{}, "members": nil, "online": nil}))
		}), "default is quorum"},
		{`warning two-nodes broker "4.3.6"`, with(func(f *fakeAPI) {
			f.nodes = f.nodes[:2]
			f.queues = []object{queue("orders", object{"members": []string{"a", "b"}, "online": []string{"a", "b"}})}
		}), "two nodes"},
		{`warning replicas queue "orders"`, onOrders(object{"members": []string{"a"}, "online": []string{"a"}}), "a replica on 1 of the cluster's 3"},
		{`warning replicas-down queue "orders"`, onOrders(object{"online": []string{"a", "c"}}), "1 of its 3"},
		{`error replicas-down queue "orders"`, onOrders(object{"online": []string{"a"}}), "2 of its 3"},
		{`error queue-down queue "orders"`, onOrders(object{"state": "minority"}), "minority"},
		{`warning not-replicated queue "orders"`, onOrders(object{"type": "classic", "arguments": object{}, "members": nil, "online": nil}), "one copy"},
		{`warning oversized-queue queue "orders"`, onOrders(object{"messages_ready": 2_000_000}), "2000000 messages"},
		{`warning oversized-queue queue "orders"`, onOrders(object{"message_bytes": int64(5 << 30)}), "5120 MiB"},
		{`warning delayed-message-plugin exchange "later"`, with(func(f *fakeAPI) {
			f.exchanges = []object{exchange("later", "x-delayed-message")}
			f.bindings = []object{{"source": "later", "vhost": "/", "destination": "orders", "destination_type": "queue", "routing_key": "orders", "arguments": object{}}}
		}), "archived"},
		{`warning disabled-feature-flags broker "4.3.6"`, with(func(f *fakeAPI) {
			f.flags = []object{{"name": "on", "state": "enabled", "stability": "stable"}, {"name": "off", "state": "disabled", "stability": "stable"}, {"name": "new", "state": "disabled", "stability": "experimental"}}
		}), `disabled: "off";`},
		{`warning unsupported-version broker "3.13.7"`, with(func(f *fakeAPI) { f.version = "3.13.7" }), "3 ended"},
		{`warning leaders-on-one-node node "a"`, with(func(f *fakeAPI) {
			for i := range 12 {
				f.queues = append(f.queues, queue(fmt.Sprintf("q%d", i), nil))
			}
		}), "13 of 13"},
		{`warning broker-version broker "4.0.5"`, with(func(f *fakeAPI) { f.version = "4.0.5" }), "frozen"},
		{`error delayed-drop-head queue "orders"`, with(func(f *fakeAPI) {
			f.version = "4.4.1"
			f.queues = []object{queue("orders", object{"arguments": object{"x-queue-type": "quorum", "x-delivery-limit": -1, "x-max-length": 5}})}
		}), "hangs"},
	} {
		t.Run(tt.finds, func(t *testing.T) {
			t.Parallel()
			r := examine(t, tt.api)
			got := found(r)
			assert.Contains(t, got, tt.finds)
			for _, g := range r.Groups {
				for _, f := range g.Findings {
					if f.Resource.Kind == "queue" || f.Resource.Kind == "exchange" {
						assert.Greater(t, len(f.Path), 1, "%s: the path of a message is drawn", f.Rule)
					}
				}
			}
			if !strings.Contains(tt.finds, "not-replicated") {
				assert.Contains(t, got, healthy)
			}
			// Paragraphs are broken into lines.
			assert.Contains(t, strings.Join(strings.Fields(r.String()), " "), tt.says)
			assert.Contains(t, string(r.HTML()), strings.Fields(tt.finds)[1])
		})
	}
	r := examine(t, with(func(*fakeAPI) {}))
	assert.Equal(t, []string{healthy}, found(r), "nothing else on a healthy cluster")
	assert.Empty(t, r.Unseen)
}

// On 10,000 queues it takes less than 10 s, 100 MiB, and 100 requests.
func TestAllocationsOnTenThousandQueues(t *testing.T) {
	notUnderRace(t)
	recorded := &recording{of: many(10_000), replies: map[string][]byte{}}
	api := serve(t, recorded, httpapi.Config{})
	_, err := doctor.From(t.Context(), api, doctor.Options{})
	require.NoError(t, err)
	// From here on only the replies are kept, so that the garbage that Go allows isn't that of the test.
	recorded.of = nil
	defer debug.SetGCPercent(debug.SetGCPercent(100)) // Go's default, which the command has
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var peak atomic.Uint64
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				var now runtime.MemStats
				runtime.ReadMemStats(&now)
				peak.Store(max(peak.Load(), now.HeapAlloc))
			case <-stop:
				return
			}
		}
	}()
	began, cpu := time.Now(), cpuSeconds()
	r, err := doctor.From(t.Context(), api, doctor.Options{})
	took := time.Since(began)
	cpu = cpuSeconds() - cpu
	close(stop)
	<-stopped
	require.NoError(t, err)
	used := int64(peak.Load()) - int64(before.HeapAlloc)
	t.Logf("%v, %.1f s of CPU, %d MiB more at the peak (the server in this process included), %d requests", took, cpu, used>>20, r.Requests)
	assert.Equal(t, 10_001, r.Queues)
	assert.Less(t, cpu, 60.0, "seconds of CPU, this server's included: a bound for what grows faster than the number of queues, not a measurement")
	assert.Less(t, used, int64(100<<20))
	assert.LessOrEqual(t, r.Requests, int64(100))
	assert.Zero(t, r.Count("error"), "%s", r)
	assert.Less(t, len(r.String()), 20_000)
}

// RabbitMQ writes [] for an object that has none of the columns.
func TestStatisticsWithoutTheColumns(t *testing.T) {
	t.Parallel()
	f := cluster()
	f.queues = []object{queue("orders", object{"message_stats": []string{}}), queue("acked", object{"messages_unacknowledged": 5000, "message_stats": object{"ack_details": object{"rate": 1.5}}})}
	f.exchanges = []object{exchange("shop", "topic")}
	f.exchanges[0]["message_stats"] = []string{}
	r := examine(t, f)
	assert.Equal(t, 2, r.Queues)
	assert.Contains(t, r.String(), "1.5 acknowledgements")
}

// Queues are deleted between two pages, and the last page with them. RabbitMQ then refuses that page.
func TestQueuesAreDeletedWhileTheyAreRead(t *testing.T) {
	t.Parallel()
	f := many(1000)
	r, err := doctor.From(t.Context(), serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.ServeHTTP(w, r)
		if r.URL.Path == "/api/queues" && r.URL.Query().Get("page") == "2" {
			f.queues = f.queues[:1000]
		}
	}), httpapi.Config{}), doctor.Options{})
	require.NoError(t, err)
	assert.Equal(t, 1000, r.Queues)
	f.raw = map[string]func(http.ResponseWriter){"/queues": func(w http.ResponseWriter) { http.Error(w, "no", http.StatusBadRequest) }}
	_, err = doctor.From(t.Context(), serve(t, f, httpapi.Config{}), doctor.Options{})
	require.ErrorContains(t, err, "400")
}

// What the user may not read is listed, with the rules that it would take, and nothing is guessed.
func TestWhatTheUserMayNotSee(t *testing.T) {
	t.Parallel()
	f := cluster()
	f.queues = []object{queue("orders", object{"type": "quorum", "arguments": object{"x-queue-type": "quorum", "x-dead-letter-exchange": "dlx"}, "effective_policy_definition": object{"max-length": 5, "overflow": "reject-publish"}})}
	f.exchanges = []object{exchange("dlx", "fanout")}
	f.status = map[string]int{"/nodes": 403, "/policies": 403, "/operator-policies": 403, "/consumers": 403, "/overview": 401, "/deprecated-features/used": 404, "/feature-flags": 500}
	r := examine(t, f)
	missed := map[string]bool{}
	parts := map[string]bool{}
	for _, u := range r.Unseen {
		parts[u.Part] = true
		assert.NotEmpty(t, u.Why)
		for _, rule := range u.Rules {
			missed[rule] = true
		}
	}
	for _, part := range []string{"nodes", "state of the nodes", "version", "list of policies", "consumers", "deprecated features in use", "feature flags"} {
		assert.True(t, parts[part], "%s: %v", part, parts)
	}
	for _, rule := range []string{"replicas", "memory-alarm", "unsupported-version", "policy-tie", "auto-ack", "deprecated-feature", "disabled-feature-flags"} {
		assert.True(t, missed[rule], rule)
	}
	// Queues show what policies make of them, so these rules run.
	assert.Contains(t, found(r), `error dead-letter-route queue "orders"`)
	assert.Contains(t, found(r), `warning at-most-once queue "orders"`)
	assert.NotContains(t, r.String(), secret)

	// An exchange doesn't show its policy's alternate exchange, so there nothing is said about routes.
	f.requests = nil
	f.exchanges[0]["policy"] = "some"
	r = examine(t, f)
	assert.NotContains(t, found(r), `error dead-letter-route queue "orders"`)
	assert.Contains(t, r.String(), "dead-letter-route")
}

// Names come from anyone who may declare a queue.
func TestHostileNamesAreEscaped(t *testing.T) {
	t.Parallel()
	const name = "<script>alert(1)</script>\x1b[31m\r\nerror    fake: 1 place\u202e\"'&`${x}"
	f := cluster()
	f.version = "4.3.6\x1b[2J<b>"
	f.nodes = append(f.nodes, object{"name": name, "running": false})
	f.queues = []object{queue(name, object{"arguments": object{"x-queue-type": "quorum", "x-dead-letter-exchange": name, name: name}, "state": "down" + name})}
	f.queues[0]["state"] = "down"
	f.policies = []object{{"vhost": "/", "name": name, "pattern": "(" + name, "definition": object{name: name}}, {"vhost": "/", "name": "two", "pattern": ".*", "definition": object{"max-length": name}}}
	r := examine(t, f)
	text := r.String()
	for line := range strings.Lines(text) {
		assert.False(t, strings.HasPrefix(line, "error    fake"), line)
	}
	for _, bad := range []string{"\x1b", "\r", "\u202e"} {
		assert.NotContains(t, text, bad)
		assert.NotContains(t, string(r.HTML()), bad)
	}
	assert.NotContains(t, string(r.HTML()), "<script")
	assert.NotContains(t, string(r.HTML()), "<b>")
	encoded, err := json.Marshal(r)
	require.NoError(t, err)
	assert.NotContains(t, string(encoded), "<script")
	assert.NotContains(t, string(encoded), "\x1b")
	var back doctor.Report
	require.NoError(t, json.Unmarshal(encoded, &back))
	assert.Equal(t, found(r), found(back), "the names are complete in JSON")
}

// A broker, or what claims to be one, can't exhaust memory or time.
func TestHostileAnswersAreBounded(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		answer func(w http.ResponseWriter)
		cfg    httpapi.Config
		says   string
	}{
		"HTML":      {func(w http.ResponseWriter) { _, _ = w.Write([]byte("<html>log in</html>")) }, httpapi.Config{}, "can't be parsed"},
		"a string":  {func(w http.ResponseWriter) { _, _ = w.Write([]byte(`"x"`)) }, httpapi.Config{}, "can't be parsed"},
		"deep":      {func(w http.ResponseWriter) { _, _ = w.Write(bytes.Repeat([]byte("["), 1<<20)) }, httpapi.Config{}, "can't be parsed"},
		"too large": {func(w http.ResponseWriter) { _, _ = w.Write(bytes.Repeat([]byte(" "), 1<<20)) }, httpapi.Config{MaxBody: 1 << 10}, "more than 1024 bytes"},
		"slow": {func(w http.ResponseWriter) {
			for w.(http.Flusher) != nil {
				if _, err := w.Write([]byte(" ")); err != nil {
					return
				}
				w.(http.Flusher).Flush()
				time.Sleep(10 * time.Millisecond)
			}
		}, httpapi.Config{Timeout: 200 * time.Millisecond}, "unavailable"},
		"not found": {func(w http.ResponseWriter) { w.WriteHeader(404) }, httpapi.Config{}, "404"},
		"elsewhere": {func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://example.com/")
			w.WriteHeader(302)
		}, httpapi.Config{}, "302"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := cluster()
			f.raw = map[string]func(http.ResponseWriter){"/queues": tt.answer}
			_, err := doctor.From(t.Context(), serve(t, f, tt.cfg), doctor.Options{})
			require.ErrorContains(t, err, tt.says)
			assert.NotContains(t, err.Error(), secret)
		})
	}
	t.Run("pages without end", func(t *testing.T) {
		t.Parallel()
		f := cluster()
		f.raw = map[string]func(http.ResponseWriter){"/queues": func(w http.ResponseWriter) {
			_ = json.NewEncoder(w).Encode(object{"page_count": 1 << 40, "items": []object{queue("again", nil)}})
		}}
		_, err := doctor.From(t.Context(), serve(t, f, httpapi.Config{}), doctor.Options{})
		require.ErrorContains(t, err, "more than 400 pages")
	})
	t.Run("interrupted", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		f := cluster()
		f.raw = map[string]func(http.ResponseWriter){"/consumers": func(http.ResponseWriter) { cancel() }}
		_, err := doctor.From(ctx, serve(t, f, httpapi.Config{}), doctor.Options{})
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestOptions(t *testing.T) {
	t.Parallel()
	_, err := doctor.From(t.Context(), nil, doctor.Options{})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = doctor.FromDefinitions(t.Context(), strings.NewReader("{"), doctor.Options{})
	require.ErrorAs(t, err, new(*argument.Error))
	_, err = doctor.FromDefinitions(t.Context(), errReader{}, doctor.Options{})
	require.ErrorContains(t, err, "can't be read")

	text := `{"queues": [{"name": "a", "vhost": "one", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}},
		{"name": "b", "vhost": "two", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}}]}`
	from := func(opts doctor.Options) doctor.Report {
		r, err := doctor.FromDefinitions(t.Context(), strings.NewReader(text), opts)
		require.NoError(t, err)
		return r
	}
	assert.Equal(t, []string{`error dead-letter queue "a"`, `error dead-letter queue "b"`}, found(from(doctor.Options{})))
	assert.Equal(t, []string{`error dead-letter queue "b"`}, found(from(doctor.Options{VHost: "two"})))
	assert.Empty(t, found(from(doctor.Options{Waive: []string{"dead-letter"}})))
	assert.Equal(t, []string{`error dead-letter queue "b"`}, found(from(doctor.Options{Waive: []string{`dead-letter queue "a"`}})))
	_, err = doctor.FromDefinitions(t.Context(), strings.NewReader(text), doctor.Options{VHost: "three"})
	require.ErrorAs(t, err, new(*argument.Error))

	// It says what such a file doesn't have.
	unseen := from(doctor.Options{}).Unseen
	for _, part := range []string{"policies", "operator policies", "consumers", "message counts"} {
		assert.True(t, slices.ContainsFunc(unseen, func(u doctor.Unseen) bool { return u.Part == part }), part)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

// FuzzDefinitions examines documents of any kind. It finds panics, loops, and raw control
// characters in the text.
func FuzzDefinitions(f *testing.F) {
	files, err := os.ReadDir("../internal/frameworks/testdata")
	require.NoError(f, err)
	for _, file := range files {
		if strings.HasSuffix(file.Name(), ".json") {
			text, err := os.ReadFile("../internal/frameworks/testdata/" + file.Name())
			require.NoError(f, err)
			f.Add(text)
		}
	}
	f.Add([]byte(`{"queues":[{"name":"a","arguments":{"x-dead-letter-exchange":"","x-message-ttl":1}}],"policies":[{"name":"p","pattern":"(","definition":{}}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(text), doctor.Options{})
		if err != nil {
			return
		}
		shown := r.String()
		if strings.ContainsAny(shown, "\x1b\r\x00") {
			t.Fatalf("a control character: %q", shown)
		}
		if page := r.HTML(); !bytes.HasSuffix(page, []byte("</html>\n")) {
			t.Fatal("an incomplete page")
		}
		if _, err := json.Marshal(r); err != nil {
			t.Fatal(err)
		}
	})
}
