package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/hopbacktest/internal/engine"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/httpapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is a broker with its API.
type site struct {
	t   *testing.T
	b   *engine.Broker
	url string
}

func bothVersions(t *testing.T, test func(t *testing.T, s *site)) {
	t.Helper()
	for _, version := range []string{"4.3.6", "4.0.5"} {
		t.Run(version, func(t *testing.T) { test(t, newSite(t, version)) })
	}
}

func newSite(t *testing.T, version string) *site {
	t.Helper()
	b, err := engine.New(engine.Config{Version: version})
	require.NoError(t, err)
	t.Cleanup(b.Close)
	server := httptest.NewServer(New(b))
	t.Cleanup(server.Close)
	return &site{t, b, server.URL}
}

// as calls the API as a user, and decodes the reply into into.
func (s *site) as(user, password, method, path string, body, into any) int {
	s.t.Helper()
	var text []byte
	if body != nil {
		var err error
		text, err = json.Marshal(body)
		require.NoError(s.t, err)
	}
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+"/api"+path, bytes.NewReader(text))
	require.NoError(s.t, err)
	req.SetBasicAuth(user, password)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	require.NoError(s.t, err)
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	if into != nil {
		require.NoError(s.t, json.Unmarshal(answer, into), "%s", answer)
	}
	return resp.StatusCode
}

func (s *site) call(method, path string, body, into any) int {
	s.t.Helper()
	return s.as("guest", "guest", method, path, body, into)
}

// fill makes something of everything in a virtual host.
func (s *site) fill(vhost string) {
	s.t.Helper()
	escaped := url.PathEscape(vhost)
	for _, step := range []struct {
		path string
		body any
	}{
		{"PUT /queues/" + escaped + "/orders", object{"durable": true, "arguments": object{"x-queue-type": "quorum", "x-delivery-limit": 3, "x-dead-letter-exchange": "dlx"}}},
		{"PUT /queues/" + escaped + "/a%2Fb", object{"arguments": object{"x-queue-type": "classic", "x-max-length": 5}}},
		{"PUT /exchanges/" + escaped + "/dlx", object{"type": "headers", "durable": true, "arguments": object{"alternate-exchange": "amq.fanout"}}},
		{"PUT /exchanges/" + escaped + "/inner", object{"type": "fanout", "internal": true}},
		{"POST /bindings/" + escaped + "/e/dlx/q/a%2Fb", object{"routing_key": "k", "arguments": object{"x-match": "any", "n": 1}}},
		{"POST /bindings/" + escaped + "/e/amq.topic/e/dlx", object{"routing_key": "#"}},
		{"PUT /policies/" + escaped + "/limit", object{"pattern": "^orders$", "apply-to": "quorum_queues", "priority": 2, "definition": object{"max-length": 10}}},
		{"PUT /operator-policies/" + escaped + "/most", object{"pattern": ".*", "apply-to": "queues", "definition": object{"max-length": 7}}},
	} {
		method, path, _ := strings.Cut(step.path, " ")
		require.Equal(s.t, 201, s.call(method, path, step.body, nil), step.path)
	}
}

func (s *site) snapshot(vhost string) check.Snapshot {
	s.t.Helper()
	r, err := httpapi.New("http://guest:guest@"+strings.TrimPrefix(s.url, "http://"), vhost, httpapi.Config{})
	require.NoError(s.t, err)
	snapshot, err := check.Read(context.Background(), check.Sources{HTTP: r}, declare.Topology{})
	require.NoError(s.t, err)
	return snapshot
}

