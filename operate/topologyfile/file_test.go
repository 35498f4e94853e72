package topologyfile_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/fair"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/retry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write schema.json again")

func parse(t *testing.T, text string) topologyfile.File {
	t.Helper()
	f, err := topologyfile.Parse("topology.yaml", []byte(text))
	require.NoError(t, err)
	return f
}

// A file means what the same values mean in Go.
func TestFileIsWhatTheSameValuesAre(t *testing.T) {
	t.Parallel()
	f := parse(t, `
retry:
  delays: [10s, 1m]
  max-retries: 3
  strategy: dead-letter
  names: {prefix: a.}
work-queues:
  orders: {delivery-limit: 5}
  invoices:
queues:
  audit: {dead-letter: {queue: orders.dead}}
exchanges:
  shop: {type: topic}
bindings:
  - {source: shop, queue: orders, key: order.*}
`)
	policy := retry.Policy{Backoff: retry.Delays(10*time.Second, time.Minute), MaxRetries: 3, Strategy: retry.StrategyDeadLetter, Names: retry.Names{Prefix: "a."}}
	work := []declare.QuorumQueue{{Name: "orders", DeliveryLimit: 5}, {Name: "invoices"}}
	assert.Equal(t, work, f.Work)
	want, err := retry.Topology(policy, work...)
	require.NoError(t, err)
	other := declare.Topology{
		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}},
		Queues:    []declare.Queue{declare.QuorumQueue{Name: "audit", DeadLetter: declare.ToQueue("orders.dead")}},
		Bindings:  []declare.Binding{{Source: "shop", Queue: "orders", Key: "order.*"}},
	}
	assert.Equal(t, other, f.Other)
	want, err = declare.Merge(want, other)
	require.NoError(t, err)
	assert.Equal(t, check.FromTopology(want), check.FromTopology(f.Topology))
	ladder, err := f.Policy.QueueDelays()
	require.NoError(t, err)
	assert.Equal(t, []time.Duration{10 * time.Second, time.Minute}, ladder)
}

func TestSpecialValues(t *testing.T) {
	t.Parallel()
	f := parse(t, "retry: {max-retries: none}\nwork-queues: {a: {delivery-limit: 0}, b: {delivery-limit: -1}, c: {delivery-limit: unlimited}, 1: , 'null': }")
	assert.Equal(t, retry.NoRetries, f.Policy.MaxRetries)
	assert.Equal(t, []declare.QuorumQueue{
		{Name: "a", DeliveryLimit: declare.NoRedelivery}, {Name: "b", DeliveryLimit: declare.Unlimited}, {Name: "c", DeliveryLimit: declare.Unlimited},
		{Name: "1"}, {Name: "null"},
	}, f.Work)
	f = parse(t, "retry: {exponential: {first: 1s, max: 5s}, max-retries: 4}")
	for i, want := range []time.Duration{1, 2, 4, 5} {
		d, err := f.Policy.Delay(i + 1)
		require.NoError(t, err)
		assert.Equal(t, want*time.Second, d)
	}
	assert.Empty(t, f.Work)
	assert.NotEmpty(t, f.Topology.Queues, "delay queues alone, for others to share")
	assert.Empty(t, parse(t, "exchanges: {x: {}}").Topology.Queues, "no retry topology where nobody asks for one")
}

