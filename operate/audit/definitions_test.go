package audit_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
)

// cookbook is the definitions file of a published recipe for retries with delay
// queues: it works, and can lose messages.
func cookbook(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/cookbook.json")
	require.NoError(t, err)
	return text
}

func TestTheCookbooksDefinitionsCanLoseMessages(t *testing.T) {
	t.Parallel()
	d, err := audit.ParseDefinitions(cookbook(t))
	require.NoError(t, err)
	assert.Equal(t, []string{"/"}, d.VHosts())
	topology, err := d.Topology("/")
	require.NoError(t, err)
	require.NoError(t, topology.Validate())
	assert.Equal(t, declare.Topology{
		Exchanges: []declare.Exchange{{Name: "requeue_exchange", Type: declare.ExchangeTopic}, {Name: "retry_exchange", Type: declare.ExchangeTopic}},
		Queues: []declare.Queue{
			declare.QuorumQueue{Name: "delay_10s", MessageTTL: 10 * time.Second, DeadLetter: declare.DeadLetterTarget{Exchange: "requeue_exchange", AtMostOnce: true}},
			declare.QuorumQueue{Name: "delay_60s", MessageTTL: time.Minute, DeadLetter: declare.DeadLetterTarget{Exchange: "requeue_exchange", AtMostOnce: true}},
			declare.QuorumQueue{Name: "my_work_queue", DeliveryLimit: 5, DeadLetter: declare.Drop()},
		},
		Bindings: []declare.Binding{
			{Source: "requeue_exchange", Queue: "my_work_queue", Key: "*.*.my_work_queue"},
			{Source: "retry_exchange", Queue: "delay_10s", Key: "delay.10000.#"},
			{Source: "retry_exchange", Queue: "delay_60s", Key: "delay.60000.#"},
		},
	}, topology)

	found := map[string]string{}
	for _, f := range check.Verify(d.Snapshot("/"), topology).Findings {
		found[f.Resource.Name] = f.Rule
	}
	assert.Equal(t, map[string]string{
		"delay_10s": "at-most-once", "delay_60s": "at-most-once", "my_work_queue": "dead-letter", "requeue_exchange": "alternate-exchange",
	}, found)

	again, err := audit.ParseDefinitions(d.Encode())
	require.NoError(t, err)
	assert.Equal(t, string(d.Encode()), string(again.Encode()))
	assert.Contains(t, string(d.Encode()), `"vhosts": [`, "what isn't modelled is kept")
}

