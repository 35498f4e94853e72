package desk_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// everyType has a value of every AMQP type, as a line of an export has it.
const everyType = `null,true,false,"text",{"ubyte":255},{"ushort":65535},{"uint":0},{"uint":4294967295},{"ulong":"18446744073709551615"},` +
	`{"byte":-128},{"short":-32768},{"int":-2147483648},{"long":"-9223372036854775808"},{"float":1.5},{"float":"7fc00001"},{"double":-0.1},{"double":"7ff0000000000000"},` +
	`{"decimal32":"22500001"},{"decimal64":"2238000000000001"},{"decimal128":"22080000000000000000000000000001"},{"char":128512},` +
	`{"timestamp":"1700000000123"},{"uuid":"00112233-4455-6677-8899-aabbccddeeff"},{"binary":"AP8B"},{"symbol":"a-symbol"}`

const everyCompound = `{"list":[{"list":[]},` + everyType + `]},{"map":[["k",{"int":1}],[{"ulong":"7"},{"symbol":"v"}]]},` +
	`{"array":{"type":"0x71","elements":[{"int":1},{"int":-2}]}},{"array":{"type":"0xb3","elements":[{"symbol":"a"},{"symbol":"b"}]}},` +
	`{"described":[{"symbol":"x:y"},{"list":[{"char":65}]}]}`

// everyLine are lines with every type in every place where RabbitMQ can deliver it. The last one
// says how it is encoded: with a long form of a number.
func everyLine(queue string) []string {
	simple := strings.Split(strings.ReplaceAll(everyType, "},{", "}\x00{"), "\x00")
	var properties, annotations []string
	n := 0
	for _, part := range simple {
		var values []json.RawMessage
		if json.Unmarshal([]byte("["+part+"]"), &values) != nil {
			panic(part)
		}
		for _, v := range values {
			n++
			properties = append(properties, fmt.Sprintf(`["p%d",%s]`, n, v))
			if string(v) != "null" && !bytes.Contains(v, []byte(`":"7f`)) && !bytes.Contains(v, []byte(`"decimal`)) {
				annotations = append(annotations, fmt.Sprintf(`[{"symbol":"x-opt-a%d"},%s]`, n, v))
			}
		}
	}
	line := func(id int, rest string) string {
		return fmt.Sprintf(`{"hopback":1,"queue":%q,"id":"%024x",%s}`, queue, id, rest)
	}
	head := `"header":{"durable":true,"priority":{"ubyte":7}},"annotations":[` + strings.Join(annotations, ",") + `],"properties":{"message-id":{"uuid":"00112233-4455-6677-8899-aabbccddeeff"},` +
		`"user-id":{"binary":"Z3Vlc3Q="},"to":"/queues/x","subject":"s","reply-to":"r","correlation-id":{"ulong":"9"},"content-type":{"symbol":"text/plain"},"content-encoding":{"symbol":"gzip"},` +
		`"absolute-expiry-time":{"timestamp":"4000000000000"},"creation-time":{"timestamp":"1"},"group-id":"g","group-sequence":{"uint":5},"reply-to-group-id":"rg"},` +
		`"application-properties":[` + strings.Join(properties, ",") + `]`
	return []string{
		line(1, head+`,"body":[{"text":"plain"},{"data":"AP8="}],"footer":[[{"symbol":"sum"},{"long":"1"}]]`),
		line(2, head+`,"body":[{"value":{"list":[`+everyType+`,`+everyCompound+`]}}]`),
		line(3, head+`,"body":[{"sequence":[`+everyType+`]},{"sequence":[`+everyCompound+`]}]`),
		line(4, `"header":{"durable":true},"body":[{"value":null}]`),
		// An amqp-value that is the uint 5 in its four-byte form.
		line(5, `"header":{"durable":true},"body":[{"value":{"uint":5}}],"encoding":"AFNwwAIBQQBTd3AAAAAF"`),
	}
}

// tempFile opens a file for an export.
func tempFile(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(t.TempDir(), name), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// content is what is in a file.
func content(t *testing.T, f *os.File) string {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	return string(b)
}

// sections are a line's, without what belongs to the broker and to where it was.
func sections(t *testing.T, line string) map[string]string {
	t.Helper()
	var m map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(line), &m), line)
	out := map[string]string{}
	for k, v := range m {
		if k != "id" && k != "encoding" && k != "header" {
			out[k] = string(v)
		}
	}
	var pairs []json.RawMessage
	_ = json.Unmarshal(m["annotations"], &pairs)
	var own []string
	for _, p := range pairs {
		if bytes.Contains(p, []byte(`"x-opt-a`)) {
			own = append(own, string(p))
		}
	}
	out["annotations"] = strings.Join(own, ",")
	return out
}

