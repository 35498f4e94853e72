package desk

import (
	"bytes"
	"encoding/json"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// sampleDeadLetter is an encoded message that was dead-lettered at a given time.
func sampleDeadLetter(t testing.TB, died time.Time, edit ...func(*frames.Message)) []byte {
	t.Helper()
	body, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(frames.SectionData), Value: []byte(`{"order":1}`)})
	require.NoError(t, err)
	m := &frames.Message{
		Header: &frames.MessageHeader{Durable: true, Priority: frames.Some(uint8(7)), DeliveryCount: 3},
		Annotations: frames.Map{
			{Key: frames.Symbol(client.AnnotationReason), Value: "permanent"},
			{Key: frames.Symbol(client.AnnotationError), Value: "order 17 refused by 10.0.0.1:443"},
			{Key: frames.Symbol(annotation.Older.ErrorType), Value: "*bank.Refusal"},
			{Key: frames.Symbol(annotation.Queue), Value: "orders"},
			{Key: frames.Symbol(annotation.Retries), Value: int64(5)},
			{Key: frames.Symbol(annotation.Older.First), Value: died.Add(-time.Hour).UnixMilli()},
			{Key: frames.Symbol(annotation.Older.Last), Value: died.UnixMilli()},
			{Key: frames.Symbol(annotation.Exchange), Value: "shop"},
			{Key: frames.Symbol(annotation.RoutingKey), Value: "order.new"},
			{Key: frames.Symbol("x-last-death-reason"), Value: "rejected"},
			{Key: frames.Symbol("x-last-death-queue"), Value: "orders"},
			{Key: frames.Symbol("x-opt-tenant"), Value: frames.Symbol("acme")},
			{Key: frames.Symbol("x-opt-deaths"), Value: frames.Array{Type: 0xd1, Elements: []any{frames.Map{
				{Key: frames.Symbol("queue"), Value: "orders"}, {Key: frames.Symbol("reason"), Value: frames.Symbol("rejected")},
				{Key: frames.Symbol("count"), Value: uint64(2)}, {Key: frames.Symbol("first-time"), Value: frames.Timestamp(died.Add(-time.Minute).UnixMilli())},
				{Key: frames.Symbol("last-time"), Value: frames.Timestamp(died.UnixMilli())},
			}}}},
		},
		Properties:            &frames.Properties{MessageID: "m1", ContentType: frames.Some(frames.Symbol("application/json")), CreationTime: frames.Some(frames.Timestamp(died.Add(-2 * time.Hour).UnixMilli()))},
		ApplicationProperties: frames.Map{{Key: "kind", Value: frames.Symbol("s")}, {Key: retry.CountProperty, Value: int64(5)}, {Key: "n", Value: int32(42)}},
		Body:                  body,
	}
	for _, e := range edit {
		e(m)
	}
	b, err := m.Append(nil)
	require.NoError(t, err)
	return b
}

var died = time.UnixMilli(1_700_000_000_123)

// A replayed message is a new message. What the sender wrote is unchanged byte by byte, except
// the retry counter, and the message records the replay.
func TestRenewedMessageStartsOver(t *testing.T) {
	t.Parallel()
	l := open(sampleDeadLetter(t, died))
	require.NoError(t, l.bad)
	mark := ReplayMark{ID: "r1", By: "ada", At: died.Add(time.Hour)}
	b, err := l.renewed(mark, nil)
	require.NoError(t, err)
	c := open(b)
	require.NoError(t, c.bad)
	assert.Equal(t, &frames.MessageHeader{Durable: true, Priority: frames.Some(uint8(7))}, c.header)
	assert.Equal(t, l.properties, c.properties)
	assert.Equal(t, l.body, c.body)
	assert.Equal(t, frames.Map{{Key: "kind", Value: frames.Symbol("s")}, {Key: "n", Value: int32(42)}}, c.application)
	tenant, _ := c.annotations.Get("x-opt-tenant")
	assert.Equal(t, frames.Symbol("acme"), tenant, "a symbol stays a symbol")
	assert.Zero(t, retry.Count(c.m))
	assert.Equal(t, retry.DeadLetter{Exchange: "shop", RoutingKey: "order.new"}, c.death)
	assert.Equal(t, &mark, func() *ReplayMark { m := c.replay(); m.At = m.At.Local(); return m }())
	assert.Equal(t, 1, c.replays())
	for _, e := range c.annotations {
		k := string(e.Key.(frames.Symbol))
		assert.True(t, k == "x-opt-tenant" || k == annotation.Exchange || k == annotation.RoutingKey || ours[k], k)
	}
	lives := c.lives()
	require.Len(t, lives, 1)
	assert.Equal(t, client.Reason("permanent"), lives[0].Reason)
	assert.Equal(t, died.UnixMilli(), lives[0].Died)

	_, err = open([]byte("no message")).renewed(mark, nil)
	require.ErrorAs(t, err, new(*unsendable))
}