// Every queue comes back as the value that was exported, and what no typed queue
// can say comes back raw.
func TestDefinitionsRoundTrip(t *testing.T) {
	t.Parallel()
	topology := declare.Topology{
		Exchanges: []declare.Exchange{
			{Name: "a", Type: declare.ExchangeDirect},
			{Name: "b<&>", Type: "x-consistent-hash", AlternateExchange: "a", AutoDelete: true, Internal: true, Arguments: map[string]any{"hash-header": "h"}},
		},
		Queues: []declare.Queue{
			declare.ClassicQueue{Name: "c1", DeadLetter: declare.DeadLetterTarget{Exchange: "a", AtMostOnce: true}, MaxPriority: 5, Version: 2, Overflow: declare.OverflowRejectPublishDLX},
			declare.ClassicQueue{Name: "c2", DeadLetter: declare.Drop(), AutoDelete: true, Transient: true},
			declare.QuorumQueue{Name: "q1", DeliveryLimit: declare.NoRedelivery, DeadLetter: declare.ToQueue("q2"), MaxLength: 5, SingleActiveConsumer: true},
			declare.QuorumQueue{Name: "q2", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop(), Overflow: declare.OverflowDropHead, Arguments: map[string]any{"x-of-a-plugin": 2.5}},
			declare.QuorumQueue{Name: "q3", DeadLetter: declare.Drop(), DelayedRetry: declare.DelayedRetry{Kind: declare.RetryAll, Min: time.Second}, ConsumerTimeout: time.Minute, TargetGroupSize: 5},
			declare.RawQueue{Name: "r1", Durable: true, Arguments: map[string]any{"x-queue-type": "quorum", "x-dead-letter-strategy": "at-most-once"}},
			declare.RawQueue{Name: "r2", Durable: true, Arguments: map[string]any{}},
			declare.RawQueue{Name: "r3", Durable: true, Arguments: map[string]any{"x-queue-type": "stream", "x-max-age": "7D"}},
			declare.Stream{Name: "s", MaxAge: time.Hour, FilterSize: 20, MaxSegmentSize: 1000},
		},
		Bindings: []declare.Binding{
			{Source: "a", Exchange: "b<&>", Key: "k"},
			{Source: "a", Queue: "q1", Key: "é"},
			{Source: "amq.headers", Queue: "q1", Match: declare.MatchAllWithX, Headers: map[string]any{"x-a": int64(1), "b": nil}},
			{Source: "amq.headers", Queue: "q1", Match: declare.MatchAnyWithX, Headers: map[string]any{"x-a": int64(1)}},
		},
	}
	policies := []declare.Policy{
		{VHost: "v/h", Name: "p", Pattern: "^q", ApplyTo: "quorum_queues", Priority: 3, Definition: map[string]any{"max-length": int64(9)}},
		{VHost: "v/h", Name: "op", Pattern: ".*", ApplyTo: "queues", Operator: true, Definition: map[string]any{"max-length": int64(99)}},
	}
	d, err := audit.Export("v/h", topology, policies...)
	require.NoError(t, err)
	file := d.Encode()
	back, err := audit.ParseDefinitions(file)
	require.NoError(t, err)
	assert.Equal(t, string(file), string(back.Encode()))
	got, err := back.Topology("v/h")
	require.NoError(t, err)
	assert.Equal(t, topology, got)
	assert.ElementsMatch(t, policies, back.Snapshot("v/h").Policies)
	none, err := back.Topology("another")
	require.NoError(t, err)
	assert.Empty(t, none)

	var same audit.Definitions
	require.NoError(t, json.Unmarshal(file, &same))
	assert.Equal(t, back, same)
}

func TestDefinitionsKeepWhatIsNotModelled(t *testing.T) {
	t.Parallel()
	const doc = `{"queues":[{"name":"q","vhost":"/","durable":true,"auto_delete":false,"arguments":{"x-queue-type":"quorum","x-delivery-limit":"2","f":1.0,"big":1234567890123456789},"type":"quorum","future":{"b":1,"a":[1.50]}}],
		"users":[{"name":"u","password_hash":"h+/=","tags":["x"]}],"limits":[],"new-in-5":{"n":1e3}}`
	d, err := audit.ParseDefinitions([]byte(doc))
	require.NoError(t, err)
	text := string(d.Encode())
	for _, kept := range []string{`"x-delivery-limit": "2"`, `"type": "quorum"`, `1.50`, `"h+/="`, `"n": 1e3`, `"limits": []`, `"f": 1.0`, `1234567890123456789`} {
		assert.Contains(t, text, kept)
	}
	assert.Equal(t, "quorum", d.Snapshot("/").Queues[0].Type)
	v := check.Verify(d.Snapshot("/"), declare.Topology{})
	assert.Contains(t, v.String(), "x-delivery-limit is a string, and should be an integer")
	topology, err := d.Topology("/")
	require.NoError(t, err)
	assert.IsType(t, declare.RawQueue{}, topology.Queues[0])
}

