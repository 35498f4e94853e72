package web

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
)

// forge publishes a message with annotations of the sender's choice to a queue.
func (s *stage) forge(queue, id string, annotations map[any]any) {
	s.t.Helper()
	m := client.NewMessage([]byte("{}"))
	m.Properties.MessageID, m.Annotations = id, annotations
	p, err := client.NewPublisher[*client.Message](s.t.Context(), s.conn, address.Queue(queue), client.PublisherConfig{})
	require.NoError(s.t, err)
	require.NoError(s.t, p.Publish(s.t.Context(), m))
}

// attempt is a failed attempt as package retry records it.
func attempt(at time.Time, delay time.Duration, text string) []any {
	return []any{at.UnixMilli(), delay.Milliseconds(), text}
}

func recorded(t *testing.T, members map[string]any) map[any]any {
	t.Helper()
	history, err := json.Marshal(members)
	require.NoError(t, err)
	return map[any]any{client.AnnotationReason: "exhausted", annotation.History: string(history)}
}

var tags = regexp.MustCompile(`<[^>]*>`)

// rowsOf are the rows of the history on a page, without their tags.
func rowsOf(t *testing.T, page string) (rows []string) {
	t.Helper()
	_, table, ok := strings.Cut(page, `<table class="rows history">`)
	require.True(t, ok, page)
	table, _, _ = strings.Cut(table, "</table>")
	_, table, _ = strings.Cut(table, "<tbody>")
	for _, row := range strings.Split(table, "</tr>") {
		if row = strings.Join(strings.Fields(tags.ReplaceAllString(row, " ")), " "); row != "" {
			rows = append(rows, row)
		}
	}
	return rows
}

// The history is a table, oldest first, with each attempt, the time between two events, the
// delay after an attempt, and a row for attempts that the message doesn't list any more.
func TestTheHistoryIsATable(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	s.declare("orders")
	start := time.Date(2026, 3, 2, 9, 30, 0, 0, time.UTC)
	annotations := recorded(t, map[string]any{
		"queue": "orders", "error": "card declined", "type": "*card.Error", "worker": "billing-1", "exchange": "shop", "key": "order.paid",
		"first": start.UnixMilli(), "last": start.Add(2 * time.Hour).UnixMilli(),
		"attempts": []any{attempt(start.Add(10*time.Minute), 5*time.Second, "dial tcp: i/o timeout"), attempt(start.Add(10*time.Minute+5200*time.Millisecond), 90*time.Minute, "bank: 503")},
	})
	annotations[annotation.Retries] = int64(6)
	s.forge("orders.dead", "o-1", annotations)
	s.forge("orders.dead", "o-2", nil)
	b := s.browser()
	page := b.settled("message?in=orders.dead&id=o-1").text
	assert.Equal(t, []string{
		"– Published to exchange shop, routing key order.paid",
		"2026-03-02 09:30:00 Attempt 1 failed in orders",
		"– Attempts 2 to 4 failed in orders Not listed. A message keeps its newest attempts and drops the oldest.",
		"2026-03-02 09:40:00 10 min Attempt 5 failed in orders dial tcp: i/o timeout 5 s",
		"2026-03-02 09:40:05 5.2 s Attempt 6 failed in orders bank: 503 1 h 30 min",
		"2026-03-02 11:30:00 1 h 49 min Attempt 7 failed in orders exhausted card declined",
	}, rowsOf(t, page))
	assert.Contains(t, page, "7 attempts over 2 h")
	assert.Contains(t, page, `<h2 id="h-history">History</h2>`)
	assert.NotContains(t, page, "Hops")
	assert.Contains(t, page, "exchange shop, routing key order.paid")
	assert.Contains(t, b.settled("message?in=orders.dead&id=o-2").text, "No history recorded.")
}

