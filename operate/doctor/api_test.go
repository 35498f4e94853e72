package doctor_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/httpapi"
)

type object = map[string]any

// fakeAPI is a management HTTP API for what one running broker can't be: a cluster with faults, or
// one with 10,000 queues. It answers page by page, and only GET requests.
type fakeAPI struct {
	nodes, queues, exchanges, bindings, policies, consumers, flags []object
	version, defaultType                                           string
	// status is the answer to a path that isn't 200.
	status map[string]int
	// raw is the answer to a path that isn't JSON of the lists above.
	raw map[string]func(http.ResponseWriter)

	mu       sync.Mutex
	requests []string
}

// node, queue, and exchange are healthy.
func node(name string) object {
	return object{"name": name, "rabbitmq_version": "4.3.6", "running": true, "mem_alarm": false, "disk_free_alarm": false, "partitions": []string{}, "disk_free_limit": int64(4 << 30), "disk_free": int64(40 << 30)}
}

func queue(name string, more object) object {
	q := object{
		"name": name, "vhost": "/", "type": "quorum", "durable": true, "auto_delete": false, "exclusive": false, "leader": "a", "node": "a", "state": "running",
		"members": []string{"a", "b", "c"}, "online": []string{"a", "b", "c"}, "arguments": object{"x-queue-type": "quorum", "x-delivery-limit": -1},
		"messages_ready": 0, "messages_unacknowledged": 0, "messages_dlx": 0, "messages_delayed": 0, "consumers": 1, "message_bytes": 0, "effective_policy_definition": object{},
	}
	for k, v := range more {
		q[k] = v
	}
	return q
}

func exchange(name, kind string) object {
	return object{"name": name, "vhost": "/", "type": kind, "durable": true, "auto_delete": false, "internal": false, "arguments": object{}}
}

// cluster is a healthy cluster of three nodes.
func cluster() *fakeAPI {
	return &fakeAPI{version: "4.3.6", nodes: []object{node("a"), node("b"), node("c")}}
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/api")
	f.mu.Lock()
	f.requests = append(f.requests, r.Method+" "+path)
	f.mu.Unlock()
	if raw := f.raw[path]; raw != nil {
		raw(w)
		return
	}
	if status := f.status[path]; status != 0 || r.Method != http.MethodGet {
		http.Error(w, "no", max(status, http.StatusForbidden))
		return
	}
	lists := map[string][]object{
		"/nodes": f.nodes, "/bindings": f.bindings, "/policies": f.policies, "/operator-policies": nil, "/consumers": f.consumers,
		"/feature-flags": f.flags, "/deprecated-features/used": nil, "/vhosts": {{"name": "/", "default_queue_type": f.defaultType}},
	}
	paged := map[string][]object{"/queues": f.queues, "/exchanges": f.exchanges}
	var reply any
	if page, _ := strconv.Atoi(r.URL.Query().Get("page")); page > 1 && (page-1)*500 >= len(paged[path]) {
		http.Error(w, `{"error":"page_out_of_range"}`, http.StatusBadRequest)
		return
	}
	switch list, isList := lists[path]; {
	case path == "/overview":
		reply = object{"rabbitmq_version": f.version}
	case paged[path] != nil || path == "/queues" || path == "/exchanges":
		reply = pageOf(paged[path], r)
	case isList:
		reply = append([]object{}, list...)
	default:
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(reply)
}

func pageOf(all []object, r *http.Request) object {
	page, _ := strconv.Atoi(r.URL.Query().Get("page"))
	size, _ := strconv.Atoi(r.URL.Query().Get("page_size"))
	first, end := min((page-1)*size, len(all)), min(page*size, len(all))
	return object{"items": append([]object{}, all[first:end]...), "page_count": (len(all) + size - 1) / size, "page": page}
}

const secret = "t0p-secret"

// serve serves the API, and returns a reader of it.
func serve(t testing.TB, f http.Handler, cfg httpapi.Config) *httpapi.Reader {
	t.Helper()
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	api, err := httpapi.New(strings.Replace(s.URL, "http://", "http://guest:"+secret+"@", 1), "/", cfg)
	require.NoError(t, err)
	return api
}

// many is a cluster with n queues, each with a retry queue's worth of settings.
func many(n int) *fakeAPI {
	f := cluster()
	f.exchanges = []object{exchange("amq.direct", "direct"), exchange("dlx", "direct"), exchange("shop", "topic")}
	for i := range n {
		name := fmt.Sprintf("orders-%05d", i)
		f.queues = append(f.queues, queue(name, object{"leader": string(rune('a' + i%3)), "messages_ready": i % 7, "arguments": object{
			"x-queue-type": "quorum", "x-delivery-limit": 5, "x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": name, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
		}}))
		f.bindings = append(f.bindings,
			object{"source": "", "vhost": "/", "destination": name, "destination_type": "queue", "routing_key": name, "arguments": object{}},
			object{"source": "shop", "vhost": "/", "destination": name, "destination_type": "queue", "routing_key": "*." + name, "arguments": object{}},
			object{"source": "dlx", "vhost": "/", "destination": "dead", "destination_type": "queue", "routing_key": name, "arguments": object{}})
		f.consumers = append(f.consumers, object{"queue": object{"name": name, "vhost": "/"}, "prefetch_count": 10, "ack_required": true, "channel_details": object{"number": 1}})
	}
	f.queues = append(f.queues, queue("dead", object{"consumers": 0}))
	for i := range 20 {
		f.policies = append(f.policies, object{"vhost": "/", "name": fmt.Sprintf("p%d", i), "pattern": fmt.Sprintf("^orders-%d", i), "apply-to": "quorum_queues", "priority": i, "definition": object{"delivery-limit": 5}})
	}
	return f
}

// recording keeps the replies of another handler, and repeats them.
type recording struct {
	of      http.Handler
	mu      sync.Mutex
	replies map[string][]byte
}

func (r *recording) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply, known := r.replies[req.URL.String()]
	if !known {
		rec := httptest.NewRecorder()
		r.of.ServeHTTP(rec, req)
		reply = rec.Body.Bytes()
		r.replies[req.URL.String()] = reply
	}
	_, _ = w.Write(reply)
}