// What is imported is what was exported, value by value and type by type, and where a
// message is encoded in its own way, byte by byte.
func TestExportAndImportKeepEveryType(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		d := suite.NewDesk(t, s, conn)
		lines := everyLine("dead")
		in, err := d.Import(t.Context(), strings.NewReader(strings.Join(lines, "\n")+"\n"), desk.ImportConfig{})
		require.NoError(t, err)
		assert.Equal(t, len(lines), in.Lines)
		assert.EqualValues(t, len(lines), in.Imported)

		round := func(name string) []string {
			f := tempFile(t, name)
			out, err := d.Discard(t.Context(), desk.DiscardConfig{Queue: "dead", All: true, To: f})
			require.NoError(t, err)
			assert.EqualValues(t, len(lines), out.Discarded)
			assert.EqualValues(t, len(lines), out.Exported)
			assert.Zero(t, suite.Ready(t, conn, "dead"))
			in, err := d.Import(t.Context(), strings.NewReader(content(t, f)), desk.ImportConfig{})
			require.NoError(t, err)
			assert.Equal(t, len(lines), in.Lines)
			return strings.Split(strings.TrimSuffix(content(t, f), "\n"), "\n")
		}
		first := round("first")
		second := round("second")
		require.Len(t, first, len(lines))
		require.Len(t, second, len(lines))
		for i := range lines {
			assert.Equal(t, sections(t, lines[i]), sections(t, first[i]), "line %d", i+1)
			assert.Equal(t, sections(t, first[i]), sections(t, second[i]), "line %d", i+1)
		}
		assert.Contains(t, second[4], `"encoding":"`, "the long form is kept")
		assert.NotContains(t, second[0], `"encoding":"`)
		deadLetter, err := d.List(t.Context(), desk.ListConfig{Queue: "dead"})
		require.NoError(t, err)
		require.Len(t, deadLetter.Messages, len(lines))
		whole, err := d.Show(t.Context(), desk.ShowConfig{Queue: "dead", ID: deadLetter.Messages[1].ID})
		require.NoError(t, err)
		assert.Equal(t, "typed", whole.BodyForm)
		assert.Contains(t, whole.Body, "decimal128")
		assert.EqualValues(t, 7, whole.Priority)
	})
}

// A disk that is full ends an export with that error, and isn't taken for a lost connection.
func TestExportToAFullDisk(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		suite.Load(t, conn, "dead", 3000, func(_ int, m *client.Message) { m.Data = [][]byte{make([]byte, 1000)} })
		full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
		require.NoError(t, err)
		defer func() { _ = full.Close() }()
		r, err := suite.NewDesk(t, s, conn).Export(t.Context(), full, desk.ExportConfig{Queue: "dead"})
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.NotErrorIs(t, err, client.ErrConnectionLost)
		assert.Zero(t, r.Exported)
		assert.Zero(t, r.Skipped)
		assert.Less(t, r.Seen, uint64(3000), "it stops there")
		suite.Poll(t, "all are there", func() bool { return suite.Ready(t, conn, "dead") == 3000 })
		hopback := s.Shell(t)
		assert.Contains(t, hopback.Dead(suite.ExitUnknown, "export", "dead", "/dev/full").Stderr, "to continue: the same command with --resume")
		for says, args := range map[string][]string{
			"--limit is out of range; use 1 to 10000":    {"list", "dead", "--limit", "20000"},
			"or add --all for all messages of the queue": {"replay", "dead"},
			"--to \"dead\" is the queue":                 {"replay", "dead", "--all", "--to", "dead"},
			"--rate \"-1\" is out of range":              {"replay", "dead", "--all", "--rate", "-1"},
		} {
			assert.Contains(t, hopback.Dead(suite.ExitUsage, args...).Stderr, says)
		}
	})
}

// A death is kept, so that an imported dead letter can be replayed.
func TestImportedDeadLettersAreReplayed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, 40)
		d := suite.NewDesk(t, s, conn)
		before, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		f := tempFile(t, "dead.jsonl")
		_, err = d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", Filter: desk.Filter{Reasons: []client.Reason{"fraud"}}, To: f})
		require.NoError(t, err)
		assert.Equal(t, 30, suite.Ready(t, conn, "orders.dead"))
		_, err = d.Discard(t.Context(), desk.DiscardConfig{Queue: "orders.dead", All: true, To: f})
		require.NoError(t, err)
		assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
		dry, err := d.Import(t.Context(), strings.NewReader(content(t, f)), desk.ImportConfig{DryRun: true})
		require.NoError(t, err)
		assert.Equal(t, 40, dry.Lines)
		assert.Zero(t, dry.Imported)
		_, err = d.Import(t.Context(), strings.NewReader(content(t, f)), desk.ImportConfig{})
		require.NoError(t, err)
		after, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
		require.NoError(t, err)
		groups := func(l desk.List) map[string]int {
			m := map[string]int{}
			for _, s := range l.Messages {
				m[s.Group+" "+string(s.Reason)+" "+s.Queue+" "+s.MessageID]++
			}
			return m
		}
		assert.Equal(t, groups(before), groups(after))
		r, err := d.Replay(t.Context(), desk.ReplayConfig{Queue: "orders.dead", All: true})
		require.NoError(t, err)
		assert.EqualValues(t, 40, r.Replayed)
		suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "orders") == 40 })
	})
}

