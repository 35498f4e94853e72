package web

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// attacks are texts that would do harm if they were part of a page.
var attacks = []string{
	`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `' onmouseover='alert(1)`, `javascript:alert(1)`, `</title><script>alert(1)</script>`,
	`</textarea><script>alert(1)</script>`, `{{.Token}}`, `--><script>alert(1)</script>`, "\u202ednammoc\u202c", "a\x00b\x1b[2J", strings.Repeat("w", 5000), "]]><svg onload=alert(1)>",
}

var hidden = regexp.MustCompile(`<input type="hidden"[^>]*>`)

// Names of queues, errors, IDs, and properties bring no script into a page, no control
// characters, and no end of the page.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Title: attacks[0]})
	names := []string{attacks[1], attacks[2], attacks[3] + "\u202ednammoc", "../a/b?c#d&e=f%41<script>"}
	s.declare(names...)
	var deadLetters []deadLetter
	for i, a := range attacks {
		err := client.DeadLetter{Reason: client.Reason(strings.ToValidUTF8(cutAt(a, 50), "?")), Err: errors.New(a)}
		deadLetters = append(deadLetters, deadLetter{id: fmt.Sprint(i) + a, body: a, err: err, properties: map[string]any{cutAt(a, 100): a, "x": "y"}, kind: "text/html"})
	}
	for _, name := range names {
		s.die(name, deadLetters...)
	}
	b := s.browser()
	check := func(a answer) {
		t.Helper()
		require.Equal(t, http.StatusOK, a.status, "%s: %.2000s", a.at, a.text)
		text := hidden.ReplaceAllString(a.text, "") // a form sends back what it is
		for _, bad := range []string{"<script>", "<img", "onmouseover='", "onload=alert(1)>", "\u202e", "\x00", "\x1b", `href="javascript:`} {
			assert.False(t, strings.Contains(text, bad), "%q in %s", bad, a.at)
		}
		assert.NotContains(t, a.text, strings.Repeat("w", 4500), "long texts are cut")
		assert.Equal(t, 1, strings.Count(a.text, "</html>"))
	}
	check(b.settled("./?all=1"))
	for _, name := range names {
		list := b.settled("messages?" + string(query("in", name+".dead")))
		check(list)
		found, err := s.desk.List(t.Context(), desk.ListConfig{Queue: name + ".dead"})
		require.NoError(t, err)
		require.Len(t, found.Messages, len(deadLetters))
		for _, m := range found.Messages[8:10] {
			here := string(query("in", name+".dead", "id", m.ID))
			check(b.settled("message?" + here))
			check(b.settled("body?" + here))
			check(b.settled("edit?" + here))
		}
		dry := b.run(b.post("dry-run", map[string][]string{"in": {name + ".dead"}, "do": {"replay all"}}))
		check(dry)
		done := b.run(b.post("replay", map[string][]string{"run": {dry.at.Query().Get("id")}, "headers": {"1"}}))
		check(done)
		assert.Contains(t, done.text, fmt.Sprintf("<b>%d</b> messages were replayed", len(deadLetters)))
	}
	check(b.settled("runs"))
	for _, a := range attacks {
		refused := b.settled("message?" + string(query("in", cutAt(a, 200), "id", cutAt(a, 200))))
		assert.GreaterOrEqual(t, refused.status, 400)
		assert.NotContains(t, refused.text, "<script>")
	}
}

// A body of 10 MiB makes no large page. It is downloaded whole, byte for byte, and so is
// one that isn't text. No browser opens it by itself.
func TestHostileBodies(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	large := 10 << 20
	if underRace { // which looks at each copy of it; this is far more than is shown, too
		large = 2 << 20
	}
	bodies := map[string]string{
		"large":   strings.Repeat("<script>alert(1)</script>", large/25),
		"bytes":   strings.Repeat("\xff\xfe\x00<script>", 1<<17),
		"json":    "[" + strings.Repeat(`"</script><b>",`, 1<<16) + "1]",
		"deep":    strings.Repeat("[", 100_000),
		"empty":   "",
		"control": "a\u202eb\u2028c",
		"cut":     strings.Repeat("é", maxShown),
	}
	for id, body := range bodies {
		s.die("orders", deadLetter{id: id, body: body, err: retry.Permanent(errors.New("no")), kind: "text/html"})
	}
	b := s.browser()
	for id, body := range bodies {
		here := string(query("in", "orders.dead", "id", id))
		hidden := b.settled("message?" + here)
		require.Equal(t, http.StatusOK, hidden.status)
		assert.Less(t, len(hidden.text), 20<<10, id)
		shown := b.settled("body?" + here)
		require.Equal(t, http.StatusOK, shown.status)
		assert.NotContains(t, shown.text, "<script>", id)
		assert.NotContains(t, shown.text, "\u202e", id)
		assert.NotContains(t, shown.text, "\ufffd", id)
		assert.Less(t, len(shown.text), 10*maxShown, id)
		if len(body) > maxShown {
			assert.Contains(t, shown.text, "Only the beginning is shown", id)
		}
		whole := b.settled("download?" + here)
		assert.True(t, bytes.Equal([]byte(body), []byte(whole.text)), id)
		assert.Equal(t, "application/octet-stream", whole.header.Get("Content-Type"))
		assert.Contains(t, whole.header.Get("Content-Disposition"), "attachment")
	}
	assert.Contains(t, b.settled("body?"+string(query("in", "orders.dead", "id", "bytes"))).text, "ff fe 00", "bytes are dumped")
	assert.Contains(t, b.settled("body?"+string(query("in", "orders.dead", "id", "control"))).text, `a\u202eb\u2028c`)
}