// What is wrong is said with its line, what was found, and what to write.
func TestErrors(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                               {"topology.yaml: the file is empty; add a work queue"},
		"# nothing\n":                    {"the file is empty"},
		"---\n":                          {"the file is empty"},
		"work-queues:":                   {"topology.yaml:1:1: the file declares nothing"},
		"orders":                         {`topology.yaml:1:1: the file = "orders" is text, and should be a mapping`},
		"[a]":                            {"the file is a list"},
		"a: [":                           {"the file isn't YAML"},
		"work-queues:\n\ta:\n":           {"topology.yaml:2: the file isn't YAML", "YAML doesn't allow tabs"},
		"a: b: c\n":                      {"topology.yaml:1: the file isn't YAML"},
		"# x\n\na:\n  - {b: 1\n  - c\n":  {"topology.yaml:5: the file isn't YAML: did not find expected ',' or '}'"},
		"a:\n  - 'b\n  - c\nd:\n":        {"topology.yaml:2: the file isn't YAML: found unexpected end of stream"},
		"a:\n  - b\n c: d\ne:\n":         {"topology.yaml:3: the file isn't YAML: did not find expected key"},
		"a\x00b":                         {"isn't text in UTF-8"},
		"\xff\xfe":                       {"isn't text in UTF-8"},
		strings.Repeat("# x\n", 300_000): {"has more than 1048576 bytes"},
		"work-queues: {a: }\n---\nb: 1":  {"has a second document"},
		"work-queues: {a: }\n---\nb: [":  {"isn't YAML"},

		"work-queue: {a: }": {`1:1: work-queue isn't a known key; did you mean "work-queues"?`},
		"delays: [1s]":      {`delays isn't a known key; it belongs under retry`},
		"work-queues:\n  a:\n    delivry-limit: 5":                 {`3:5: work-queues.a.delivry-limit isn't a known key; did you mean "delivery-limit"?`},
		"work-queues:\n  a: {x-message-ttl: 5s}":                   {`did you mean "message-ttl"?`},
		"work-queues:\n  a: {max_priority: 5}":                     {`did you mean "max-priority", which belongs to a classic queue?`},
		"retry: {colour: red}":                                     {"known words: strategy, delays"},
		"retry: {strategy: nativ}":                                 {`1:19: retry.strategy = "nativ" isn't one of republish, dead-letter, native, auto; did you mean "native"?`},
		"retry: {strategy: 1}":                                     {`retry.strategy = "1" is an integer, and should be one of`},
		"retry: {delays: 10s}":                                     {`retry.delays = "10s" is text, and should be a list`},
		"retry: {delays: []}":                                      {"retry.delays is empty"},
		"retry: {delays: [10]}":                                    {`retry.delays[0] = "10" has no unit; write it with its unit`},
		"retry: {delays: [0s]}":                                    {"is zero"},
		"retry: {delays: [1d]}":                                    {"write days in hours: 24h"},
		"retry: {delays: [-1s, soon, 1us]}":                        {`"-1s" isn't a valid duration`, `"soon" isn't a valid duration`, `"1us" isn't a valid duration`},
		"retry: {delays: [99999990000h]}":                          {"isn't a valid duration"},
		"retry: {delays: [200000h]}":                               {`topology.yaml:1:18: retry.delays[0] = "200000h0m0s" is a delay out of range; use 1 ms to ten years`},
		"retry: {delays: [1s], exponential: {first: 1s}}":          {"has both delays and exponential"},
		"retry: {exponential: {factor: 2}}":                        {"retry.exponential has no first"},
		"retry: {exponential: {first: 1s, factor: 0}}":             {"isn't a number above zero"},
		"retry: {exponential: {first: 1s, factor: .inf}}":          {"isn't a number above zero"},
		"retry: {max-retries: -1}":                                 {"retry.max-retries = -1 is below 0"},
		"retry: {max-retries: 99999}":                              {"topology.yaml:1:22: retry.max-retries = 99999 is not from 1 to 1000; use a value in that range, or none"},
		"retry: {max-retries: 0}":                                  {"retry.max-retries = 0 is ambiguous; write none for no retries"},
		"retry: {max-retries: 010}":                                {"without leading zeros"},
		"retry: {max-retries: 0x10}":                               {"write decimal digits"},
		"retry: {max-retries: 99999999999999999999}":               {"should be a whole number or none"},
		"retry: {max-retries: '5'}":                                {"is text, and should be a whole number or none"},
		"retry: {strategy: native, any-delay: {}}":                 {"1:38: retry.any-delay works only with the strategy republish, and the policy has native; leave it out"},
		"retry: {any-delay: {levels: 99}}":                         {"1:29: retry.any-delay.levels = 99 is out of range"},
		"retry: {names: {retry-exchange: x, requeue-exchange: x}}": {`1:54: retry.names.requeue-exchange = "x" is the same as retry-exchange; use different names`},

		"work-queues: [a]":                                                      {"work-queues is a list, and should be a mapping"},
		"work-queues: {a: 1}":                                                   {`work-queues.a = "1" is an integer, and should be a mapping`},
		"work-queues: {a: , a: }":                                               {"work-queues.a is a duplicate of the key in line 1; keep one of them"},
		"work-queues:\n  b:\n  a.*:\n":                                          {`topology.yaml:3:3: work-queues.a.* = "a.*" has the word "*"`},
		"work-queues: {amq.a: }":                                                {`starts with "amq."`},
		"work-queues: {'': }":                                                   {"is empty"},
		"work-queues: {a: {message-ttl: 5}}":                                    {"has no unit"},
		"work-queues: {a: {single-active-consumer: yes}}":                       {`is text, and should be true or false`},
		"work-queues: {a: {delivery-limit: no}}":                                {"should be a whole number or unlimited"},
		"work-queues: {a: {delivery-limit: -2}}":                                {"is below -1"},
		"work-queues: {a: {arguments: {x-delivery-limit: 5}}}":                  {"1:49: work-queues.a.arguments.x-delivery-limit = 5 can't be set here: it belongs in delivery-limit; set that instead"},
		"work-queues: {a: {arguments: {x-a: {b: c}}}}":                          {"arguments.x-a is a mapping"},
		"work-queues: {a: {arguments: {x-a: 2001-01-01}}}":                      {"is a date", "dates in quotes"},
		"work-queues: {a: {arguments: {x-a: .nan}}}":                            {"is a number with a fraction"},
		"work-queues: {a: {arguments: {x-a: [[[[[[[[[1]]]]]]]]]}}}":             {"is nested too deeply"},
		"work-queues: {a: {dead-letter: drop}}\nretry: {strategy: dead-letter}": {"leave it out, or use another strategy"},
		"work-queues: {a: , b: {overflow: drop-head}}":                          {"topology.yaml:1:34: work-queues.b.overflow", "dead-letter at most once; leave it out, or set the strategy of dead-letter to at-most-once"},

		"queues: {a: }":                                                   {"1:10: queues.a.dead-letter isn't set", "put it under work-queues"},
		"queues: {a: {type: clasic}}":                                     {`did you mean "classic"?`},
		"queues: {a: {type: classic}}":                                    {"1:10: queues.a.dead-letter isn't set"},
		"queues: {a: {type: stream, max-lenght: 1}}":                      {`did you mean "max-length", which belongs to a queue?`},
		"queues: {a: {type: classic, dead-letter: {queue: b}}}":           {"add strategy: at-most-once"},
		"queues: {a: {dead-letter: dropp}}":                               {"is neither drop nor a mapping; write drop, {queue: NAME}"},
		"queues: {a: {dead-letter: {}}}":                                  {"names neither a queue nor an exchange"},
		"queues: {a: {dead-letter: {queue: b, exchange: c}}}":             {"also an exchange or a routing key"},
		"queues: {a: {type: stream, max-age: 1500ms}}":                    {"queues.a.max-age", "write whole seconds"},
		"work-queues: {a: }\nqueues: {a.dead: {dead-letter: drop}}":       {"2:10: queues.a.dead", "is declared twice with different values", "use another name, or leave it out"},
		"work-queues: {a: }\nexchanges: {retry_exchange: {type: direct}}": {"2:13: exchanges.retry_exchange", "declared twice"},

		"bindings: {}":                                                          {"bindings is a mapping, and should be a list"},
		"bindings: [{queue: a}]":                                                {"bindings[0] has no source"},
		"bindings: [{source: a}]":                                               {"1:12: bindings[0].queue is empty, and so is exchange"},
		"bindings: [{source: a, queue: b, exchange: c}]":                        {`1:31: bindings[0].queue = "b" is set, and so is exchange`},
		"bindings: [{source: a, queue: b, match: any}]":                         {"bindings[0].headers is empty", "or match: all"},
		"bindings: [{source: a, queue: b, headers: {x-a: 1}}]":                  {"1:49: bindings[0].headers.x-a = 1 starts with", "use match: all-with-x"},
		"bindings: [{source: a, queue: b, headers: {a: 1}, arguments: {a: 1}}]": {"1:66: bindings[0].arguments.a = 1 is in both maps: it is also headers.a"},
		"bindings: [{source: a, queue: b, arguments: {a: [1, 'x']}, headers: {m: [1]}, match: all}]\nqueues: {q: {type: raw, arguments: {x-queue-type: quorum, x-delivery-limit: no}}}": {"2:77: queues.q.arguments.x-delivery-limit"},
		"work-queues: {a: {arguments: {x-queue-type: stream}}}":                                       {"1:45: work-queues.a.arguments.x-queue-type", "use the key type, under queues"},
		"work-queues: {a: {message-ttl: 0.5ms}}":                                                      {"1:32: work-queues.a.message-ttl", "write whole milliseconds"},
		"work-queues: {a: {delayed-retry-min: 1s}}":                                                   {"work-queues.a.delayed-retry-type", "write delayed-retry-type: all, failed, or returned"},
		"work-queues: {a: {delayed-retry-type: all, delayed-retry-min: 2s, delayed-retry-max: 1s}}":   {"1:86: work-queues.a.delayed-retry-max", "is shorter than delayed-retry-min"},
		"work-queues: {a: {quorum-initial-group-size: 3, consumer-timeout: 90000h}}":                  {"1:67: work-queues.a.consumer-timeout", "is longer than ten years"},
		"queues: {a: {type: classic, dead-letter: {exchange: x, strategy: at-least-once}}}":           {"1:66: queues.a.dead-letter.strategy", "add strategy: at-most-once to its dead-letter"},
		"queues: {a: {dead-letter: {queue: '" + strings.Repeat("q", 256) + "'}}}":                     {"1:35: queues.a.dead-letter.queue", "is longer than the name of a queue can be"},
		"queues: {a: {dead-letter: {exchange: x, routing-key: '" + strings.Repeat("k", 5000) + "'}}}": {"1:54: queues.a.dead-letter.routing-key", "has 5000 bytes"},
		"queues: {a: {type: stream, stream-max-segment-size-bytes: 9999999999}}":                      {"1:59: queues.a.stream-max-segment-size-bytes", "is out of range"},
		"exchanges: {x: {alternate-exchange: ..}}":                                                    {"1:37: exchanges.x.alternate-exchange", "is special in the broker"},
		"exchanges: {x: {arguments: {alternate-exchange: y}}}":                                        {"1:49: exchanges.x.arguments.alternate-exchange", "it belongs in alternate-exchange"},
		"exchanges: {retry_exchange: {type: direct}}\nwork-queues: {retry_exchange: }":                {`1:13: exchanges.retry_exchange = "retry_exchange" is declared twice with different values: type is "topic", then "direct"`},
		"retry: {exponential: {first: 1ms, factor: 1.01}, max-retries: 1000}":                         {"1:22: retry.exponential returns 637 different delays", "set exponential.max"},
		"retry: {exponential: {first: 80000h}}":                                                       {"1:22: retry.exponential = ", "is a delay out of range"},
		"retry: {any-delay: {unit: 1ms, levels: 2}}":                                                  {"retry.delays", "longer delay than the ladder supports"},
		"bindings: [{source: a, queue: 1}]":                                                           {"is an integer, and should be text; put it in quotes"},
		"bindings: [{source: a, queue: b, match: al}]":                                                {`did you mean "all"?`},

		"work-queues: &a {b: }":                     {"has a YAML anchor or alias"},
		"work-queues: {b: &a {}, c: *a}":            {"has a YAML anchor or alias"},
		"work-queues:\n  <<: {a: }":                 {"has a YAML merge key"},
		"work-queues: {[a]: }":                      {"has a key that is a list"},
		"work-queues: !x {a: }":                     {"is a YAML tag, which topology files can't use"},
		"exchanges: {x: {type: !!str 1}}":           {"is a YAML tag, which topology files can't use"},
		"exchanges: {x: {type: !!binary aGVsbG8=}}": {"is a YAML tag, which topology files can't use"},
	} {
		_, err := topologyfile.Parse("topology.yaml", []byte(text))
		if !assert.Error(t, err, "%.100q", text) {
			continue
		}
		for _, w := range want {
			assert.ErrorContains(t, err, w, "%.100q", text)
		}
		assert.NotRegexp(t, goWords, err.Error(), "%.100q: Go's words", text)
		var e *topologyfile.Error
		require.ErrorAs(t, err, &e)
		var bad *argument.Error
		require.ErrorAs(t, err, &bad)
	}
}