func TestWhatIsMadeIsReadByTheAudit(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		require.Equal(t, 201, s.call("PUT", "/vhosts/v%2F1", nil, nil))
		require.Equal(t, 204, s.call("PUT", "/vhosts/v%2F1", nil, nil))
		s.fill("v/1")
		got := s.snapshot("v/1")
		assert.Equal(t, s.b.Version(), got.Version)
		assert.Equal(t, []string{"rabbit@memory"}, got.Nodes)
		require.Len(t, got.Queues, 2)
		orders := got.Queues[1]
		assert.Equal(t, "orders", orders.Name)
		assert.Equal(t, "quorum", orders.Type)
		assert.True(t, orders.Durable)
		assert.True(t, orders.Counted)
		assert.Equal(t, map[string]any{"x-queue-type": "quorum", "x-delivery-limit": int64(3), "x-dead-letter-exchange": "dlx"}, orders.Arguments)
		assert.Len(t, got.Bindings, 2)
		assert.Len(t, got.Policies, 2)
		assert.Len(t, got.Exchanges, 8)
		for name, most := range map[string]float64{"orders": 7, "a%2Fb": 7} {
			var q struct {
				Effective map[string]any `json:"effective_policy_definition"`
			}
			require.Equal(t, 200, s.call("GET", "/queues/v%2F1/"+name, nil, &q))
			assert.Equal(t, map[string]any{"max-length": most}, q.Effective, "%s: the smaller of both limits", name)
		}
		var q map[string]any
		require.Equal(t, 201, s.call("PUT", "/queues/%2F/plain", object{}, nil))
		require.Equal(t, 200, s.call("GET", "/queues/%2F/plain", nil, &q))
		assert.Equal(t, map[string]any{}, q["effective_policy_definition"])
	})
}

func TestDefinitionsGoOutAndIn(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		s.fill("/")
		for _, path := range []string{"/definitions", "/definitions/%2F"} {
			var document json.RawMessage
			require.Equal(t, 200, s.call("GET", path, nil, &document))
			_, err := audit.ParseDefinitions(document)
			require.NoError(t, err)
			other := newSite(t, s.b.Version())
			require.Equal(t, 204, other.call("POST", path, document, nil))
			want, got := s.snapshot("/"), other.snapshot("/")
			if s.b.Version()[:3] != "4.0" { // it leaves internal exchanges out
				require.Equal(t, 201, other.call("PUT", "/exchanges/%2F/inner", object{"type": "fanout", "internal": true}, nil))
				got = other.snapshot("/")
			}
			assert.Equal(t, want.Queues, got.Queues)
			assert.Equal(t, want.Exchanges, got.Exchanges)
			assert.Equal(t, want.Bindings, got.Bindings)
			assert.Equal(t, want.Policies, got.Policies)
		}
	})
}

func TestRefusals(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		s.fill("/")
		var p problem
		for _, c := range []struct {
			path   string
			body   any
			status int
			reason string
		}{
			{"PUT /queues/%2F/orders", object{"arguments": object{"x-queue-type": "quorum"}}, 400, "inequivalent arg 'x-dead-letter-exchange'"},
			{"PUT /queues/%2F/new", object{"arguments": object{"x-message-ttl": -1}}, 400, "invalid arg 'x-message-ttl'"},
			{"PUT /exchanges/%2F/dlx", object{"type": "topic"}, 400, "inequivalent arg 'type'"},
			{"PUT /exchanges/%2F/new", object{"type": "bogus"}, 400, "unknown exchange type 'bogus'"},
			{"POST /bindings/%2F/e/dlx/q/missing", object{}, 400, "no queue 'missing' in vhost '/'"},
			{"PUT /policies/%2F/p", object{"pattern": ".*", "definition": object{"bogus": 1}}, 400, "not recognised policy settings"},
			{"PUT /policies/%2F/p", object{"pattern": "(", "definition": object{"max-length": 1}}, 400, "Validation failed"},
			{"GET /queues/%2F/missing", nil, 404, "Not Found"},
			{"GET /queues/missing", nil, 404, "Not Found"},
			{"DELETE /queues/%2F/missing", nil, 404, "Not Found"},
			{"DELETE /exchanges/%2F/amq.topic", nil, 400, "predeclared"},
		} {
			method, path, _ := strings.Cut(c.path, " ")
			assert.Equal(t, c.status, s.call(method, path, c.body, &p), c.path)
			assert.Contains(t, p.Reason, c.reason, c.path)
		}
		assert.Equal(t, 401, s.as("guest", "wrong", "GET", "/overview", nil, &p))
	})
}