// A body that is a value of AMQP is shown with its types, and isn't a file.
func TestABodyOfTypes(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	m := client.NewMessage(nil)
	m.Data, m.Value = nil, map[string]any{"a": int32(1), "b": "<script>"}
	p, err := client.NewPublisher[*client.Message](t.Context(), s.conn, address.Queue("orders.dead"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), m))
	b := s.browser()
	list := b.settled("messages?in=orders.dead")
	at := list.link(t, "message?")
	shown := b.settled(strings.Replace(at, "message?", "body?", 1))
	assert.Contains(t, shown.text, "shown as typed")
	assert.NotContains(t, shown.text, "<script>")
	assert.NotContains(t, shown.text, "download?")
	assert.Equal(t, http.StatusUnprocessableEntity, b.settled(strings.Replace(at, "message?", "download?", 1)).status)
	assert.Contains(t, b.settled(strings.Replace(at, "message?", "edit?", 1)).text, "isn&#39;t text")
}

func TestTexts(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "1,234,567", number(1234567))
	assert.Equal(t, "1 message", many(1, "message"))
	assert.Equal(t, `a\u0000b\x9c`+"\n", clean("a\x00b\x9c\n"))
	assert.Equal(t, "é…", cutAt("éé", 3))
	assert.Equal(t, "…", fit("éé", 1))
	assert.Equal(t, "0", rate(-1))
	fields, more := fieldsOf([]byte(`[["a",{"symbol":"b"}],[{"symbol":"c"},{"timestamp":"1700000000000"}],["n",null],["t",true],["l",{"list":[1]}]]`))
	assert.False(t, more)
	assert.Equal(t, []field{{"a", "b", "symbol"}, {"c", "2023-11-14 22:13:20.000", "timestamp"}, {"n", "null", ""}, {"t", "true", "boolean"}, {"l", "[1]", "list"}}, fields)
	fields, _ = fieldsOf([]byte(`{"message-id":"x","creation-time":{"timestamp":"-1"}}`))
	assert.Equal(t, []field{{"message-id", "x", "string"}, {"creation-time", "-1", "timestamp"}}, fields)
	for _, bad := range []string{"", "x", "{", "[", `[["a"]]`, `{"a":`, `[[1,2],[3]]`} {
		assert.NotPanics(t, func() { fieldsOf([]byte(bad)) }, bad)
	}
}

// The drawing has each work queue next to its dead-letter queue, and is bounded.
func TestDrawing(t *testing.T) {
	t.Parallel()
	var queues []desk.QueueSurvey
	for i := range 1000 {
		name := fmt.Sprintf("q%d", i)
		queues = append(queues, desk.QueueSurvey{Name: name, Role: "work", Counted: true}, desk.QueueSurvey{Name: name + ".dead", Role: "dead-letter", Messages: uint64(i)})
	}
	queues = append(queues, desk.QueueSurvey{Name: "delay_1s", Role: "delay"}, desk.QueueSurvey{Name: "parking_queue", Role: "parking"}, desk.QueueSurvey{Name: "lost.dead", Role: "dead-letter", Messages: 9999})
	for _, d := range []drawing{wide(queues), narrow(queues)} {
		assert.Len(t, d.Boxes, 2*maxLanes+1, d.Name)
		assert.Contains(t, d.More, "993 more")
		for _, b := range d.Boxes {
			assert.LessOrEqual(t, b.X+b.W, d.Width, d.Name)
			assert.LessOrEqual(t, b.Y+b.H, d.Height, d.Name)
		}
	}
	d := wide(queues)
	assert.Equal(t, "lost.dead", d.Boxes[2].Title)
	assert.Equal(t, "q999", d.Boxes[3].Title)
	assert.Equal(t, "q999.dead", d.Boxes[4].Title)
	assert.Equal(t, d.Boxes[3].Y, d.Boxes[4].Y)
	// What a replay holds is there all the same.
	held := wide([]desk.QueueSurvey{{Name: "x.dead", Role: "dead-letter", Messages: 1, Unacknowledged: 9}})
	assert.Equal(t, "10", held.Boxes[0].Number)
	assert.Equal(t, "9 unacked", held.Boxes[0].Note)
	for _, none := range []drawing{wide(nil), narrow(nil)} {
		assert.Empty(t, none.Boxes)
		assert.Positive(t, none.Width)
	}
}

// A thousand queues make no endless page.
func TestManyQueues(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	var all []declare.QuorumQueue
	for i := range 150 {
		all = append(all, declare.QuorumQueue{Name: fmt.Sprintf("q%d", i), DeliveryLimit: 20})
	}
	topology, err := retry.Topology(policyOfTests, all...)
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	b := s.browser()
	short := b.settled("./")
	assert.Equal(t, shownQueues, strings.Count(short.text, "<span class=\"tag role"))
	assert.Contains(t, short.text, "Show all 301 queues")
	assert.Contains(t, short.text, "142 more are in the table")
	assert.Equal(t, 301, strings.Count(b.settled("./?all=1").text, "<span class=\"tag role"))
}