// goWords are names as only Go code has them: a qualified one, or one with an
// upper-case letter within.
var goWords = regexp.MustCompile(`\b(declare|retry|argument)\.[A-Z]|[a-z][A-Z][a-z]+|\b(Policy|Ladder|Names|Topology)\.`)

// Each reader gets a fault in their own words: to one who writes Go, with
// the path of the field; to one who writes a file, with the path of the key and its
// line.
func TestTheSameFaultInGoAndInAFile(t *testing.T) {
	t.Parallel()
	goError := func(err error) string {
		var e *argument.Error
		require.ErrorAs(t, err, &e)
		return e.Error()
	}
	topology := func(p retry.Policy, q ...declare.QuorumQueue) error {
		_, err := retry.Topology(p, q...)
		return err
	}
	for name, c := range map[string]struct {
		inGo                 error
		file                 string
		notified, notifiedIn string
	}{
		"an item of a list": {
			retry.Policy{MaxRetries: 3, Backoff: retry.Delays(time.Second, time.Minute, 100_000*time.Hour)}.Validate(),
			"retry:\n  max-retries: 3\n  delays:\n    - 1s\n    - 1m\n    - 100000h\n",
			`hopback: Policy.Backoff(3) = "100000h0m0s" is a delay out of range; use 1 ms to ten years`,
			`f:6:7: retry.delays[2] = "100000h0m0s" is a delay out of range; use 1 ms to ten years`,
		},
		"a number": {
			retry.Policy{MaxRetries: 5000}.Validate(),
			"retry:\n  max-retries: 5000",
			"hopback: Policy.MaxRetries = 5000 is not from 1 to 1000; use a value in that range, 0 for the default, or retry.NoRetries",
			"f:2:16: retry.max-retries = 5000 is not from 1 to 1000; use a value in that range, or none",
		},
		"a struct within": {
			retry.Policy{AnyDelay: &retry.Ladder{Levels: 99}}.Validate(),
			"retry:\n  any-delay:\n    levels: 99",
			"hopback: Policy.AnyDelay.Levels = 99 is out of range; use 1 to 32",
			"f:3:13: retry.any-delay.levels = 99 is out of range; use 1 to 32",
		},
		"two arguments": {
			retry.Policy{Names: retry.Names{RetryExchange: "x", RequeueExchange: "x"}}.Validate(),
			"retry:\n  names:\n    retry-exchange: x\n    requeue-exchange: x",
			`hopback: Policy.Names.RequeueExchange = "x" is the same as RetryExchange; use different names`,
			`f:4:23: retry.names.requeue-exchange = "x" is the same as retry-exchange; use different names`,
		},
		"an argument of a work queue": {
			topology(retry.Policy{}, declare.QuorumQueue{Name: "a", Arguments: map[string]any{"x-max-length": 5}}),
			"work-queues:\n  a:\n    arguments:\n      x-max-length: 5",
			`hopback: QuorumQueue("a").Arguments["x-max-length"] = 5 can't be set here: it belongs in MaxLength; set that instead`,
			"f:4:21: work-queues.a.arguments.x-max-length = 5 can't be set here: it belongs in max-length; set that instead",
		},
		"the name of the second work queue": {
			topology(retry.Policy{}, declare.QuorumQueue{Name: "a"}, declare.QuorumQueue{Name: "b.#"}),
			"work-queues:\n  a:\n  b.#:",
			`hopback: work[1].Name = "b.#" has the word "#", a wildcard in the binding that returns its messages: it would match other queues' messages; rename the queue; a star or hash within a longer word is fine`,
			`f:3:3: work-queues.b.# = "b.#" has the word "#", a wildcard in the binding that returns its messages: it would match other queues' messages; rename the queue; a star or hash within a longer word is fine`,
		},
		"a remedy of the file's own": {
			declare.QuorumQueue{Name: "a", Overflow: declare.OverflowDropHead, DeadLetter: declare.ToQueue("d")}.Validate(),
			"queues:\n  a:\n    dead-letter: {queue: d}\n    overflow: drop-head",
			`hopback: QuorumQueue("a").Overflow = "drop-head" makes the broker silently dead-letter at most once; leave it empty, or set DeadLetter.AtMostOnce`,
			`f:4:15: queues.a.overflow = "drop-head" makes the broker silently dead-letter at most once; leave it out, or set the strategy of dead-letter to at-most-once`,
		},
	} {
		assert.Equal(t, c.notified, goError(c.inGo), name)
		_, err := topologyfile.Parse("f", []byte(c.file))
		assert.EqualError(t, err, c.notifiedIn, name)
		assert.NotRegexp(t, goWords, c.notifiedIn, name)
	}
}

