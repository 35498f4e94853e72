package doctor_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
)

// perl are patterns that Go's regular expressions don't have.
var perl = []string{
	`^(?!amq\.).*`, `^(?!amq\.)`, `(?!amq\.).*`, `^(?!(amq\.|celery@)).+$`, `^(?=orders)(?=.*eu$)`, `^(.*(?<![E|e]rror))?$`, `(?<=\.)dead$`, `(?<!\.)dead$`,
	`(?i)^(?!AMQ\.)o`, `^(?i:(?!ORD))[a-z]`, `^(?>a+)ab`, `^(?>a|ab)c`, `^a++b`, `^a*+a`, `^(ab|a)?+b`, `^[a-c]++\d`, `^(?!a)(?#not a).*\Z`, `^(?!\Qa.b\E)a.b`,
	`^(?!x)(?<kind>a|b){2}?c`, `^(?![[:upper:]])[^]x]`, `^(?!q)\w+\b.\B`, `^(?!.*\.(dead|retry)$)(?!amq\.)`, `^(?!.*error)orders\.(?:eu|us)`, `^\x61{2,3}+a`,
}

var perlNames = []string{
	"orders", "orders.eu", "orders.us", "orders.dead", "orders_error", "Error", "celery@host", "dead", "Orders", "AMQ.o", "aab", "aaab", "aaaa", "abc", "ac", "b", "abb", "abc1", "abcd1", "a.b", "axb", "ab..", "x{y", "A", "a b", "ordersdead", "orders.retry",
}

// Policies with what only Perl's regular expressions have apply to the same names here as on a
// broker. Where nobody but the broker can tell, it does, and a file can't.
func TestPatternsOfPoliciesMatchAsOnABroker(t *testing.T) {
	suite.NeedReal(t)
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		b := newBench(t, s)
		for _, name := range perlNames {
			b.HTTP(b.T, http.MethodPut, "/exchanges/"+b.VHost+"/"+url.PathEscape(name), args{"type": "fanout", "durable": true, "arguments": args{}}, nil)
		}
		for _, pattern := range perl {
			b.setPolicy("p", pattern, "exchanges", args{"alternate-exchange": "amq.fanout"})
			var exchanges []struct{ Name, Policy string }
			b.HTTP(b.T, http.MethodGet, "/exchanges/"+b.VHost, nil, &exchanges)
			var theirs, ours []string
			for _, x := range exchanges {
				if x.Policy == "p" && slices.Contains(perlNames, x.Name) {
					theirs = append(theirs, x.Name)
				}
			}
			file := args{"policies": []args{{"name": "p", "vhost": "/", "pattern": pattern, "definition": args{"max-length": 5}}}}
			text, err := json.Marshal(file)
			require.NoError(t, err)
			d, err := audit.ParseDefinitions(text)
			require.NoError(t, err)
			snapshot := d.Snapshot("/")
			for _, name := range perlNames {
				if snapshot.Effective(declare.QueueInfo{Name: name, Type: "quorum"})["x-max-length"] != nil {
					ours = append(ours, name)
				}
			}
			assert.ElementsMatch(t, theirs, ours, pattern)
		}

		b.setPolicy("p", `^(o|d)r.*\1*`, "queues", args{"max-length": 1})
		b.quorum("orders", args{"x-delivery-limit": -1})
		b.put("orders", "a", "b")
		b.has("orders", 1)
		suite.Poll(t, "the broker says which policy applies", func() bool {
			return !slices.Contains(suite.Found(b.examine()), `warning policy-pattern policy "p"`)
		})
		b.named(`warning overflow queue "orders"`)
		text, err := b.API(t).Get(t.Context(), "/definitions/"+b.VHost)
		require.NoError(t, err)
		r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(text), doctor.Options{})
		require.NoError(t, err)
		assert.Contains(t, suite.Found(r), `warning policy-pattern policy "p"`)
		assert.Contains(t, r.String(), "if the policy")
	})
}
