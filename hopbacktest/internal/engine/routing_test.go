package engine

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

func TestTopicBindings(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.exchange("x", "topic", nil)
		for _, key := range []string{"a.b", "a.*", "a.#", "#", "*.b.#", "*.*.c", "#.c.#", "", "a..b", "*"} {
			l.quorum("q "+key, nil)
			l.bind("x", "q "+key, key, nil)
		}
		for key, want := range map[string]string{
			"a.b":     "a.b|a.*|a.#|#|*.b.#",
			"a":       "a.#|#|*",
			"a.b.c":   "a.#|#|*.b.#|*.*.c|#.c.#",
			"":        "#|", // no word at all
			"a..b":    "a.#|#|a..b",
			"x.c.y.z": "#|#.c.#",
			"c":       "#|#.c.#|*",
			"*":       "#|*",
		} {
			l.outcome("/exchanges/x/"+strings.ReplaceAll(key, "*", "%2A"), nil, "m")
			var got []string
			for _, q := range l.b.Queues("/") {
				if q.Ready > 0 {
					got = append(got, strings.TrimPrefix(q.Name, "q "))
					l.bodies(q.Name)
				}
			}
			wanted := strings.Split(want, "|")
			slices.Sort(wanted)
			slices.Sort(got)
			assert.Equal(t, wanted, got, "key %q", key)
		}
	})
}

func TestHeadersBindings(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.exchange("x", "headers", nil)
		for name, args := range map[string]m{
			"all":        {"x-match": "all", "a": "1", "b": int64(2)},
			"default":    {"a": "1", "b": int64(2)},
			"any":        {"x-match": "any", "a": "1", "b": int64(2)},
			"all-with-x": {"x-match": "all-with-x", "x-opt-d": int64(5)},
			"any-with-x": {"x-match": "any-with-x", "x-opt-d": int64(5), "a": "1"},
			"x-ignored":  {"x-match": "all", "x-opt-d": int64(6)},
			"there":      {"x-match": "all", "a": nil},
			"none":       nil,
		} {
			l.quorum(name, nil)
			l.bind("x", name, "", args)
		}
		for _, c := range []struct {
			properties, annotations m
			want                    []string
		}{
			{m{"a": "1", "b": int32(2)}, nil, []string{"all", "any", "any-with-x", "default", "none", "there", "x-ignored"}},
			{m{"a": "1"}, nil, []string{"any", "any-with-x", "none", "there", "x-ignored"}},
			{m{"b": "2"}, m{"x-opt-d": int64(5)}, []string{"all-with-x", "any-with-x", "none", "x-ignored"}},
			{m{"x-opt-d": int64(5)}, m{"x-opt-d": "5"}, []string{"none", "x-ignored"}}, // the annotation counts
			{m{"a": true}, nil, []string{"none", "there", "x-ignored"}},
			{nil, nil, []string{"none", "x-ignored"}},
		} {
			l.outcome("/exchanges/x", func(msg *frames.Message) {
				msg.ApplicationProperties, msg.Annotations = c.properties.strings(), c.annotations.symbols()
			}, "m")
			var got []string
			for _, q := range l.b.Queues("/") {
				if q.Ready > 0 {
					got = append(got, q.Name)
					l.bodies(q.Name)
				}
			}
			assert.Equal(t, c.want, got, "%v %v", c.properties, c.annotations)
		}
	})
}

func TestAlternateExchangesAndExchangesBehindExchanges(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("lost", nil)
		l.quorum("found", nil)
		l.exchange("nowhere", "fanout", nil)
		l.exchange("x", "direct", m{"alternate-exchange": "nowhere"})
		l.exchange("behind", "fanout", nil)
		l.bind("nowhere", "lost", "", nil)
		l.bind("behind", "found", "", nil)
		status, body := l.request("POST", "/bindings", m{
			"source": "x", "destination_exchange": "behind", "binding_key": "k", "arguments": m{}.strings(),
		}.strings())
		require.Equal(t, 204, status, body)
		l.outcome("/exchanges/x/k", nil, "a")
		l.outcome("/exchanges/x/other", nil, "b")
		assert.Equal(t, []string{"a"}, l.bodies("found"))
		msg := l.one("lost")
		assert.Equal(t, "b", text(msg))
		assert.Equal(t, "x", ann(msg, "x-exchange"))

		assert.IsType(t, &frames.Released{}, l.outcome("/exchanges/amq.topic/nobody", nil, "m"))
		require.NoError(t, l.b.ForgetQueue("/", "lost"))
		assert.IsType(t, &frames.Released{}, l.outcome("/exchanges/x/other", nil, "m"))
		status, _ = l.request("DELETE", "/exchanges/behind", nil)
		require.Equal(t, 204, status)
		assert.IsType(t, &frames.Released{}, l.outcome("/exchanges/x/k", nil, "m"))
	})
}