// All that is wrong is reported at once, and not without end.
func TestAllErrorsAtOnce(t *testing.T) {
	t.Parallel()
	_, err := topologyfile.Parse("f", []byte("retry:\n  stratgy: a\n  delays: [1]\nqueue:\n"))
	require.Error(t, err)
	assert.Len(t, strings.Split(err.Error(), "\n"), 3)
	_, err = topologyfile.Parse("f", []byte("retry: {delays: ["+strings.Repeat("1, ", 1000)+"]}"))
	require.ErrorContains(t, err, "f: and 980 more")
	assert.Less(t, len(err.Error()), 4000)
	_, err = topologyfile.Parse("f", []byte(strings.Repeat("a", 100_000)+": 1"))
	assert.Less(t, len(err.Error()), 1000)
}

func examples(t testing.TB) map[string]string {
	t.Helper()
	names, err := filepath.Glob("testdata/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	all := map[string]string{}
	for _, n := range names {
		text, err := os.ReadFile(n)
		require.NoError(t, err)
		all[n] = string(text)
	}
	return all
}

// schema.json is what the parser's keys make.
func TestSchemaFile(t *testing.T) {
	t.Parallel()
	if *update {
		require.NoError(t, os.WriteFile("schema.json", topologyfile.Schema(), 0o644))
	}
	text, err := os.ReadFile("schema.json")
	require.NoError(t, err)
	assert.Equal(t, string(topologyfile.Schema()), string(text), "run: go test ./operate/topologyfile -run TestSchemaFile -update")
}

// Every key of the schema is in an example, every example fits the schema, and a key
// that isn't in the schema is refused in the same place by the parser.
func TestSchemaAndParserKnowTheSameKeys(t *testing.T) {
	t.Parallel()
	s := newSchema(t)
	seen := map[string]bool{}
	all := examples(t)
	all["elsewhere"] = elsewhere
	for name, text := range all {
		doc := decode(t, text)
		assert.Empty(t, s.check(doc), name)
		s.seen(doc, seen)
		parse(t, text)
		// An unknown key at each mapping in turn.
		for i := range mappings(doc) {
			broken := decode(t, text)
			m := mappings(broken)[i]
			m["no-such-key"] = []any{map[string]any{}}
			assert.NotEmpty(t, s.check(broken), "%s: mapping %d", name, i)
			encoded, err := json.Marshal(broken)
			require.NoError(t, err)
			_, err = topologyfile.Parse("f", encoded) // JSON is YAML
			assert.Error(t, err, "%s: mapping %d", name, i)
		}
	}
	for _, path := range s.paths() {
		assert.True(t, seen[path], "no example has %s", path)
	}
}

// What the schema refuses, the parser refuses.
func TestSchemaRefusesNothingThatTheParserTakes(t *testing.T) {
	t.Parallel()
	s := newSchema(t)
	for _, text := range []string{
		"work-queues: {a: 1}", "work-queues: [a]", "retry: {delays: [10]}", "retry: {delays: []}", "retry: {strategy: x}", "retry: {delays: [1s], exponential: {first: 1s}}",
		"retry: {max-retries: -1}", "retry: {max-retries: 1.5}", "queues: {a: }", "queues: {a: {type: classic}}", "queues: {a: {type: stream, delivery-limit: 1}}",
		"bindings: [{source: a}]", "bindings: [{queue: a}]", "bindings: [{source: a, queue: b, exchange: c}]", "work-queues: {a: {delivery-limit: -2}}",
		"work-queues: {a: {arguments: {x-a: {}}}}", "retry: {rules: [{do: discard}]}", "retry: {rules: []}", "retry: {rules: [{reason: a, value: [1]}]}", "central: {queues: []}", "central: {counter-end: x}", "central: 1", "queues: {a: {dead-letter: {}}}", "queues: {a: {dead-letter: no}}", "{}", "exchanges: {x: {type: 1}}", "exchanges: {x: {internal: 'true'}}",
	} {
		assert.NotEmpty(t, s.check(decode(t, text)), text)
		_, err := topologyfile.Parse("f", []byte(text))
		assert.Error(t, err, text)
	}
}

// Every field that can be declared has a key: all examples together set them all.
func TestEveryFieldHasAKey(t *testing.T) {
	t.Parallel()
	set := map[string]bool{}
	var fields func(v reflect.Value)
	want := map[string]bool{}
	fields = func(v reflect.Value) {
		if v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
			if v.IsNil() {
				return
			}
			v = v.Elem()
		}
		if v.Kind() != reflect.Struct {
			return
		}
		name := v.Type().String()
		for i := range v.NumField() {
			f := v.Type().Field(i)
			path := name + "." + f.Name
			want[path] = true
			if !v.Field(i).IsZero() {
				set[path] = true
			}
			if f.IsExported() {
				fields(v.Field(i))
			}
		}
	}
	for _, text := range append(slices.Collect(maps.Values(examples(t))), elsewhere) {
		f := parse(t, text)
		fields(reflect.ValueOf(f.Policy))
		fields(reflect.ValueOf(f.Central))
		for _, q := range f.Work {
			fields(reflect.ValueOf(q))
		}
		for _, q := range f.Other.Queues {
			fields(reflect.ValueOf(q))
		}
		for _, x := range f.Other.Exchanges {
			fields(reflect.ValueOf(x))
		}
		for _, b := range f.Other.Bindings {
			fields(reflect.ValueOf(b))
		}
	}
	// What only code can say.
	for _, code := range []string{"Policy.RetryIf", "Policy.Worker", "Policy.LogLevel", "Policy.Waive", "CentralConfig.HTTP"} {
		require.True(t, want["retry."+code], code)
		delete(want, "retry."+code)
	}
	assert.Greater(t, len(want), 60)
	for path := range want {
		assert.True(t, set[path], "no key for %s", path)
	}
}

