package doctor_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
)

// A definitions file means here what it means to a broker that imports it: the queues with
// their types, the defaults, and what the broker ignores.
func TestAFileIsWhatTheBrokerReads(t *testing.T) {
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		b := newBench(t, s)
		kinds := func(queues []args) map[string]args {
			all := map[string]args{}
			for _, q := range queues {
				all[q["name"].(string)] = args{"type": q["type"], "durable": q["durable"], "auto_delete": q["auto_delete"]}
			}
			return all
		}
		compare := func(vhost string, document args) doctor.Report {
			text, err := json.Marshal(document)
			require.NoError(t, err)
			var theirs []args
			b.HTTP(b.T, http.MethodGet, "/queues/"+vhost+"?columns=name,type,durable,auto_delete", nil, &theirs)
			d, err := audit.ParseDefinitions(text)
			require.NoError(t, err)
			var ours []args
			for _, q := range d.Snapshot(vhost).Queues {
				ours = append(ours, args{"name": q.Name, "type": q.Type, "durable": q.Durable, "auto_delete": q.AutoDelete})
			}
			expected := kinds(ours)
			delete(expected, "impossible") // rule impossible-queue names it
			delete(expected, "neither")
			assert.Equal(t, expected, kinds(theirs), vhost)
			r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(text), doctor.Options{VHost: vhost})
			require.NoError(t, err)
			return r
		}
		queues := func(more args) []args {
			list := []args{
				{"name": "defaults"}, {"name": "typed", "type": "stream", "durable": true, "arguments": args{}}, {"name": "brief", "durable": true, "auto_delete": true, "arguments": []any{}},
				{"name": "classic", "arguments": args{"x-queue-type": "classic"}},
				{"name": "impossible", "durable": true, "auto_delete": true, "arguments": args{"x-queue-type": "quorum"}}, {"name": "neither", "durable": false, "auto_delete": false, "arguments": args{"x-queue-type": "quorum"}},
			}
			for _, q := range list {
				for k, v := range more {
					q[k] = v
				}
			}
			return list
		}
		exchanges := []args{
			{"name": "", "type": "direct", "durable": true, "auto_delete": false, "internal": false, "arguments": args{}},
			{"name": "amq.topic", "type": "direct", "durable": true, "auto_delete": false, "internal": false, "arguments": args{"alternate-exchange": "nope"}},
		}
		b.HTTP(b.T, http.MethodPost, "/definitions/"+b.VHost, args{"queues": queues(nil), "exchanges": exchanges}, nil)
		r := compare(b.VHost, args{"queues": queues(args{"vhost": b.VHost}), "exchanges": exchanges})
		assert.Contains(t, suite.Found(r), `error impossible-queue queue "impossible"`)
		assert.Contains(t, suite.Found(r), `error impossible-queue queue "neither"`)
		assert.NotContains(t, r.String(), "nope")
		var topic args
		b.HTTP(b.T, http.MethodGet, "/exchanges/"+b.VHost+"/amq.topic", nil, &topic)
		assert.Equal(t, "topic", topic["type"])

		// The default type of a virtual host that the document makes. The member besides the
		// metadata, which exports of some versions have too, is ignored.
		for name, described := range map[string]args{
			"metadata": {"metadata": args{"default_queue_type": "quorum"}}, "besides": {"default_queue_type": "quorum"},
		} {
			vhost := b.VHost + "-" + name
			defer b.HTTP(b.T, http.MethodDelete, "/vhosts/"+vhost, nil, nil)
			described["name"] = vhost
			document := args{"vhosts": []args{described}, "queues": queues(args{"vhost": vhost})}
			b.HTTP(b.T, http.MethodPost, "/definitions", document, nil)
			u, err := url.Parse(b.ManagementURL)
			require.NoError(t, err)
			b.HTTP(b.T, http.MethodPut, "/permissions/"+vhost+"/"+u.User.Username(), args{"configure": ".*", "write": ".*", "read": ".*"}, nil)
			compare(vhost, document)
		}

		// Byte order marks and UTF-16.
		const text = `{"queues": [{"name": "marked", "durable": true, "auto_delete": false, "arguments": {}}]}`
		status := func(body string) int {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.ManagementURL+"/api/definitions/"+b.VHost, strings.NewReader(body))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, resp.Body)
			require.NoError(t, resp.Body.Close())
			return resp.StatusCode
		}
		assert.Equal(t, http.StatusNoContent, status(text))
		assert.Equal(t, b.Newer(), status("\ufeff"+text) == http.StatusNoContent)
		wide := "\xff\xfe" + strings.Join(strings.Split(text, ""), "\x00") + "\x00"
		assert.Equal(t, http.StatusBadRequest, status(wide))
		for _, file := range []string{"\ufeff" + text, wide} {
			r, err := doctor.FromDefinitions(t.Context(), strings.NewReader(file), doctor.Options{})
			require.NoError(t, err)
			assert.Contains(t, r.String(), "RabbitMQ refuses to import it")
		}
	})
}