// What a worker and the broker record of a real failure and of a replay is shown, too.
func TestTheHistoryHasEarlierFailures(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	s.die("orders", deadLetter{id: "o-1", body: "{}", err: errors.New("no stock")})
	b := s.browser()
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}}))
	b.run(b.post("replay", url.Values{"run": {dry.at.Query().Get("id")}}))
	s.fail("orders", errors.New("no stock"), 1)
	rows := rowsOf(t, b.settled("message?in=orders.dead&id=o-1").text)
	require.Len(t, rows, 5)
	assert.Equal(t, "– Published to queue orders", rows[0])
	assert.Regexp(t, `Dead-lettered from orders .*no stock`, rows[1])
	assert.Regexp(t, `Replayed as replay-\S+ by local`, rows[2])
	assert.Regexp(t, `Attempt 1 failed in orders`, rows[3])
	assert.Regexp(t, `Dead-lettered from orders rejected`, rows[4])
}

// The sender of a message can write all of its history. Nothing of it is markup, and wrong
// numbers and times do no harm.
func TestAForgedHistory(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	s.declare("orders")
	now := time.Now()
	var many []any
	for i := range 200 {
		many = append(many, attempt(now.Add(time.Duration(i)*time.Second), time.Hour, attacks[i%len(attacks)][:min(40, len(attacks[i%len(attacks)]))]))
	}
	for i, members := range []map[string]any{
		{"queue": attacks[0], "error": attacks[1], "type": attacks[4], "worker": attacks[5], "exchange": attacks[0], "key": attacks[1], "first": now.UnixMilli(), "last": now.UnixMilli(), "attempts": many[:12]},
		{"queue": "orders", "error": "x", "first": now.UnixMilli(), "last": now.Add(-time.Hour).UnixMilli(), "attempts": []any{attempt(now, time.Hour, attacks[0]), attempt(now.Add(-48*time.Hour), -5, attacks[8])}},
		{"queue": "orders", "error": "x", "first": 1 << 62, "last": -1, "delay": 1 << 62, "attempts": []any{[]any{1 << 62, 1 << 62, "x"}, []any{"<script>"}, 7}},
		{"queue": "orders", "error": "x", "first": 1, "last": now.UnixMilli(), "attempts": many},
	} {
		annotations := recorded(t, members)
		annotations[annotation.Retries] = int64(1 << 62)
		annotations[annotation.Lives] = `[{"queue":"<script>alert(1)</script>","reason":"\"><img src=x>","error":"</td></table><script>alert(1)</script>","died":-5,"replay":"<script>","by":"<img src=x>","at":9000000000000000000},{"replay":"<script>a</script>","by":"<img src=x>","at":5}]`
		s.forge("orders.dead", fmt.Sprint("o-", i), annotations)
		page := s.browser().settled("message?in=orders.dead&id=o-" + fmt.Sprint(i))
		require.Equal(t, http.StatusOK, page.status)
		require.NotContains(t, page.text, "No history recorded.", i)
		for _, bad := range []string{"<script>", "<img", "onmouseover='", "\u202e", "\x00"} {
			assert.NotContains(t, page.text, bad, i)
		}
		assert.Equal(t, 1, strings.Count(page.text, `<table class="rows history">`))
		assert.LessOrEqual(t, len(rowsOf(t, page.text)), 120)
		assert.Less(t, len(page.text), 200<<10)
	}
	rows := strings.Join(rowsOf(t, s.browser().settled("message?in=orders.dead&id=o-1").text), "\n")
	assert.Contains(t, rows, "clocks differ")
}

func TestHistoryRows(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 2, 9, 30, 0, 500_000_000, time.UTC)
	view := historyOf(&desk.DeadLetter{Summary: desk.Summary{Queue: "orders"}, History: []desk.HistoryEvent{
		{Kind: "created", At: at},
		{Kind: "dead-lettered", At: at.Truncate(time.Second), Queue: "delay_1s", Reason: "expired", Count: 1},
		{Kind: "dead-lettered", At: at.Add(25 * time.Hour), Since: at, Queue: "orders", Reason: "expired", Count: 3},
		{Kind: "failure", Count: 1, Text: "not recorded"},
		{Kind: "last failure", At: at, Text: "boom", Delay: time.Minute},
	}})
	assert.Equal(t, []historyRow{
		{What: "Created", At: at},
		{What: "Waited in", Class: "waited", At: at.Truncate(time.Second), Where: "delay_1s", Tag: "expired", After: "0 s"},
		{What: "Dead-lettered from", Class: "dead-lettered", At: at.Add(25 * time.Hour), Where: "orders", Tag: "expired", After: "1 d 1 h", Note: "3 times since 2026-03-02 09:30:00"},
		{What: "Attempt 1 failed", Class: "missing", Note: "Not listed. A message keeps its newest attempts and drops the oldest."},
		{What: "Attempt 2 failed", Class: "failure", At: at, Text: "boom", Delay: "1 min", After: "clocks differ"},
	}, view.Rows)
	for d, want := range map[time.Duration]string{
		0: "0 s", 3 * time.Millisecond: "3 ms", 59990 * time.Millisecond: "59.9 s", 2 * time.Second: "2 s", 61 * time.Second: "1 min 1 s",
		time.Hour: "1 h", 26 * time.Hour: "1 d 2 h", 1 << 62: "53,375 d 23 h",
	} {
		assert.Equal(t, want, span(d))
	}
}