// Encode and Parse are each other's opposites.
func TestEncodedTopologyIsReadBackAsTheSame(t *testing.T) {
	t.Parallel()
	for name, text := range examples(t) {
		want := parse(t, text).Topology
		encoded, err := topologyfile.Encode(want)
		require.NoError(t, err)
		got := parse(t, string(encoded))
		assert.Equal(t, check.FromTopology(want), check.FromTopology(got.Topology), "%s\n%s", name, encoded)
		assert.Empty(t, newSchema(t).check(decode(t, string(encoded))), "%s\n%s", name, encoded)
		again, err := topologyfile.Encode(got.Topology)
		require.NoError(t, err)
		assert.Equal(t, string(encoded), string(again))
	}
	queue := &declare.QuorumQueue{Name: "true", DeadLetter: declare.ToQueue("1e3")}
	encoded, err := topologyfile.Encode(declare.Topology{
		Queues:   []declare.Queue{queue, declare.RawQueue{Name: "ü \x01:#", Arguments: map[string]any{"x-f": 2.0, "x-n": nil, "x-big": int64(1) << 62, "~": "a\nb"}}},
		Bindings: []declare.Binding{{Source: "amq.topic", Queue: "true", Key: "a\tb\r\n#"}},
	})
	require.NoError(t, err)
	f := parse(t, string(encoded))
	assert.Equal(t, *queue, f.Other.Queues[0])
	assert.Equal(t, map[string]any{"x-f": 2.0, "x-n": nil, "x-big": int64(1) << 62, "~": "a\nb"}, f.Other.Queues[1].(declare.RawQueue).Arguments)
	assert.Equal(t, "a\tb\r\n#", f.Other.Bindings[0].Key)

	_, err = topologyfile.Encode(declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{}}})
	var bad *argument.Error
	require.True(t, errors.As(err, &bad))
}