// What RabbitMQ has and this broker doesn't is refused, and never answered as if it had it.
func TestWhatIsNotModeledIsRefused(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		for _, path := range []string{
			"GET /channels", "GET /consumers", "GET /parameters/shovel", "PUT /parameters/federation-upstream/%2F/a", "GET /bindings?page=1",
			"GET /queues/%2F?sort=messages", "GET /queues?name=orders", "GET /health/checks/certificate-expiration/1/months",
		} {
			method, path, _ := strings.Cut(path, " ")
			var p problem
			assert.Equal(t, 501, s.call(method, path, nil, &p), path)
			assert.Contains(t, p.Reason, "hopbacktest doesn't have", path)
		}
	})
}

// Lists of queues and exchanges have pages, as RabbitMQ's.
func TestPages(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		type page struct {
			Items    []map[string]any
			Count    int `json:"item_count"`
			Filtered int `json:"filtered_count"`
			Total    int `json:"total_count"`
			Page     int
			Pages    int `json:"page_count"`
			Size     int `json:"page_size"`
		}
		var p page
		require.Equal(t, 200, s.call("GET", "/queues?page=1", nil, &p))
		assert.Equal(t, page{Items: []map[string]any{}, Page: 1, Size: 100}, p)
		for _, name := range []string{"a", "b", "c"} {
			require.Equal(t, 201, s.call("PUT", "/queues/%2F/"+name, object{"durable": true}, nil))
		}
		p = page{}
		require.Equal(t, 200, s.call("GET", "/queues/%2F?page=2&page_size=2&columns=name,message_stats.publish,message_stats.none.x,owner.name", nil, &p))
		assert.Equal(t, page{Items: []map[string]any{{"name": "c", "message_stats": map[string]any{"publish": 0.0}}}, Count: 1, Filtered: 3, Total: 3, Page: 2, Pages: 2, Size: 2}, p)
		require.Equal(t, 200, s.call("GET", "/exchanges?page=1&page_size=500", nil, &p))
		assert.Len(t, p.Items, p.Total)
		for query, want := range map[string]problem{
			"page=3&page_size=2":   {"page_out_of_range", "Page out of range, page: 3 page size: 2, len: 3"},
			"page=0":               {"invalid_pagination_parameters", "Invalid pagination parameters: page number 0, page size undefined"},
			"page=1&page_size=501": {"invalid_pagination_parameters", "Invalid pagination parameters: page number 1, page size 501"},
			"page=x":               {"bad_request", "Pagination parameters are invalid"},
			"page=1&page_size=x":   {"bad_request", "Pagination parameters are invalid"},
		} {
			var got problem
			assert.Equal(t, 400, s.call("GET", "/queues?"+query, nil, &got), query)
			assert.Equal(t, want, got, query)
		}
	})
}

func TestUsersSeeWhatTheirTagsAllow(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		require.Equal(t, 201, s.call("PUT", "/users/look", object{"password": "look", "tags": "management"}, nil))
		require.Equal(t, 201, s.call("PUT", "/permissions/%2F/look", object{"configure": "^$", "write": "^$", "read": ".*"}, nil))
		require.Equal(t, 201, s.call("PUT", "/users/nobody", object{"password": "nobody", "tags": ""}, nil))
		require.Equal(t, 201, s.call("PUT", "/vhosts/other", nil, nil))
		for path, want := range map[string]int{"/queues/%2F": 200, "/queues/other": 401, "/policies/%2F": 401, "/nodes": 401, "/users": 401, "/overview": 200} {
			assert.Equal(t, want, s.as("look", "look", "GET", path, nil, nil), path)
			assert.Equal(t, 401, s.as("nobody", "nobody", "GET", path, nil, nil), path)
		}
		var me struct {
			Name string
			Tags []string
		}
		require.Equal(t, 200, s.as("look", "look", "GET", "/whoami", nil, &me))
		assert.Equal(t, []string{"management"}, me.Tags)
		require.Equal(t, 204, s.call("DELETE", "/permissions/%2F/look", nil, nil))
		assert.Equal(t, 401, s.as("look", "look", "GET", "/queues/%2F", nil, nil))
		require.Equal(t, 204, s.call("DELETE", "/users/look", nil, nil))
		assert.Equal(t, 404, s.call("DELETE", "/users/look", nil, nil))
	})
}