func TestAddresses(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q/ü", nil)
		l.exchange("x y", "fanout", nil)
		for address, want := range map[string]string{
			"/queues/q%2F%C3%BC": "", "/exchanges/x%20y": "", "/exchanges/x%20y/a/b": "amqp:invalid-field", "/exchanges/": "amqp:invalid-field",
			"/exchanges/amq.default/k": "amqp:invalid-field", "/queues/": "amqp:invalid-field", "/queues/missing": "amqp:not-found",
			"/exchanges/missing": "amqp:not-found", "/topic/x": "amqp:invalid-field", "": "amqp:invalid-field", "/queues/%zz": "amqp:invalid-field",
			"/exchanges/amq.rabbitmq.trace": "amqp:unauthorized-access",
		} {
			s := l.conn.Begin()
			_, fault := s.OpenPublisher(&frames.Attach{Target: &frames.Target{Address: address}})
			if want == "" {
				require.Nil(t, fault, address)
				continue
			}
			require.NotNil(t, fault, address)
			assert.Equal(t, frames.Symbol(want), fault.Err.Condition, address)
			assert.Equal(t, map[bool]Scope{true: ScopeLink, false: ScopeSession}[l.newer()], fault.Ends)
		}
		_, fault := l.conn.Begin().OpenConsumer(&frames.Attach{Source: &frames.Source{Address: "/queues/missing"}})
		require.NotNil(t, fault)
		assert.Equal(t, "amqp:not-found: no queue 'missing' in vhost '/'", fault.Error())
	})
}

func TestLinkWithoutAnAddress(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		l.quorum("q", nil)
		to := func(address any) func(*frames.Message) {
			return func(msg *frames.Message) { msg.Properties = &frames.Properties{To: address} }
		}
		p := l.publisher(nil)
		send := func(edit func(*frames.Message), settled bool) (any, *Fault) {
			fault := p.Publish(1, settled, encoded(t, edit, "m"))
			var state any
			for _, e := range l.events() {
				state = e.State
			}
			return state, fault
		}
		state, fault := send(to("/queues/q"), false)
		require.Nil(t, fault)
		assert.IsType(t, &frames.Accepted{}, state)
		assert.Equal(t, "/queues/q", l.one("q").Properties.To)
		for address, condition := range map[any]string{
			"/exchanges/missing/k": "amqp:not-found", "nonsense": "amqp:precondition-failed", nil: "amqp:precondition-failed",
		} {
			state, fault := send(to(address), false)
			require.Nil(t, fault)
			require.IsType(t, &frames.Rejected{}, state)
			assert.Equal(t, frames.Symbol(condition), state.(*frames.Rejected).Error.Condition)
		}
		state, _ = send(to("/queues/missing"), false)
		assert.IsType(t, &frames.Released{}, state)
		_, fault = send(to("nonsense"), true)
		require.NotNil(t, fault)
		assert.Equal(t, ScopeLink, fault.Ends)
	})
}

func TestXCC(t *testing.T) {
	bothVersions(t, func(t *testing.T, l *lab) {
		for _, q := range []string{"a", "b", "c"} {
			l.quorum(q, nil)
		}
		l.outcome("/queues/a", func(msg *frames.Message) {
			msg.Annotations = m{"x-cc": frames.List{"b", "b", "missing"}}.symbols()
		}, "m")
		got := map[string]int{}
		for _, q := range l.b.Queues("/") {
			got[q.Name] = q.Ready
		}
		if !l.newer() { // which only keeps the annotation
			assert.Equal(t, map[string]int{"a": 1, "b": 0, "c": 0}, got)
			return
		}
		assert.Equal(t, map[string]int{"a": 1, "b": 1, "c": 0}, got)
		assert.Equal(t, "a", ann(l.one("b"), "x-routing-key"))
		assert.Equal(t, []string{"m"}, l.bodies("a"))
	})
}
