package doctor_test

import (
	"encoding/binary"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
)

// fromText examines a definitions document.
func fromText(t *testing.T, text string) doctor.Report {
	t.Helper()
	r, err := doctor.FromDefinitions(t.Context(), strings.NewReader(text), doctor.Options{})
	require.NoError(t, err)
	return r
}

func fromFile(t *testing.T, name string) doctor.Report {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	require.NoError(t, err)
	return fromText(t, string(text))
}

// A policy whose pattern Go can't parse applies as the broker says, and closes no rule.
func TestAPolicyWithALookAhead(t *testing.T) {
	t.Parallel()
	r := fromFile(t, "lookahead-policy.json")
	assert.Contains(t, found(r), `error dead-letter-exchange queue "orders"`)
	assert.Contains(t, found(r), `warning at-most-once queue "orders"`)
	for _, u := range r.Unseen {
		assert.NotContains(t, u.Rules, "dead-letter-exchange", u.Why)
	}

	// What it sets counts for the queues that it matches, and for no others.
	const text = `{"rabbit_version": "4.1.0", "queues": [
			{"name": "orders", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum"}},
			{"name": "orders.dead", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum"}}],
		"policies": [{"vhost": "/", "name": "ha", "pattern": "PATTERN", "apply-to": "queues", "priority": 0, "definition": {"dead-letter-exchange": "nope"}}], "parameters": []}`
	r = fromText(t, strings.Replace(text, "PATTERN", `^(?!.*\\.dead$)`, 1))
	assert.Contains(t, found(r), `error dead-letter-exchange queue "orders"`)
	assert.NotContains(t, found(r), `error dead-letter-exchange queue "orders.dead"`)
}

// If nobody can tell whether a policy applies, both are examined, and the report says so.
func TestAPolicyThatCantBeDecided(t *testing.T) {
	t.Parallel()
	const text = `{"rabbit_version": "4.1.0", "queues": [
			{"name": "orders", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}},
			{"name": "events", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "stream", "x-max-age": "7D"}}],
		"policies": [
			{"vhost": "/", "name": "odd", "pattern": "^(o|x).*\\1", "apply-to": "quorum_queues", "priority": 1, "definition": {"dead-letter-exchange": "nope"}},
			{"vhost": "/", "name": "dull", "pattern": "^(o|x).*\\1", "apply-to": "exchanges", "priority": -1, "definition": {"alternate-exchange": "amq.fanout"}}], "parameters": []}`
	r := fromText(t, text)
	assert.Contains(t, found(r), `error dead-letter queue "orders"`)
	assert.Contains(t, found(r), `error dead-letter-exchange queue "orders"`)
	assert.Contains(t, found(r), `warning policy-pattern policy "odd"`)
	shown := strings.Join(strings.Fields(r.String()), " ")
	assert.Contains(t, shown, `so it may apply to queue "orders", or not`)
	assert.Contains(t, shown, `more than 3 times, unless one of the policies "odd", "dull" applies`)
	assert.Contains(t, shown, `"nope" doesn't exist, if one of the policies "odd", "dull" applies`)
	assert.NotContains(t, shown, `queue "events"`, "a policy for quorum queues")

	// One that a certain policy outranks doesn't matter.
	r = fromText(t, strings.Replace(text, `"policies": [`, `"policies": [{"vhost": "/", "name": "high", "pattern": ".", "apply-to": "all", "priority": 9, "definition": {"dead-letter-exchange": "amq.direct"}},`, 1))
	assert.NotContains(t, r.String(), "policy-pattern")
	assert.NotContains(t, r.String(), "nope")
}