// A message doesn't grow with its replays, even with the worst errors.
func TestMarksOfAThousandReplaysAreBounded(t *testing.T) {
	t.Parallel()
	payload := sampleDeadLetter(t, died)
	size := 0
	for i := range 1000 {
		l := open(payload)
		require.NoError(t, l.bad)
		b, err := l.renewed(ReplayMark{ID: strings.Repeat("\x01", maxWord), By: strings.Repeat("\"", maxWord), At: died}, nil)
		require.NoError(t, err)
		c := open(b)
		assert.Equal(t, i+1, c.replays())
		assert.LessOrEqual(t, len(c.annotation(annotation.Lives)), maxLivesBytes)
		if i == 2*maxLives {
			size = len(b)
		}
		if i > 2*maxLives {
			assert.InDelta(t, size, len(b), 16, "it doesn't grow")
		}
		// It is dead-lettered again, with the worst error.
		m, err := frames.DecodeMessage(b)
		require.NoError(t, err)
		m.Annotations = m.Annotations.Set(frames.Symbol(client.AnnotationError), strings.Repeat("\x02", client.ErrorTextLimit))
		m.Annotations = m.Annotations.Set(frames.Symbol(client.AnnotationReason), strings.Repeat("\x03", 255))
		payload, err = m.Append(nil)
		require.NoError(t, err)
	}
}

func TestSummaryAndHops(t *testing.T) {
	t.Parallel()
	l := open(sampleDeadLetter(t, died))
	s := l.summary(3)
	assert.Equal(t, 3, s.Position)
	assert.Equal(t, "m1", s.MessageID)
	assert.Equal(t, "orders", s.Queue)
	assert.EqualValues(t, "permanent", s.Reason)
	assert.Equal(t, 5, s.Retries)
	assert.True(t, died.Equal(s.DeadLetteredAt))
	assert.EqualValues(t, 7, s.Priority)
	assert.Equal(t, s.ID, open(sampleDeadLetter(t, died, func(m *frames.Message) { m.Header.DeliveryCount = 9 })).id(), "a look doesn't change it")
	assert.NotEqual(t, s.ID, open(sampleDeadLetter(t, died.Add(time.Second))).id(), "another death does")
	var kinds []string
	for _, h := range l.history() {
		kinds = append(kinds, h.Kind)
	}
	assert.Equal(t, []string{historyCreated, historyPublished, historyFirstFailure, historyFailed, historyLastFailure, historyDeadLettered}, kinds)
	assert.Equal(t, HistoryEvent{Kind: historyFailed, Queue: "orders", Count: 4, Text: "not recorded"}, l.history()[3], "an older worker keeps no list")

	bad := open([]byte{0, 0x53, 0x75, 0xff}).summary(0)
	assert.NotEmpty(t, bad.Unreadable)
	assert.Len(t, bad.ID, 24)
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                           "",
		"order 17 is refused":        "order # is refused",
		"dial tcp 10.0.0.1:443: i/o": "dial tcp #: i/o",
		"no such user ada@shop.example.org, sorry":        "no such user #, sorry",
		"id 6ba7b810-9dad-11d1-80b4-00c04fd430c8 missing": "id # missing",
		"hash deadbeefdeadbeefcafe\n\tand   0x1f":         "hash # and #",
		"dial tcp [2001:db8::1]:5432: connection refused": "dial tcp [#]#: connection refused",
		"index out of range [5] with length 3":            "index out of range [#] with length #",
		"a \xff b":                                        "a ? b",
		"status=503 at 2026-01-02T03:04:05Z":              "status=# at #",
		"unexpected end of JSON input.":                   "unexpected end of JSON input.",
		"Straße 5 gesperrt: Überlast":                     "Straße # gesperrt: Überlast",
		strings.Repeat("x", 5000):                         strings.Repeat("x", 200),
		"decade facade":                                   "decade facade",
	} {
		assert.Equal(t, want, fingerprint(text), text)
	}
	assert.Equal(t, groupOf("q", "r", "t", "order 1").ID, groupOf("q", "r", "t", "order 2").ID)
	assert.NotEqual(t, groupOf("q", "r", "t", "order 1").ID, groupOf("q", "r", "t", "order x").ID)
}