// Any file is read or refused with a place; and what is read fits
// the schema, can be declared, and is read back from what Encode writes.
func FuzzParse(f *testing.F) {
	for _, text := range examples(f) {
		f.Add(text)
	}
	for _, text := range []string{"", "a: [", "queues: {a: {type: raw}}", "bindings: [{source: a, queue: b}]", "a: &a [*a]", "? a\n: b", "retry:", "retry: {delays: [1s]}", "!!str a: !x b"} {
		f.Add(text)
	}
	s := newSchema(f)
	f.Fuzz(func(t *testing.T, text string) {
		file, err := topologyfile.Parse("f", []byte(text))
		if err != nil {
			var e *topologyfile.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, "f", e.File)
			return
		}
		require.NoError(t, file.Topology.Validate())
		require.NoError(t, file.Policy.Validate())
		require.Empty(t, s.check(decode(t, text)))
		if file.Central != nil && len(file.Topology.Queues)+len(file.Topology.Exchanges)+len(file.Topology.Bindings) == 0 {
			return // all is there already
		}
		encoded, err := topologyfile.Encode(file.Topology)
		require.NoError(t, err)
		again, err := topologyfile.Parse("again", encoded)
		require.NoError(t, err, "%s", encoded)
		require.Equal(t, check.FromTopology(file.Topology), check.FromTopology(again.Topology), "%s", encoded)
	})
}