func TestParseDefinitionsRefuses(t *testing.T) {
	t.Parallel()
	for doc, says := range map[string]string{
		``:                        "isn't a JSON object",
		`[]`:                      "isn't a JSON object",
		`null`:                    "is null",
		`{} {}`:                   "has text after the JSON object",
		`{"queues":7}`:            "definitions.queues isn't a list",
		`{"queues":[7]}`:          "definitions.queues[0] isn't a JSON object",
		`{"queues":[{}]}`:         "definitions.queues[0].name is missing",
		`{"queues":[{"name":7}]}`: "isn't a string",
		`{"queues":[{"name":"q","durable":"true"}]}`:                                 "isn't true or false",
		`{"queues":[{"name":"q","arguments":7}]}`:                                    "isn't an object",
		`{"policies":[{"name":"p","pattern":"","priority":"1"}]}`:                    "isn't an integer",
		`{"bindings":[{"source":"x","destination":"q","destination_type":"topic"}]}`: "is neither",
	} {
		_, err := audit.ParseDefinitions([]byte(doc))
		var e *argument.Error
		require.ErrorAs(t, err, &e, doc)
		assert.ErrorContains(t, err, says, doc)
		assert.NotEmpty(t, e.Remedy, doc)
	}
	d, err := audit.ParseDefinitions([]byte(`{"exchanges":[{"name":"x","type":"topic","durable":false}]}`))
	require.NoError(t, err)
	_, err = d.Topology("/")
	require.ErrorContains(t, err, "make it durable")
	_, err = audit.Export("", declare.Topology{})
	require.ErrorContains(t, err, "vhost")
	_, err = audit.Export("/", declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{}}})
	require.Error(t, err)
}

// Everything that is read is written in a form that reads as the same again.
func FuzzParseDefinitions(f *testing.F) {
	text, err := os.ReadFile("testdata/cookbook.json")
	require.NoError(f, err)
	f.Add(string(text))
	f.Add(`{"queues":[{"name":"q","arguments":{"x-max-age":"1s","x-message-ttl":1.0}}],"users":[{}],"bindings":null}`)
	f.Fuzz(func(t *testing.T, doc string) {
		d, err := audit.ParseDefinitions([]byte(doc))
		if err != nil {
			return
		}
		file := d.Encode()
		again, err := audit.ParseDefinitions(file)
		if err != nil {
			t.Fatalf("%v\n%s", err, file)
		}
		if string(again.Encode()) != string(file) {
			t.Fatalf("%s\n%s", file, again.Encode())
		}
		for _, vhost := range append(d.VHosts(), "/") {
			topology, _ := d.Topology(vhost)
			_ = topology.Validate()
			s := d.Snapshot(vhost)
			_ = check.Verify(s, topology).String()
		}
		if strings.Contains(doc, "\x00") {
			return
		}
	})
}

// What rabbitmqctl export_definitions of RabbitMQ 4.0.5 and 4.3.6 wrote, users and
// other virtual hosts left out, is read with all its policies, and nothing of it is
// lost when it is written again.
func TestWhatRabbitmqctlExportsIsRead(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"4.0", "4.3"} {
		text, err := os.ReadFile("testdata/rabbitmqctl-" + version + ".json")
		require.NoError(t, err)
		d, err := audit.ParseDefinitions(text)
		require.NoError(t, err)
		s := d.Snapshot("sample")
		assert.True(t, strings.HasPrefix(s.Version, version), s.Version)
		require.Len(t, s.Policies, 2, version)
		assert.Equal(t, map[string]any{"target-group-size": int64(3)}, s.Policies[0].Definition)
		assert.True(t, s.Policies[1].Operator)
		assert.Equal(t, map[string]any{"max-length": int64(10)}, s.Policies[1].Definition, version)
		topology, err := d.Topology("sample")
		require.NoError(t, err)
		assert.Len(t, topology.Queues, 7)
		assert.Len(t, topology.Exchanges, 8)
		assert.True(t, audit.Compare(s, topology).Nothing())
		assert.Contains(t, topology.Queues, declare.Queue(declare.Stream{Name: "audit", MaxAge: 24 * time.Hour}))

		var before, after map[string]any
		require.NoError(t, json.Unmarshal(text, &before))
		require.NoError(t, json.Unmarshal(d.Encode(), &after))
		for member := range before {
			if list, ok := before[member].([]any); ok {
				assert.Len(t, after[member], len(list), member)
			}
		}
	}
	for _, definition := range []string{`7`, `[["max-length"]]`, `[[1,2]]`, `"x"`} {
		d, err := audit.ParseDefinitions([]byte(`{"parameters":[{"component":"operator_policy","name":"p","vhost":"/","value":{"pattern":"","definition":` + definition + `}}]}`))
		require.NoError(t, err)
		v := check.Verify(d.Snapshot("/"), declare.Topology{})
		assert.Contains(t, v.String(), `the operator policy "p" can't be parsed`, definition)
	}
}