// A live broker says which policy applies.
func TestALiveBrokerDecidesAboutAPattern(t *testing.T) {
	t.Parallel()
	f := cluster()
	f.queues = []object{
		queue("governed", object{"policy": "odd", "effective_policy_definition": object{"max-length": 5}}),
		queue("free", object{"policy": nil}),
		queue("new", object{"effective_policy_definition": nil}), // 4.0 says nothing in its first seconds
	}
	f.exchanges = []object{exchange("x", "fanout")}
	f.exchanges[0]["policy"] = "odd"
	f.policies = []object{{"vhost": "/", "name": "odd", "pattern": `^(a|b)\1`, "apply-to": "all", "priority": 0, "definition": object{"max-length": 5, "alternate-exchange": "nope"}}}
	r := examine(t, f)
	assert.Contains(t, found(r), `warning overflow queue "governed"`)
	assert.NotContains(t, found(r), `warning overflow queue "free"`)
	assert.Contains(t, found(r), `error alternate-exchange-missing exchange "x"`)
	assert.Contains(t, found(r), `warning policy-pattern policy "odd"`)
	shown := strings.Join(strings.Fields(r.String()), " ")
	assert.Contains(t, shown, `so it may apply to queue "new", or not`)
	assert.NotContains(t, found(r), `note policy-unmatched policy "odd"`)
}

// What answers null, or nothing else that a broker says, isn't a broker without faults.
func TestAnAPIThatSaysNothing(t *testing.T) {
	t.Parallel()
	answering := func(paths map[string]string) (doctor.Report, error) {
		f := cluster()
		f.queues = []object{queue("orders", nil)}
		f.exchanges = []object{exchange("shop", "fanout")}
		f.raw = map[string]func(http.ResponseWriter){}
		for path, text := range paths {
			f.raw[path] = func(w http.ResponseWriter) { _, _ = w.Write([]byte(text)) }
		}
		return doctor.From(t.Context(), serve(t, f, httpapi.Config{}), doctor.Options{})
	}
	for path, texts := range map[string][]string{
		"/vhosts":    {"null", " null\n", "[]", "[null]", "{}"},
		"/queues":    {"null", "{}", `{"items": null, "page_count": 1}`, `{"items": [null], "page_count": 1}`, `{"items": []}`, "[]"},
		"/exchanges": {"null", "{}", `{"items": [null], "page_count": 1}`},
		"/bindings":  {"null", "{}"},
	} {
		for _, text := range texts {
			_, err := answering(map[string]string{path: text})
			require.Error(t, err, "%s: %s", path, text)
			assert.Contains(t, err.Error(), "hopback: ")
		}
	}
	for path, texts := range map[string][]string{
		"/overview": {"null", "{}", "[]"}, "/nodes": {"null", "[]"}, "/policies": {"null"}, "/operator-policies": {"null"}, "/consumers": {"null"}, "/feature-flags": {"null"}, "/deprecated-features/used": {"null"},
	} {
		for _, text := range texts {
			r, err := answering(map[string]string{path: text})
			require.NoError(t, err)
			assert.True(t, slices.ContainsFunc(r.Unseen, func(u doctor.Unseen) bool {
				return strings.Contains(u.Why, path) || strings.Contains(u.Why, "operator-policies")
			}), "%s: %s: %v", path, text, r.Unseen)
		}
	}
}

// Arguments that 3.8 knew aren't new, and what needs a later version is named with it.
func TestAnExportOf3x(t *testing.T) {
	t.Parallel()
	r := fromFile(t, "export-of-3.13.json")
	assert.Equal(t, "3.13.7", r.Version)
	assert.NotContains(t, r.String(), "has no effect before")
	assert.NotContains(t, r.String(), "more than 20 times", "3.x has no default limit")
	r = fromText(t, `{"rabbit_version": "3.13.7", "queues": [
		{"name": "a", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delayed-retry-type": "all", "x-dead-letter-exchange": "amq.fanout"}},
		{"name": "m", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "classic"}}],
		"policies": [{"vhost": "/", "name": "ha", "pattern": "^(?!amq\\.)", "apply-to": "all", "priority": 0, "definition": {"ha-mode": "all", "queue-mode": "lazy"}}]}`)
	assert.Contains(t, r.String(), "x-delayed-retry-type has no effect before RabbitMQ 4.3, and this is 3.13.7")
	assert.NotContains(t, found(r), `note not-replicated queue "m"`, "3.x mirrors it")
}