// A file of the largest size is read, or refused, in a moment.
func TestLargeFiles(t *testing.T) {
	t.Parallel()
	unknown, queues := strings.Builder{}, strings.Builder{}
	queues.WriteString("queues:\n")
	for i := range 10_000 {
		fmt.Fprintf(&unknown, "no-such-key-%d: \n", i)
		fmt.Fprintf(&queues, " queue-%d: {dead-letter: drop}\n", i)
	}
	began := time.Now()
	_, err := topologyfile.Parse("f", []byte(unknown.String()))
	require.ErrorContains(t, err, "and 9980 more")
	f, err := topologyfile.Parse("f", []byte(queues.String()))
	require.NoError(t, err)
	assert.Len(t, f.Topology.Queues, 10_000)
	for _, open := range []string{"[", "{a: ", "- ", "? "} {
		_, err := topologyfile.Parse("f", []byte("queues: "+strings.Repeat(open, 200_000)))
		assert.ErrorContains(t, err, "isn't YAML")
	}
	assert.Less(t, time.Since(began), 3*time.Minute)
}

// elsewhere is a file for another system's queues.
const elsewhere = `
retry: {delays: [10s, 1m, 10m], max-retries: 3}
central:
  queues: [orders]
  failed-queue: failed
  counter: count
  counter-end: -1
  counter-exchange: deadletter
`