func TestFilter(t *testing.T) {
	t.Parallel()
	l := open(sampleDeadLetter(t, died))
	one := 1
	zero := 0
	for name, f := range map[string]Filter{
		"all": {}, "id": {IDs: []string{"x", l.id()}}, "message-id": {IDs: []string{"m1"}}, "group": {Groups: []string{l.group().ID}},
		"queue": {Queues: []string{"orders"}}, "reason": {Reasons: []client.Reason{"permanent"}}, "type": {ErrorType: "*bank.Refusal"},
		"text": {Text: "refused by"}, "match": {Match: regexp.MustCompile(`order \d+`)}, "properties": {Properties: map[string]string{"n": "42", "kind": "s"}},
		"died": {DeadLetteredAfter: died, DeadLetteredBefore: died.Add(1)}, "replays": {MaxReplays: &zero},
	} {
		require.NoError(t, f.check(), name)
		assert.True(t, f.matcher().matches(l), name)
		assert.Equal(t, name == "all", f.everything(), name)
	}
	for name, f := range map[string]Filter{
		"id": {IDs: []string{"x"}}, "group": {Groups: []string{"0123456789ab"}}, "queue": {Queues: []string{"x"}}, "reason": {Reasons: []client.Reason{"x"}}, "type": {ErrorType: "x"},
		"text": {Text: "x y z"}, "match": {Match: regexp.MustCompile(`^x`)}, "property": {Properties: map[string]string{"n": "43"}}, "no property": {Properties: map[string]string{"x": ""}},
		"before": {DeadLetteredBefore: died}, "after": {DeadLetteredAfter: died.Add(1)}, "replays": {MinReplays: 1},
	} {
		require.NoError(t, f.check(), name)
		assert.False(t, f.matcher().matches(l), name)
	}
	for name, f := range map[string]Filter{
		"negative": {MinReplays: -1}, "crossed": {MinReplays: 2, MaxReplays: &one}, "times": {DeadLetteredAfter: died, DeadLetteredBefore: died}, "many": {IDs: make([]string, maxChoices+1)},
		"no group": {Groups: []string{"nope"}}, "long group": {Groups: []string{"0123456789abcd"}},
	} {
		require.ErrorAs(t, f.check(), new(*argument.Error), name)
	}
}

func TestTargets(t *testing.T) {
	t.Parallel()
	l := open(sampleDeadLetter(t, died))
	for _, c := range []struct {
		toExchange bool
		fixed      address.Address
		want       address.Address
	}{
		{false, address.Address{}, address.Queue("orders")}, {true, address.Address{}, address.Exchange("shop", "order.new")}, {true, address.Queue("q"), address.Queue("q")},
	} {
		got, err := l.target(c.toExchange, c.fixed)
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
	_, err := open(nil).target(false, address.Address{})
	require.ErrorIs(t, err, errNoQueue)
}

// values has one of each AMQP type.
func values() frames.List {
	all := frames.List{
		nil, true, false, "text", "bad \xff", uint8(255), uint16(65535), uint32(1 << 31), uint64(math.MaxUint64), int8(-128), int16(-1), int32(math.MinInt32), int64(math.MinInt64),
		float32(1.5), float32(math.Inf(1)), -0.1, math.NaN(), math.Copysign(0, -1), math.SmallestNonzeroFloat64, float32(math.MaxFloat32),
		frames.Decimal32{1}, frames.Decimal64{2}, frames.Decimal128{3}, frames.Char(0x1f600), frames.Timestamp(-1), frames.UUID{1, 2}, []byte{}, []byte{0, 255},
		frames.Symbol("s"), frames.Symbol("\xff"), frames.List{}, frames.Map{}, frames.Map{{Key: int32(1), Value: nil}, {Key: int32(1), Value: "twice"}},
		frames.Array{Type: 0x71, Elements: []any{int32(1), int32(2)}}, frames.Array{Type: 0x40, Elements: []any{}}, frames.Array{Type: 0xa1 + 0x10, Descriptor: frames.Symbol("d"), Elements: []any{"a"}},
		frames.Described{Descriptor: uint64(1), Value: frames.List{frames.Symbol("x")}},
	}
	return append(all, append(frames.List{}, all...))
}

func TestValuesAsJSONKeepEveryType(t *testing.T) {
	t.Parallel()
	for _, v := range values() {
		before, err := frames.AppendValue(nil, v)
		require.NoError(t, err)
		text, err := appendValue(nil, v)
		require.NoError(t, err)
		require.True(t, json.Valid(text), "%s", text)
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber()
		var parsed any
		require.NoError(t, d.Decode(&parsed))
		back, err := readValue(parsed)
		require.NoError(t, err, "%s", text)
		after, err := frames.AppendValue(nil, back)
		require.NoError(t, err)
		assert.Equal(t, before, after, "%s", text)
	}
}

// Any bytes that a broker delivers are written as a line, and read back as the same bytes.
func FuzzLine(f *testing.F) {
	f.Add(sampleDeadLetter(f, died))
	f.Add([]byte("nonsense"))
	b, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(frames.SectionValue), Value: values()})
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte{0, 0x53, 0x77, 0x70, 0, 0, 0, 5})
	f.Add([]byte{0, 0xa3, 0x10, 'a', 'm', 'q', 'p', ':', 'd', 'a', 't', 'a', ':', 'b', 'i', 'n', 'a', 'r', 'y', 0xa0, 0})
	f.Fuzz(func(t *testing.T, payload []byte) {
		l := open(payload)
		_, _ = l.whole(0), l.history()
		_, _ = l.renewed(ReplayMark{ID: "r"}, nil)
		line, err := l.line("dead")
		require.NoError(t, err)
		require.Equal(t, 1, bytes.Count(line, []byte("\n")))
		in, err := readLine(line)
		require.NoError(t, err, "%s", line)
		require.True(t, bytes.Equal(payload, in.payload), "%x, %x: %s", payload, in.payload, line)
		_, _ = sendable(payload)
	})
}

