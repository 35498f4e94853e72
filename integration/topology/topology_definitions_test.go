package topology_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
)

// An operator imports the file that a team exported, and the virtual host is as if
// the team had declared it.
func TestExportedDefinitionsImportedOverHTTPVerifyClean(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		topology := shopTopology(t)
		policy := declare.Policy{Name: "grow", Pattern: "^orders$", ApplyTo: "quorum_queues", Priority: 7, Definition: map[string]any{"target-group-size": 3}}
		exported, err := audit.Export(s.VHost, topology, policy)
		require.NoError(t, err)
		file := exported.Encode()

		s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(file), nil)
		conn, _ := s.Connect(t)
		d := plan(t, s.Sources(t, conn), topology)
		assert.True(t, d.Nothing(), "%s", d)
		v, err := suite.Verified(t.Context(), s.Sources(t, conn), topology)
		require.NoError(t, err)
		assert.True(t, v.Clean(), "%s", v)
		report, err := declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		assert.Equal(t, len(topology.Queues), report.Count("existed"))

		// What is live exports as the same bytes.
		live, err := check.Read(t.Context(), s.Sources(t, conn), declare.Topology{})
		require.NoError(t, err)
		assert.Equal(t, string(file), string(audit.DefinitionsOf(live).Encode()))

		// Wiped, and imported from the file alone.
		_, err = declare.Delete(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
		d = plan(t, s.Sources(t, conn), topology)
		assert.Equal(t, len(d.Changes), d.Count("create"), "%s", d)
		read, err := audit.ParseDefinitions(file)
		require.NoError(t, err)
		assert.Equal(t, string(file), string(read.Encode()))
		s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(read.Encode()), nil)
		v, err = suite.Verified(t.Context(), s.Sources(t, conn), topology)
		require.NoError(t, err)
		assert.True(t, v.Clean(), "%s", v)
	})
}

// What RabbitMQ's own exporter writes is read, of one virtual host and of the whole
// broker, and nothing of it is lost when it is written again.
func TestTheBrokersOwnDefinitionsAreImported(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		topology := shopTopology(t)
		// RabbitMQ 4.3 leaves internal exchanges out of what it exports.
		for i := range topology.Exchanges {
			topology.Exchanges[i].Internal = false
		}
		suite.Apply(t, conn, topology)
		s.HTTP(t, http.MethodPut, "/operator-policies/"+s.VHost+"/limit", map[string]any{"pattern": "^none$", "apply-to": "queues", "definition": map[string]any{"max-length": 10}}, nil)
		for _, path := range []string{"/definitions/" + s.VHost, "/definitions"} {
			var text json.RawMessage
			s.HTTP(t, http.MethodGet, path, nil, &text)
			d, err := audit.ParseDefinitions(text)
			require.NoError(t, err)
			got, err := d.Topology(s.VHost)
			require.NoError(t, err)
			assert.Empty(t, check.Verify(check.FromTopology(got), topology).Findings)
			v := check.Verify(d.Snapshot(s.VHost), topology)
			assert.Empty(t, v.Findings, "%s", v)
			assert.Len(t, v.Skipped, 4, "nodes and counts can't be told: %s", v)
			require.Len(t, d.Snapshot(s.VHost).Policies, 1)
			assert.True(t, d.Snapshot(s.VHost).Policies[0].Operator)
			again, err := audit.ParseDefinitions(d.Encode())
			require.NoError(t, err)
			assert.Equal(t, string(d.Encode()), string(again.Encode()))
			assert.Subset(t, tree(t, d.Encode()), tree(t, text), "nothing is lost")
		}
	})
}

// tree is what a document says: its members and, of its lists, the entries, each as
// canonical JSON.
func tree(t *testing.T, text []byte) []string {
	t.Helper()
	var doc map[string]any
	require.NoError(t, json.Unmarshal(text, &doc))
	var logged []string
	for k, v := range doc {
		list, ok := v.([]any)
		if !ok {
			list = []any{v}
		}
		for _, entry := range list {
			// The one member that ours adds to 4.3's.
			if m, ok := entry.(map[string]any); ok && k == "exchanges" && m["internal"] == nil {
				m["internal"] = false
			}
			line, err := json.Marshal(entry)
			require.NoError(t, err)
			logged = append(logged, k+" "+string(line))
		}
	}
	return logged
}

// The recipe that this project grew out of can be imported unchanged, and Verify says
// how it loses messages; what Verify asks for is what a policy or a new queue brings.
func TestTheCookbooksDefinitionsVerifyWithFindings(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		d := recipe(t, s.VHost)
		s.HTTP(t, http.MethodPost, "/definitions", json.RawMessage(d.Encode()), nil)
		topology, err := d.Topology(s.VHost)
		require.NoError(t, err)
		found := func() map[string]string {
			v, err := suite.Verified(t.Context(), check.Sources{HTTP: s.API(t)}, topology)
			require.NoError(t, err)
			list := map[string]string{}
			for _, f := range v.Findings {
				list[f.Resource.Name] += f.Rule
			}
			return list
		}
		require.Equal(t, map[string]string{
			"delay_10s": "at-most-once", "delay_60s": "at-most-once", "my_work_queue": "dead-letter", "requeue_exchange": "alternate-exchange",
		}, found())

		// All of it can be fixed in place, by policies and what they lead to.
		s.DeclareExchange(t, "parking", "fanout", true, nil)
		s.DeclareQueue(t, "parked", map[string]any{"x-queue-type": "quorum", "x-delivery-limit": -1})
		s.Bind(t, "parking", "parked", "")
		for name, p := range map[string]map[string]any{
			"delays":  {"pattern": "^delay_", "apply-to": "quorum_queues", "definition": map[string]any{"dead-letter-strategy": "at-least-once", "overflow": "reject-publish"}},
			"work":    {"pattern": "^my_work_queue$", "apply-to": "quorum_queues", "definition": map[string]any{"dead-letter-exchange": "parking", "dead-letter-strategy": "at-least-once", "overflow": "reject-publish"}},
			"requeue": {"pattern": "^requeue_exchange$", "apply-to": "exchanges", "definition": map[string]any{"alternate-exchange": "parking"}},
		} {
			s.HTTP(t, http.MethodPut, "/policies/"+s.VHost+"/"+name, p, nil)
		}
		assert.Empty(t, found())
	})
}

// recipe is the published recipe, for another virtual host.
func recipe(t *testing.T, vhost string) audit.Definitions {
	t.Helper()
	text, err := os.ReadFile("../../operate/audit/testdata/cookbook.json")
	require.NoError(t, err)
	text = bytes.ReplaceAll(text, []byte(`"vhost": "/"`), []byte(`"vhost": "`+vhost+`"`))
	d, err := audit.ParseDefinitions(bytes.Replace(text, []byte(`{ "name": "/" }`), []byte(`{ "name": "`+vhost+`" }`), 1))
	require.NoError(t, err)
	return d
}