// The section central is a CentralConfig for all work queues, and its topology; rules look
// at what a worker has rejected.
func TestCentralIsRead(t *testing.T) {
	t.Parallel()
	f := parse(t, examples(t)["testdata/central.yaml"])
	require.NotNil(t, f.Central)
	assert.Equal(t, retry.CentralConfig{
		Queues: []string{"invoices", "orders"}, FailedQueue: "errors", Counter: "count", CounterEnd: -1, ReasonKey: "why", TextKey: "message", TypeKey: "exception",
	}, *f.Central)
	want, err := retry.CentralTopology(f.Policy, *f.Central, f.Work...)
	require.NoError(t, err)
	assert.Equal(t, check.FromTopology(want), check.FromTopology(f.Topology))
	require.Len(t, f.Policy.Rules, 3)
	assert.True(t, f.Policy.Rules[0].If(&retry.Rejected{Reason: "fatal"}))
	assert.False(t, f.Policy.Rules[0].If(&retry.Rejected{Reason: "other"}))
	assert.False(t, f.Policy.Rules[1].If(&retry.Rejected{Reason: "fatal"}))
	assert.Equal(t, retry.ActionDeadLetter, f.Policy.Rules[0].Do)
	assert.Equal(t, 10, f.Policy.Rules[1].MaxRetries)
	delays, err := f.Policy.QueueDelays()
	require.NoError(t, err)
	assert.Equal(t, []time.Duration{time.Second, 10 * time.Second, time.Minute}, delays, "a rule's delays have queues")

	f = parse(t, elsewhere)
	assert.Empty(t, f.Topology, "all is there already")
	assert.Equal(t, "deadletter", f.Central.CounterExchange)
	assert.Nil(t, parse(t, "work-queues: {orders: }").Central)
	assert.Equal(t, []string{"orders"}, parse(t, "central:\nwork-queues: {orders: }").Central.Queues)
	for text, place := range map[string]string{
		"central:\n  counter: c\n":                                                  "central.queues",
		"central:\n  queues: [a, a]\n":                                              "central.queues[1]",
		"central:\n  counter-end: -1\nwork-queues: {a: }\n":                         "central.counter",
		"central:\nwork-queues:\n  failed_queue:\n":                                 "work-queues.failed_queue",
		"retry:\n  rules:\n    - {reason: a, delays: [90000h]}\nwork-queues: {a: }": "retry.rules[0].delays[0]",
		"retry:\n  rules:\n    - {do: discard}\nwork-queues: {a: }":                 "retry.rules[0]",
		"retry:\n  rules:\n    - {header: a, value: }\nwork-queues: {a: }":          "retry.rules[0].value",
		"retry:\n  rules:\n    - {reason: a, value: b}\nwork-queues: {a: }":         "retry.rules[0]",
		"retry:\n  rules:\n    - {reason: a, do: nothing}\nwork-queues: {a: }":      "retry.rules[0].do",
	} {
		_, err := topologyfile.Parse("f", []byte(text))
		require.Error(t, err, text)
		assert.Contains(t, err.Error(), place, text)
		t.Log(err)
	}
}

// A fair queue is what Queue.Topology makes of it, with the policy of the file, next to its work queues.
func TestFairQueuesAreRead(t *testing.T) {
	t.Parallel()
	f := parse(t, `
retry: {delays: [10s], strategy: native}
work-queues:
  invoices:
fair-queues:
  orders: {lanes: 8, delivery-limit: 5}
  returns:
`)
	require.Equal(t, []fair.Queue{{Name: "orders", Lanes: 8}, {Name: "returns"}}, f.Fair)
	want, err := retry.Topology(f.Policy, f.Work...)
	require.NoError(t, err)
	for i, work := range []declare.QuorumQueue{{DeliveryLimit: 5}, {}} {
		one, err := f.Fair[i].Topology(f.Policy, work)
		require.NoError(t, err)
		want, err = declare.Merge(want, one)
		require.NoError(t, err)
	}
	assert.Equal(t, check.FromTopology(want), check.FromTopology(f.Topology))
	for text, message := range map[string]string{
		"fair-queues: {orders: {lanes: 17}}":                                    `f:1:31: fair-queues.orders.lanes = 17 is out of range; use 1 to 16`,
		"fair-queues: {orders: {lanes: 0}}":                                     "fair-queues.orders.lanes",
		"fair-queues: {orders: {single-active-consumer: true}}":                 "f:1:24: fair-queues.orders.single-active-consumer isn't a known key",
		"fair-queues: {orders: {message-ttl: 1us}}":                             "fair-queues.orders.message-ttl",
		"fair-queues: {" + strings.Repeat("a", 201) + ": }":                     "is 201 bytes long",
		"retry: {strategy: dead-letter}\nfair-queues: {orders: }":               "f:2:15: fair-queues.orders",
		"central:\nfair-queues: {orders: }":                                     "f:2:15: fair-queues.orders isn't possible with central",
		"work-queues: {orders: }\nfair-queues: {orders: {max-length: 5}}":       "orders",
		"fair-queues: {orders: }\nqueues: {orders.bulk.1: {dead-letter: drop}}": "orders.bulk.1",
		"fair-queues: {orders: }\nexchanges: {orders.in: {type: topic}}":        "orders.in",
		"fair-queues: {orders: {lane: 3}}":                                      `did you mean "lanes"?`,
	} {
		_, err := topologyfile.Parse("f", []byte(text))
		require.Error(t, err, text)
		assert.Contains(t, err.Error(), message, text)
	}
}