// A hostile line is an error or a message, and never panics.
func FuzzReadLine(f *testing.F) {
	line, err := open(sampleDeadLetter(f, died)).line("dead")
	require.NoError(f, err)
	f.Add(line)
	f.Add([]byte(`{"hopback":1,"queue":"q","id":"000000000000000000000000","body":[{"value":{"array":{"type":"0xe0","elements":[]}}}]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		in, err := readLine(line)
		if err != nil {
			return
		}
		if out, err := sendable(in.payload); err == nil {
			_, err := frames.SplitSections(out)
			require.NoError(t, err)
		}
	})
}

// An edited line counts, and its encoding doesn't.
func TestEditedLineCounts(t *testing.T) {
	t.Parallel()
	line := `{"hopback":1,"queue":"q","id":"000000000000000000000000","body":[{"value":{"uint":5}}],"encoding":"AFN3cAAAAAU="}`
	in, err := readLine([]byte(line))
	require.NoError(t, err)
	assert.Equal(t, []byte{0, 0x53, 0x77, 0x70, 0, 0, 0, 5}, in.payload)
	in, err = readLine([]byte(strings.Replace(line, `"uint":5`, `"uint":6`, 1)))
	require.NoError(t, err)
	assert.Equal(t, []byte{0, 0x53, 0x77, 0x52, 6}, in.payload)
}

// A deeply nested body isn't indented: the indentation would take gigabytes.
func TestDeepBodiesAreShownAsText(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	payload, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(frames.SectionData), Value: []byte(deep)})
	require.NoError(t, err)
	text, form, size, _ := open(payload).shownBody()
	assert.Equal(t, bodyText, form)
	assert.Equal(t, len(deep), size)
	assert.Equal(t, deep, text)
}

// The work of a survey for each message.
func BenchmarkSurveyMessage(b *testing.B) {
	payload := sampleDeadLetter(b, died)
	groups := newTally(maxGroups)
	b.ReportAllocs()
	for b.Loop() {
		groups.add(open(payload), "")
	}
}

// The work of a replay for each message, without sending it.
func BenchmarkReplayMessage(b *testing.B) {
	payload := sampleDeadLetter(b, died)
	mark := ReplayMark{ID: "r1", By: "ada", At: died}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := open(payload).renewed(mark, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// A DeadLetter has its whole body in a separate buffer, even if only a part is shown.
func TestRawBody(t *testing.T) {
	t.Parallel()
	payload := sampleDeadLetter(t, died)
	w := open(payload).whole(0)
	assert.Equal(t, `{"order":1}`, string(w.RawBody))
	clear(payload)
	assert.Equal(t, `{"order":1}`, string(w.RawBody))
	assert.Equal(t, "no message", string(open([]byte("no message")).whole(0).RawBody))
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(frames.SectionValue), Value: int32(1)})
	require.NoError(t, err)
	assert.Nil(t, open(sampleDeadLetter(t, died, func(m *frames.Message) { m.Body = value })).whole(0).RawBody)
}