// The next page says once how a run went, to the person who started it.
func TestNotices(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir()})
	s.orders(12)
	b, other := s.browser(), s.browser()
	b.settled("./")
	group := s.groupOf("score is too high")
	plan := func(what string, form url.Values) string {
		form.Set("in", "orders.dead")
		form.Set("do", what)
		return b.run(b.post("dry-run", form)).at.Query().Get("id")
	}
	notices := func(a answer) []string {
		t.Helper()
		_, rest, ok := strings.Cut(a.text, `<div id="notices" role="status">`)
		require.True(t, ok)
		rest, _, _ = strings.Cut(rest, "</div>")
		var all []string
		for _, p := range strings.Split(rest, "</p>") {
			if p = strings.TrimSpace(tags.ReplaceAllString(p, "")); p != "" {
				all = append(all, p)
			}
		}
		return all
	}
	assert.Empty(t, notices(b.settled("./")), "a dry run needs no notice")

	first := plan("replay all", url.Values{"group": {group}})
	done := b.run(b.post("replay", url.Values{"run": {first}}))
	id := done.at.Query().Get("id")
	assert.Empty(t, notices(done), "the page of a run shows its state")
	assert.Empty(t, notices(other.settled("./")), "somebody else started it")
	b.header.Set("X-Hopback-Refresh", "reload")
	assert.Empty(t, notices(b.settled("./")), "the browser will load the page again")
	b.header.Del("X-Hopback-Refresh")
	next := b.settled("messages?in=orders.dead")
	assert.Equal(t, []string{"Replayed 6 messages to orders. Show the run"}, notices(next))
	assert.Contains(t, next.text, `<a href="run?id=`+id+`">Show the run</a>`)
	assert.Empty(t, notices(b.settled("messages?in=orders.dead")), "it is shown once")

	list, err := s.desk.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
	require.NoError(t, err)
	edit := url.Values{"in": {"orders.dead"}, "id": {list.Messages[0].ID}, "set": {"a=b"}}
	b.run(b.post("replay-edited", edit))
	gone := b.post("replay-edited", edit)
	assert.Equal(t, []string{"Replayed the edited message to orders. Show the run"}, notices(gone), "the page of another run")
	b.run(gone)
	assert.Equal(t, []string{
		"The edit of the message " + list.Messages[0].ID + " failed: the message is no longer in the queue: somebody has replayed or discarded it Show the run",
	}, notices(b.settled("runs")))

	b.run(b.post("discard", url.Values{"run": {plan("discard selected", url.Values{"id": {list.Messages[1].ID}})}, "sure": {"1"}}))
	assert.Equal(t, []string{"Discarded 1 message from orders.dead. Show the run"}, notices(b.settled("./")))

	slow := b.post("replay", url.Values{"run": {plan("replay all", url.Values{})}, "rate": {"1"}})
	assert.Equal(t, []string{"The replay of all messages in orders.dead is running. Show the run"}, notices(b.get("runs")))
	assert.Empty(t, notices(b.get("runs")))
	require.Eventually(t, func() bool { return s.broker.Queue("orders").Counts().Ready > 7 }, testPatience, 10*time.Millisecond)
	b.run(b.post("stop", url.Values{"run": {slow.at.Query().Get("id")}}))
	assert.Regexp(t, `^\[The replay of all messages was stopped after \d messages?\. Show the run\]$`, fmt.Sprint(notices(b.get("runs"))))

	// Nothing in an address is shown as a notice.
	forged := b.get("./?notice=" + url.QueryEscape(attacks[0]) + "&run=" + id + "&id=" + id)
	assert.Empty(t, notices(forged))
	assert.NotContains(t, forged.text, "alert(1)")
}