// A line that can't be used is refused by its number, and nothing of it reaches the broker.
// What was before it is there. The import continues after the confirmed lines.
func TestHostileLinesAreRefusedByNumber(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		d := suite.NewDesk(t, s, conn)
		good := everyLine("dead")[3]
		body := `"body":[{"text":"x"}]`
		line := func(rest string) string {
			return `{"hopback":1,"queue":"dead","id":"000000000000000000000001",` + rest + `}`
		}
		deep := strings.Repeat(`{"list":[`, 600) + strings.Repeat(`]}`, 600)
		for name, bad := range map[string]string{
			"empty": "", "no JSON": "}{", "a list": "[]", "two objects": good + good, "another version": strings.Replace(good, `"hopback":1`, `"hopback":2`, 1),
			"no body": line(`"header":{}`), "two bodies": line(`"body":[{"text":"x"},{"value":"y"}]`), "an unknown member": line(body + `,"x":1`),
			"an unknown type": line(`"body":[{"value":{"integer":1}}]`), "a bare number": line(`"body":[{"value":1}]`), "too large": line(`"body":[{"value":{"ubyte":256}}]`),
			"a null annotation": line(`"annotations":[[{"symbol":"x-opt-a"},null]],` + body), "an annotation without x-": line(`"annotations":[[{"symbol":"a"},"b"]],` + body),
			"a NaN in an annotation":     line(`"annotations":[[{"symbol":"x-opt-a"},{"list":[{"float":"7fc00001"}]}]],` + body),
			"a decimal in an annotation": line(`"annotations":[[{"symbol":"x-opt-a"},{"decimal32":"22500001"}]],` + body),
			"a list in a property":       line(`"application-properties":[["a",{"list":[]}]],` + body), "a message-id of a double": line(`"properties":{"message-id":{"double":1}},` + body),
			"nested too deep": line(`"body":[{"value":` + deep + `}]`), "nested far too deep": line(`"body":[{"value":` + strings.Repeat("[", 1<<20) + `}]`),
			"not base64": line(`"body":[{"data":"???"}]`), "a wrong encoding": line(`"encoding":"AAAA"`), "a queue that isn't there": strings.Replace(good, `"dead"`, `"none"`, 1),
			"an array of two types": line(`"body":[{"value":{"array":{"type":"0x71","elements":[{"int":1},"s"]}}}]`), "a priority of text": line(`"header":{"priority":"high"},` + body),
		} {
			report, err := d.Import(t.Context(), strings.NewReader(good+"\n"+good+"\n"+bad+"\n"+good+"\n"), desk.ImportConfig{})
			var at *desk.LineError
			require.ErrorAs(t, err, &at, name)
			assert.Equal(t, 3, at.Line, name)
			assert.Less(t, len(err.Error()), 1000, name)
			assert.Equal(t, 2, report.Lines, name)
			assert.EqualValues(t, 2, report.Imported, name)
			suite.Poll(t, "what was before it is there", func() bool { return suite.Ready(t, conn, "dead") == 2 })
			_, err = declare.Purge(t.Context(), conn.Management(), "dead")
			require.NoError(t, err)
		}
		cutOff, err := d.Import(t.Context(), strings.NewReader(good+"\n"+good[:20]), desk.ImportConfig{})
		require.ErrorContains(t, err, "line 2")
		assert.Equal(t, 1, cutOff.Lines)
		on, err := d.Import(t.Context(), strings.NewReader(good+"\n"+good+"\n"), desk.ImportConfig{Skip: cutOff.Lines})
		require.NoError(t, err)
		assert.Equal(t, 2, on.Lines)
		assert.EqualValues(t, 1, on.Imported)
	})
}

// An export that was stopped is resumed, with a line that was cut off at its end; each
// message is in the file once, and all are still in the queue.
func TestExportIsResumed(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 3000
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, suite.QueueOf(unlimited("dead")))
		suite.Load(t, conn, "dead", n)
		d := suite.NewDesk(t, s, conn)
		f := tempFile(t, "dead.jsonl")
		enough := errors.New("enough")
		ctx, stop := context.WithCancelCause(t.Context())
		cut, err := d.Export(ctx, f, desk.ExportConfig{Queue: "dead", OnProgress: func(p desk.Progress) {
			stop(enough)
		}})
		require.ErrorIs(t, err, enough)
		assert.Less(t, cut.Exported, uint64(n))
		_, err = f.WriteString(`{"hopback":1,"queue":"de`)
		require.NoError(t, err)
		_, err = d.Export(t.Context(), f, desk.ExportConfig{Queue: "dead"})
		require.ErrorContains(t, err, "isn't empty")
		rest, err := d.Export(t.Context(), f, desk.ExportConfig{Queue: "dead", Resume: true})
		require.NoError(t, err)
		assert.EqualValues(t, n, rest.Exported+rest.Skipped)
		assert.EqualValues(t, cut.Exported, rest.Skipped)
		lines := strings.Split(strings.TrimSuffix(content(t, f), "\n"), "\n")
		assert.Len(t, lines, n)
		inOrder(t, upTo(n), bodies(s.Peer(t).Take("dead", n)))

		_, err = d.Discard(t.Context(), desk.DiscardConfig{Queue: "dead", All: true})
		require.ErrorContains(t, err, "gone for good")
	})
}