// The default exchange is on every broker and can't be declared: a file that lists it changes nothing.
func TestAFileWithTheDefaultExchange(t *testing.T) {
	t.Parallel()
	r := fromFile(t, "default-exchange.json")
	for _, f := range found(r) {
		assert.NotContains(t, f, "alternate-exchange", f)
		assert.False(t, strings.HasPrefix(f, "error"), f)
	}
	r = fromText(t, `{"queues": [{"name": "q", "vhost": "/", "durable": true, "arguments": {"x-dead-letter-exchange": "amq.rabbitmq.trace"}}], "bindings": [{"source": "amq.rabbitmq.trace", "vhost": "/", "destination": "q", "destination_type": "queue", "routing_key": "#"}],
		"exchanges": [{"name": "amq.topic", "vhost": "/", "type": "direct", "durable": false, "arguments": {"alternate-exchange": "nope"}}]}`)
	assert.NotContains(t, found(r), `error dead-letter-exchange queue "q"`)
	assert.NotContains(t, r.String(), "nope")
}

// A queue that doesn't say its type has the default of its virtual host, where that is possible.
func TestDefaultQueueTypes(t *testing.T) {
	t.Parallel()
	const queues = `"queues": [
		{"name": "plain", "vhost": "/"}, {"name": "brief", "vhost": "/", "auto_delete": true}, {"name": "gone", "vhost": "/", "durable": false},
		{"name": "own", "vhost": "/", "arguments": {"x-queue-type": "classic"}}, {"name": "other", "vhost": "other", "type": "quorum"}]`
	types := func(more string) map[string]string {
		d, err := audit.ParseDefinitions([]byte(`{` + more + queues + `}`))
		require.NoError(t, err)
		all := map[string]string{}
		for _, vhost := range d.VHosts() {
			for _, q := range d.Snapshot(vhost).Queues {
				all[q.Name] = q.Type
			}
		}
		return all
	}
	classic := map[string]string{"plain": "classic", "brief": "classic", "gone": "classic", "own": "classic", "other": "classic"}
	assert.Equal(t, classic, types(``))
	assert.Equal(t, classic, types(`"vhosts": [{"name": "/", "default_queue_type": "quorum"}],`), "a broker reads only the metadata")
	quorum := maps.Clone(classic)
	quorum["plain"] = "quorum"
	assert.Equal(t, quorum, types(`"vhosts": [{"name": "/", "metadata": {"default_queue_type": "quorum"}}, {"name": "other"}],`))
	assert.Equal(t, classic, types(`"vhosts": [{"name": "/", "metadata": {"default_queue_type": "undefined"}}],`))
	stream := maps.Clone(quorum)
	stream["plain"], stream["other"] = "stream", "stream"
	assert.Equal(t, stream, types(`"metadata": {"default_queue_type": "stream"},`), "a document of one virtual host")
}

// Windows writes files with a byte order mark, or as UTF-16.
func TestFilesOfWindows(t *testing.T) {
	t.Parallel()
	const text = `{"queues": [{"name": "o\u0072ders-é😀", "vhost": "/", "durable": true, "arguments": {"x-queue-type": "quorum", "x-delivery-limit": 3}}]}`
	in := func(order binary.AppendByteOrder, mark bool) string {
		units := utf16.Encode([]rune(text))
		if mark {
			units = append([]uint16{0xFEFF}, units...)
		}
		var b []byte
		for _, u := range units {
			b = order.AppendUint16(b, u)
		}
		return string(b)
	}
	for name, file := range map[string]string{
		"UTF-8 with a byte order mark": "\ufeff" + text,
		"UTF-16":                       in(binary.LittleEndian, true),
		"UTF-16 without":               in(binary.LittleEndian, false),
		"UTF-16 BE":                    in(binary.BigEndian, true),
		"UTF-16 BE without":            in(binary.BigEndian, false),
	} {
		r := fromText(t, file)
		assert.Equal(t, []string{`error dead-letter queue "orders-é😀"`}, found(r), name)
		assert.Contains(t, r.String(), strings.TrimSuffix(strings.TrimSuffix(name, " without"), " BE"))
	}
	assert.NotContains(t, fromText(t, text).String(), "encoding")
	for _, broken := range []string{"\xff\xfe", "\xff\xfe{", "\x00{", "{\x00", "\ufeff", "\xfe\xff\xd8\x00"} {
		_, err := doctor.FromDefinitions(t.Context(), strings.NewReader(broken), doctor.Options{})
		require.ErrorAs(t, err, new(*argument.Error), "%q", broken)
	}
}