func TestConnectionsAndLimits(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		u, err := s.b.Authenticate("PLAIN", "guest", "guest")
		require.NoError(t, err)
		c, refused := s.b.Connect(u, "/", engine.Peer{ContainerID: "me", Address: "127.0.0.1:4711"})
		require.Nil(t, refused)
		c.Begin()
		var all []struct{ Name, User string }
		require.Equal(t, 200, s.call("GET", "/vhosts/%2F/connections?disable_stats=true", nil, &all))
		require.Len(t, all, 1)
		assert.Equal(t, "127.0.0.1:4711 -> 127.0.0.1:5672", all[0].Name)
		path := "/connections/" + url.PathEscape(all[0].Name)
		var sessions []any
		if s.b.Version()[:3] == "4.0" {
			assert.Equal(t, 404, s.call("GET", path+"/sessions", nil, nil))
		} else {
			require.Equal(t, 200, s.call("GET", path+"/sessions", nil, &sessions))
			assert.Len(t, sessions, 1)
		}
		require.Equal(t, 204, s.call("PUT", "/vhost-limits/%2F/max-connections", object{"value": 1}, nil))
		_, refused = s.b.Connect(u, "/", engine.Peer{})
		require.NotNil(t, refused)
		assert.Equal(t, "access to vhost '/' refused for user 'guest': vhost connection limit (1) is reached", refused.Description)
		require.Equal(t, 204, s.call("DELETE", "/vhost-limits/%2F/max-connections", nil, nil))
		require.Equal(t, 204, s.call("DELETE", path, nil, nil))
		events := c.Take(nil)
		require.Len(t, events, 1)
		assert.Equal(t, `Connection forced: "Closed via management plugin"`, events[0].Err.Description)
	})
}

func TestHealthTellsAlarms(t *testing.T) {
	s := newSite(t, "")
	assert.Equal(t, 200, s.call("GET", "/health/checks/local-alarms", nil, nil))
	s.b.SetAlarm(engine.AlarmDisk, true)
	assert.Equal(t, 503, s.call("GET", "/health/checks/local-alarms", nil, nil))
	assert.Equal(t, 200, s.call("GET", "/health/checks/port-listener/5672", nil, nil))
	var nodes []map[string]any
	require.Equal(t, 200, s.call("GET", "/nodes?columns=name,disk_free_alarm", nil, &nodes))
	assert.Equal(t, []map[string]any{{"name": "rabbit@memory", "disk_free_alarm": true}}, nodes)
}

// Topic permissions can be set, read, exported, imported, and deleted.
func TestTopicPermissions(t *testing.T) {
	bothVersions(t, func(t *testing.T, s *site) {
		const mine = "/topic-permissions/%2F/guest"
		assert.Equal(t, 404, s.call("GET", mine, nil, nil))
		assert.Equal(t, 400, s.call("PUT", mine, object{"exchange": "shop", "write": "("}, nil))
		assert.Equal(t, 400, s.call("PUT", mine, object{"exchange": "shop", "write": "(", "read": ""}, nil))
		require.Equal(t, 201, s.call("PUT", mine, object{"exchange": "shop", "write": "^a$", "read": "^b$"}, nil))
		require.Equal(t, 204, s.call("PUT", mine, object{"exchange": "shop", "write": "^{username}$", "read": "^b$"}, nil))
		want := []map[string]any{{"user": "guest", "vhost": "/", "exchange": "shop", "write": "^{username}$", "read": "^b$"}}
		var got []map[string]any
		require.Equal(t, 200, s.call("GET", mine, nil, &got))
		assert.Equal(t, want, got)
		var exported object
		require.Equal(t, 200, s.call("GET", "/definitions", nil, &exported))
		require.Equal(t, 204, s.call("DELETE", mine, nil, nil))
		assert.Equal(t, 404, s.call("DELETE", mine, nil, nil))
		require.Equal(t, 204, s.call("POST", "/definitions", object{"topic_permissions": exported["topic_permissions"]}, nil))
		got = nil
		require.Equal(t, 200, s.call("GET", "/topic-permissions", nil, &got))
		assert.Equal(t, want, got)
	})
}
