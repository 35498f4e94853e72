package integration

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// object is JSON's.
type object = map[string]any

// A policy with a key that the queue's type doesn't have doesn't apply to the queue at all,
// and the next one does. Both versions agree.
func TestAPolicyWithAnUnsupportedKeyDoesNotApply(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		all := []string{"classic", "quorum", "stream"}
		keys := map[string]struct {
			value any
			types []string // it applies to
		}{
			"max-length": {5, all[:2]}, "max-length-bytes": {5000, all}, "overflow": {"reject-publish", all[:2]}, "delivery-limit": {3, all[1:2]},
			"expires": {600_000, all[:2]}, "message-ttl": {1000, all[:2]}, "dead-letter-exchange": {"x", all[:2]}, "dead-letter-routing-key": {"k", all[:2]},
			"dead-letter-strategy": {"at-least-once", all[1:2]}, "alternate-exchange": {"x", all}, "queue-leader-locator": {"balanced", all},
			"target-group-size": {1, all[1:2]}, "max-age": {"1h", all[2:]}, "stream-max-segment-size-bytes": {100_000, all[2:]}, "queue-version": {2, all},
			"max-in-memory-length": {5, all[1:2]}, "max-in-memory-bytes": {5, all[1:2]}, "queue-mode": {"lazy", all[:1]}, "initial-cluster-size": {1, all[2:]},
			"stream-filter-size-bytes": {16, all}, "consumer-timeout": {60_000, all},
		}
		if s.newer() {
			keys["consumer-disconnected-timeout"] = struct {
				value any
				types []string
			}{60_000, all}
		}
		put := func(path string, body object) { s.http(t, http.MethodPut, path, body, nil) }
		want := map[string]string{}
		for key, k := range keys {
			put("/policies/"+s.vhost+"/"+key, object{"pattern": "^" + key + "-(classic|quorum|stream)$", "apply-to": "queues", "definition": object{key: k.value}})
			for _, kind := range all {
				put("/queues/"+s.vhost+"/"+key+"-"+kind, object{"durable": true, "arguments": object{"x-queue-type": kind}})
				want[key+"-"+kind] = ""
			}
			for _, kind := range k.types {
				want[key+"-"+kind] = key
			}
		}
		put("/policies/"+s.vhost+"/high", object{"pattern": "^both-", "apply-to": "queues", "priority": 9, "definition": object{"max-length": 5, "max-age": "1h"}})
		put("/policies/"+s.vhost+"/low", object{"pattern": "^both-", "apply-to": "queues", "priority": 1, "definition": object{"max-length-bytes": 5000}})
		for _, kind := range all {
			put("/queues/"+s.vhost+"/both-"+kind, object{"durable": true, "arguments": object{"x-queue-type": kind}})
			want["both-"+kind] = "low"
		}
		// RabbitMQ 4.0 shows a policy once it has collected statistics, every 5 s.
		var got map[string]string
		deadline := time.Now().Add(patience)
		for {
			got = map[string]string{}
			var queues []struct{ Name, Policy string }
			s.http(t, http.MethodGet, "/queues/"+s.vhost, nil, &queues)
			for _, q := range queues {
				got[q.Name] = q.Policy
			}
			if assert.ObjectsAreEqual(want, got) || time.Now().After(deadline) {
				break
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-t.Context().Done():
			}
		}
		assert.Equal(t, want, got)

		// An operator policy has the keys that bound what users may have.
		for _, key := range []string{"dead-letter-exchange", "dead-letter-strategy", "alternate-exchange", "queue-leader-locator", "max-age", "consumer-timeout", "queue-mode"} {
			status, text, err := s.httpStatus(http.MethodPut, "/operator-policies/"+s.vhost+"/p", object{"pattern": ".*", "definition": object{key: keys[key].value}})
			require.NoError(t, err)
			assert.Equal(t, 400, status, key)
			assert.Contains(t, string(text), "are not recognised policy settings", key)
		}
		// A key of a plugin that isn't enabled, one that no policy has, and one that needs another.
		for _, key := range []string{"federation-upstream", "max-priority", "ha-mode", "delayed-retry-type"} {
			status, _, err := s.httpStatus(http.MethodPut, "/policies/"+s.vhost+"/p", object{"pattern": ".*", "definition": object{key: "all"}})
			require.NoError(t, err)
			assert.Equal(t, 400, status, key)
		}
	})
}

func TestPathsOfTheHTTPAPIMayEndInASlash(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		s.http(t, http.MethodPut, "/queues/"+s.vhost+"/q/", object{"durable": true}, nil)
		for path, want := range map[string]int{
			"/queues/" + s.vhost + "/q/?disable_stats=true": 200, "/queues/" + s.vhost + "/": 200, "/overview/": 200, "/nodes/": 200,
			"/queues/" + s.vhost + "/q/bindings/": 200, "/queues//" + s.vhost: 404, "/queues/" + s.vhost + "//": 404,
		} {
			status, _, err := s.httpStatus(http.MethodGet, path, nil)
			require.NoError(t, err)
			assert.Equal(t, want, status, path)
		}
	})
}