// A notice brings names of queues and texts of errors, which others choose.
func TestAHostileNotice(t *testing.T) {
	t.Parallel()
	r := &run{verb: verbReplay, ended: time.Now(), sel: selection{Queue: "q", Words: "all messages"}}
	r.replayed = &desk.ReplayReport{Replayed: 2, Failed: 1, Unknown: 3, Groups: []desk.Group{{Queue: attacks[0]}}}
	n, ok := r.notice()
	require.True(t, ok)
	assert.Equal(t, notice{Text: "Replayed 2 messages to " + attacks[0] + ". 1 message couldn't be sent and is still in q. 3 messages may exist twice.", Bad: true}, n)
	_, ok = r.notice()
	assert.False(t, ok)
	for _, c := range []struct {
		change func(*run)
		want   string
	}{
		{func(r *run) { r.replay.Address = address.Queue("other") }, "Replayed 2 messages to other."},
		{func(r *run) { r.replay.ToExchange = true }, "Replayed 2 messages to the exchange that they were published to."},
		{func(r *run) { r.replayed.Groups = []desk.Group{{Queue: "a"}, {Queue: "b"}} }, "Replayed 2 messages to the queues that they failed in."},
		{func(r *run) { r.replayed.Others = 1 }, "Replayed 2 messages."},
		{func(r *run) { r.replayed = nil; r.err = errors.New("hopback: down") }, "The replay of all messages failed: down"},
		{func(r *run) { r.err = errors.New("hopback: down") }, "The replay of all messages failed after 2 messages: down"},
		{func(r *run) { r.verb, r.discard = verbDiscard, &desk.DiscardReport{Discarded: 1} }, "Discarded 1 message from q."},
	} {
		r := &run{verb: verbReplay, ended: time.Now(), sel: selection{Queue: "q", Words: "all messages"}}
		r.replayed = &desk.ReplayReport{Replayed: 2, Groups: []desk.Group{{Queue: "a"}}}
		c.change(r)
		n, ok := r.notice()
		require.True(t, ok)
		assert.Equal(t, c.want, n.Text)
	}
	s := newStage(t, Config{Writable: true})
	name := attacks[1] + "\u202ednammoc"
	s.declare(name)
	s.die(name, deadLetter{id: "x", body: "x", err: errors.New("no")})
	b := s.browser()
	dry := b.run(b.post("dry-run", url.Values{"in": {name + ".dead"}, "do": {"replay all"}}))
	b.run(b.post("replay", url.Values{"run": {dry.at.Query().Get("id")}}))
	page := b.settled("runs")
	assert.Contains(t, page.text, "Replayed 1 message to &#34;&gt;&lt;img src=x onerror=alert(1)&gt;\\u202ednammoc.")
	assert.NotContains(t, page.text, "<img")
}

// What destroys something is red, and in a group apart from the other actions. Buttons that copy
// are hidden: without the script they do nothing.
func TestDangerousAndCopyingButtons(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir()})
	s.orders(2)
	b := s.browser()
	message := b.settled("body?in=orders.dead&id=o-1").text
	assert.Regexp(t, `class="inline apart">.*<button name="do" value="discard selected" class="danger">`, message)
	assert.Regexp(t, `value="replay selected" class="primary"`, message)
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"discard all"}}))
	assert.Regexp(t, `<span class="apart"><button class="danger">Discard 2</button></span>`, dry.text)
	for id, name := range map[string]string{"c-id": "ID", "c-message-id": "message-id", "c-body": "body", "c-error": "error"} {
		assert.Contains(t, message, `data-copy="`+id+`" aria-label="Copy the `+name+`" hidden>Copy</button>`)
		assert.Contains(t, message, ` id="`+id+`"`)
	}
	assert.NotRegexp(t, `<script[^>]*>[^<]`, message, "no script is inline")
	assert.NotRegexp(t, `\son[a-z]+=`, tags.FindAllString(message, -1))
	assert.NotContains(t, message, "style=")
}
