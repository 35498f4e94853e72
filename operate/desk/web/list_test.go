package web

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
)

var bars = regexp.MustCompile(`M(-?[0-9.]+) (\d+)v-([0-9.]+)h([0-9.]+)v[0-9.]+z`)

// The bars of arrivals are inside the picture for any times, and the words agree with them.
func TestArrivalsAreDrawn(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 23, 17, 0, 0, 0, time.UTC)
	from := time.Date(2026, 11, 23, 14, 5, 0, 0, time.UTC)
	for _, c := range []struct {
		arrivals desk.Arrivals
		bars     int
		words    string
	}{
		{desk.Arrivals{Unknown: 3}, 0, "189 messages, dead-lettered at an unknown time"},
		{desk.Arrivals{Earlier: 3}, 0, "189 messages, 3 more than a year earlier"},
		{desk.Arrivals{From: from, Width: time.Second, Counts: []uint64{189}}, 1, "189 messages at 14:05:00 UTC"},
		{desk.Arrivals{From: from, Width: time.Minute, Counts: []uint64{9, 180}}, 2, "189 messages over 2 min, most (180) at 14:06 UTC"},
		{desk.Arrivals{From: from, Width: 5 * time.Minute, Counts: append([]uint64{100}, append(make([]uint64, 34), 89)...)}, 2, "189 messages over 3 h, most (100) in the 5 min from 14:05 UTC"},
		{desk.Arrivals{From: from, Width: 15 * time.Second, Counts: []uint64{1, 1}, Unknown: 1, Earlier: 1}, 2, "189 messages over 30 s, 1 more than a year earlier, 1 at an unknown time"},
		{desk.Arrivals{From: from, Width: time.Hour, Counts: []uint64{1, 2, 0, 1}}, 3, "189 messages over 4 h, most (2) in the hour from 15:05 UTC"},
		{desk.Arrivals{From: from.AddDate(0, 0, -3), Width: 4 * time.Hour, Counts: []uint64{5, 1}}, 2, "189 messages over 8 h, most (5) in the 4 h from Nov 20, 14:05 UTC"},
		{desk.Arrivals{From: from.AddDate(0, 0, -30), Width: 24 * time.Hour, Counts: slices.Repeat([]uint64{2}, 30)}, 30, "189 messages over 30 days, most (2) on Oct 24"},
		{desk.Arrivals{From: from.AddDate(-1, 0, 0), Width: 7 * 24 * time.Hour, Counts: slices.Repeat([]uint64{math.MaxUint64}, 60)}, 60, "189 messages over 420 days, most (18,446,744,073,709,551,615) in the 7 days from Nov 23, 2025"},
	} {
		for _, size := range [][2]int{{sparkWidth, sparkHeight}, {headWidth, headHeight}} {
			s := sparkOf(desk.Group{Count: 189, Arrivals: &c.arrivals}, size[0], size[1], now)
			assert.Equal(t, c.words, s.Words)
			found := bars.FindAllStringSubmatch(s.Bars, -1)
			assert.Len(t, found, c.bars, c.words)
			assert.Empty(t, bars.ReplaceAllString(s.Bars, ""))
			for _, m := range found {
				var x, base, tall, wide float64
				_, err := fmt.Sscan(strings.Join(m[1:], " "), &x, &base, &tall, &wide)
				require.NoError(t, err)
				assert.GreaterOrEqual(t, x, 0.0)
				assert.LessOrEqual(t, x+wide, float64(size[0])+.2)
				assert.GreaterOrEqual(t, base-tall, 0.0)
				assert.GreaterOrEqual(t, tall, 2.0, "a single message is seen")
				assert.Positive(t, wide)
			}
			assert.Equal(t, c.bars > 1, s.From != "" && s.To != "")
		}
	}
	assert.Nil(t, sparkOf(desk.Group{Count: 1}, 1, 1, now))
}

// Each group has its arrivals and a button, which counts what a replay of all of it would
// select. A page that is read-only has no button.
func TestAGroupIsReplayedFromItsRow(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(11)
	b := s.browser()
	overview := b.settled("./")
	assert.Equal(t, 2, strings.Count(overview.text, `<svg class="spark" viewBox="0 0 120 30" preserveAspectRatio="none" role="img" aria-label="`))
	assert.Regexp(t, `aria-label="6 messages (at|over) [^"]*"><title>6 messages `, overview.text)
	group := s.groupOf("score is too high")
	form := `<form method="post" action="dry-run"><input type="hidden" name="token" value="` + b.token() + `"><input type="hidden" name="in" value="orders.dead"><input type="hidden" name="group" value="` +
		group + `"><button name="do" value="replay all">Replay…<span class="sr"> score is too high, in orders.dead</span></button></form>`
	assert.Contains(t, overview.text, form)
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "group": {group}, "do": {"replay all"}}))
	assert.Contains(t, dry.text, "<b>5</b> of 11 messages would be replayed")
	assert.Equal(t, http.StatusForbidden, b.post("dry-run", url.Values{"in": {"orders.dead"}, "group": {group}, "do": {"replay all"}, "token": {"x"}}).status)
	messages := b.settled("messages?" + string(query("in", "orders.dead", "group", group)))
	assert.Contains(t, messages.text, `<figure class="arrivals"><svg class="spark" viewBox="0 0 640 64"`)

	quiet := newStage(t, Config{})
	quiet.orders(3)
	shown := quiet.browser().settled("./").text
	assert.Equal(t, 2, strings.Count(shown, `<svg class="spark"`))
	assert.NotContains(t, shown, "dry-run")
	assert.NotContains(t, shown, "Replay…")
}

// column are the texts of a table's column.
func (a answer) column(t *testing.T, cell string) (texts []string) {
	t.Helper()
	for _, m := range regexp.MustCompile(cell+`([^<]*)<`).FindAllStringSubmatch(a.text, -1) {
		texts = append(texts, m[1])
	}
	return texts
}

const messageCell = `<th scope="row"><a href="message\?[^"]*">`

// Messages are sorted as the address says. The page says what is sorted: all, or one page of
// them. An order that isn't there is ignored.
func TestMessagesAreSorted(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	var all []deadLetter
	for i := range 60 {
		all = append(all, deadLetter{id: fmt.Sprintf("o-%02d", i), body: strings.Repeat("x", 100*(i%7)), err: errors.New("no")})
	}
	s.die("orders", all[:5]...)
	b := s.browser()
	page := func(q string) answer { t.Helper(); return b.settled("messages?in=orders.dead" + q) }
	inOrder := []string{"o-00", "o-01", "o-02", "o-03", "o-04"}
	assert.Equal(t, inOrder, page("").column(t, messageCell))
	assert.NotContains(t, page("").text, "Sorted")
	assert.NotContains(t, page("").text, "aria-sort")
	for _, none := range []string{"&sort=", "&sort=x", "&sort=-", "&sort=queue", "&sort=%3Cscript%3E", "&sort=--size"} {
		a := page(none)
		assert.Equal(t, inOrder, a.column(t, messageCell), none)
		assert.NotContains(t, a.text, "aria-sort")
	}
	largest := page("&sort=size")
	assert.Equal(t, []string{"o-04", "o-03", "o-02", "o-01", "o-00"}, largest.column(t, messageCell))
	assert.Contains(t, largest.text, "Sorted by size, the largest first. <a href=\"messages?in=orders.dead\">Queue order</a>")
	assert.Contains(t, largest.text, `<th scope="col" class="sort num" aria-sort="descending"><a href="?in=orders.dead&amp;sort=-size" class="on">Size`)
	assert.Equal(t, inOrder, page("&sort=-size").column(t, messageCell))
	assert.Equal(t, []string{"o-04", "o-03", "o-02", "o-01", "o-00"}, page("&sort=-message").column(t, messageCell))
	for _, o := range messageOrders {
		assert.Len(t, page("&sort="+o.key).column(t, messageCell), 5, o.key)
	}

	s.die("orders", all[5:]...)
	b.get("messages?in=orders.dead&again=1")
	part := page("&sort=size")
	assert.Contains(t, part.text, "Sorted by size, the largest first: only the 50 messages on this page. The pages follow the order of the queue.")
	next := b.settled(part.link(t, "messages?in=orders.dead&sort=size&skip=50"))
	assert.Contains(t, next.text, "only the 10 messages on this page")
	assert.Contains(t, next.links(), "messages?in=orders.dead&sort=size", "back to the first page")
	assert.Contains(t, next.links(), "messages?in=orders.dead&skip=50", "this page, unsorted")
}

// What has no time is last in either direction, and what is equal stays in order.
func TestUnknownTimesAreLast(t *testing.T) {
	t.Parallel()
	now := time.Now()
	rows := []desk.Summary{{ID: "a"}, {ID: "b", DeadLetteredAt: now}, {ID: "c"}, {ID: "d", DeadLetteredAt: now.Add(-time.Hour)}, {ID: "e", DeadLetteredAt: now}}
	order := func(sort string) (ids string) {
		for _, m := range sorted(rows, sortingOf(url.Values{"sort": {sort}}, messageOrders), messageOrders, unknownOfMessage, compareMessages) {
			ids += m.ID
		}
		return ids
	}
	assert.Equal(t, "bedac", order("dead-lettered"))
	assert.Equal(t, "dbeac", order("-dead-lettered"))
	assert.Equal(t, "abcde", order("retries"))
	assert.Equal(t, "abcde", order("-retries"))
	assert.Equal(t, "edcba", order("-message"))
	assert.Equal(t, "abcde", order("nothing"))
	groups := []desk.Group{{ID: "a"}, {ID: "b", Oldest: now, Newest: now}}
	for _, sort := range []string{"oldest", "-oldest", "newest", "-newest"} {
		assert.Equal(t, "b", sorted(groups, sortingOf(url.Values{"sort": {sort}}, groupOrders), groupOrders, unknownOfGroup, compareGroups)[0].ID, sort)
	}
}

// The groups are sorted before they are cut, by what is known of all of them.
func TestGroupsAreSorted(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(11)
	b := s.browser()
	const cell = `<th scope="row"><a href="messages\?[^"]*group=[^"]*">`
	largest := []string{"connect to #: timed out", "score is too high"}
	assert.Equal(t, largest, b.settled("./").column(t, cell))
	assert.Equal(t, largest, b.settled("./?sort=x").column(t, cell))
	assert.Equal(t, []string{largest[1], largest[0]}, b.settled("./?sort=-messages").column(t, cell))
	assert.Contains(t, b.settled("./?sort=-messages").text, "Groups of dead letters, the smallest first")

	now := time.Now()
	group := func(id, queue string, n uint64, oldest, newest time.Duration) desk.Group {
		return desk.Group{ID: id, Queue: queue, In: "orders.dead", Text: id, Count: n, Oldest: now.Add(-oldest), Newest: now.Add(-newest)}
	}
	// Of the future, so that no page takes a fresh survey instead.
	last := &surveyed{at: now.Add(time.Hour), queues: map[string]desk.QueueSurvey{}, groups: []desk.Group{group("a", "q2", 9, 3*time.Hour, time.Hour), group("b", "q1", 5, 9*time.Hour, 2*time.Hour), group("c", "q3", 5, time.Hour, time.Minute)}}
	for i := range 2 * shownGroups {
		last.groups = append(last.groups, group(fmt.Sprintf("z%03d", i), "q9", 1, 2*time.Hour, 3*time.Hour))
	}
	s.handler.survey.notify(func() { s.handler.survey.last, s.handler.survey.stale = last, false })
	for sort, want := range map[string]string{"messages": "a b c", "oldest": "b a z000", "newest": "c a b", "queue": "b a c", "-queue": "z000 z001 z002", "-newest": "z000 z001 z002", "-oldest": "c z000 z001"} {
		a := b.settled("./?sort=" + sort)
		assert.Equal(t, strings.Fields(want), a.column(t, cell)[:3], sort)
		assert.Contains(t, a.links(), "./?all=1&sort="+url.QueryEscape(sort))
		assert.Len(t, a.column(t, cell), shownGroups)
		assert.Equal(t, 1, strings.Count(a.text, "aria-sort"))
	}
	every := b.settled("./?all=1&sort=queue")
	assert.Len(t, every.column(t, cell), 2*shownGroups+3)
	assert.Contains(t, every.links(), "?all=1&sort=-queue")
}

// A page has the columns that its address names: at most four, and none that can't be shown. They
// stay in every link and form of the page.
func TestColumnsOfProperties(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	var all []deadLetter
	for i := range 60 {
		all = append(all, deadLetter{id: fmt.Sprintf("o-%02d", i), err: errors.New("no"), properties: map[string]any{"tenant": fmt.Sprintf("t%d", i), "a b&c=d": "<b>x</b>", "n": int64(i), "long": strings.Repeat("w", 5000)}})
	}
	s.die("orders", all...)
	b := s.browser()
	plain := b.settled("messages?in=orders.dead")
	assert.NotContains(t, plain.text, `class="prop"`)
	for _, name := range []string{"tenant", "a b&amp;c=d", "n", "long"} {
		assert.Contains(t, plain.text, `<input type="checkbox" name="column" value="`+name+`"> `+name+`</label>`)
	}
	const here = "messages?in=orders.dead&column=tenant&column=a+b%26c%3Dd&column=&column=tenant&column=long&sort=size"
	page := b.settled(here)
	assert.Equal(t, []string{"tenant", "a b&amp;c=d", "long"}, page.column(t, `<th scope="col" class="prop">`))
	cells := page.column(t, `<td class="prop" data-label="[^"]*">`)
	require.Len(t, cells, 150)
	assert.Contains(t, cells, "&lt;b&gt;x&lt;/b&gt;")
	assert.NotContains(t, page.text, strings.Repeat("w", maxValue+1))
	assert.Contains(t, page.text, `value="tenant" checked> tenant</label>`)
	const view = "column=tenant&column=a+b%26c%3Dd&column=long&sort=size"
	for _, l := range []string{"messages?in=orders.dead&" + view + "&skip=50", "messages?in=orders.dead&" + view + "&again=1"} {
		assert.Contains(t, page.links(), l)
	}
	assert.Equal(t, 2, strings.Count(page.text, `<input type="hidden" name="column" value="a b&amp;c=d">`), "in the search, and in the form of actions")
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}, "column": {"tenant", "a b&c=d"}, "sort": {"-size"}}))
	assert.Contains(t, dry.links(), "messages?in=orders.dead&column=tenant&column=a+b%26c%3Dd&sort=-size")
	again := b.get("messages?in=orders.dead&column=tenant&again=1")
	assert.Equal(t, url.Values{"in": {"orders.dead"}, "column": {"tenant"}}, again.at.Query())

	many := b.settled("messages?in=orders.dead" + strings.Repeat("&column=tenant", 3) + "&column=1&column=2&column=3&column=4&column=5")
	assert.Equal(t, []string{"tenant", "1", "2", "3"}, many.column(t, `<th scope="col" class="prop">`))
	bad := url.Values{"in": {"orders.dead"}, "column": {"\u202ex", "a\x00b", "\xff", strings.Repeat("n", maxName+1)}}
	assert.NotContains(t, b.settled("messages?"+bad.Encode()).text, `class="prop"`)
	for _, a := range attacks {
		hostile := b.settled("messages?" + url.Values{"in": {"orders.dead"}, "column": {a}, "sort": {a}}.Encode())
		assert.Equal(t, http.StatusOK, hostile.status)
		for _, harm := range []string{"<script>", "<img", "onmouseover='", "\u202e", "\x1b"} {
			assert.NotContains(t, hidden.ReplaceAllString(hostile.text, ""), harm)
		}
	}
	assert.Len(t, s.handler.peeks.all, 1, "columns and sorting need no other scan")
}

// What is kept of a message's properties is bounded, and doesn't change from one scan to the next.
func TestKeptPropertiesAreBounded(t *testing.T) {
	t.Parallel()
	all := map[string]string{"": "x", "\u202e": "x", strings.Repeat("n", 1000): "x"}
	for i := range 100 {
		all[fmt.Sprintf("k%02d", i)] = strings.Repeat("é", i*10)
	}
	one, other := desk.Summary{PropertyTexts: maps.Clone(all)}, desk.Summary{PropertyTexts: maps.Clone(all)}
	trimProperties(&one)
	trimProperties(&other)
	assert.Equal(t, one.PropertyTexts, other.PropertyTexts)
	sum := 0
	for name, value := range one.PropertyTexts {
		assert.True(t, columnName(name), name)
		sum += len(name) + len(value)
	}
	assert.LessOrEqual(t, sum, maxProperties)
	assert.Greater(t, sum, maxProperties/2)
	assert.Equal(t, strings.Repeat("é", 10), one.PropertyTexts["k01"])
	few := desk.Summary{PropertyTexts: map[string]string{"a": "1", "b": ""}}
	trimProperties(&few)
	assert.Equal(t, map[string]string{"a": "1", "b": ""}, few.PropertyTexts)
}

var option = regexp.MustCompile(`<option value="([^"]*)"( selected)?>([^<]*)</option>`)

// The reasons to search for are those of the last survey, with their counts, or all that are
// known.
func TestReasonsHaveCounts(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	fails := func(reason client.Reason) error { return client.DeadLetter{Reason: reason, Err: errors.New("no")} }
	s.die("orders", deadLetter{id: "1", err: fails("fraud")}, deadLetter{id: "2", err: fails("fraud")}, deadLetter{id: "3", err: fails("late")}, deadLetter{id: "4", err: fails("<script>")}, deadLetter{id: "5", err: fails("\u202ex")})
	b := s.browser()
	options := func(path string) string {
		t.Helper()
		var all []string
		for _, m := range option.FindAllStringSubmatch(b.settled(path).text, -1) {
			all = append(all, m[3]+m[2])
		}
		return strings.Join(all, ", ")
	}
	assert.Contains(t, options("messages?in=orders.dead"), "any, exhausted, permanent, ", "nothing is surveyed yet")
	assert.Contains(t, options("messages?in=orders.dead&reason=mine"), ", mine selected")
	b.settled("./")
	assert.Equal(t, "any, fraud (2), &lt;script&gt; (1), late (1)", options("messages?in=orders.dead"))
	assert.Equal(t, "any, fraud (2), &lt;script&gt; (1), late (1) selected", options("messages?in=orders.dead&reason=late"))
	assert.Contains(t, b.settled("messages?in=orders.dead").text, "Reason, counted just now")
	_, last, _ := s.handler.survey.state()
	for _, g := range last.groups {
		if g.Reason == "late" {
			assert.Equal(t, "any, late (1)", options("messages?"+string(query("in", "orders.dead", "group", g.ID))))
		}
	}
	found := b.settled("messages?in=orders.dead&reason=%3Cscript%3E")
	assert.Equal(t, []string{"4"}, found.column(t, messageCell))
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "reason": {"fraud"}, "do": {"replay all"}}))
	assert.Contains(t, dry.text, "<b>2</b> of 5 messages would be replayed")
	s.handler.survey.notify(func() { s.handler.survey.last.others = 1 })
	assert.Contains(t, options("messages?in=orders.dead"), "fraud (2&#43;)", "there are messages in none of the groups")
}

// The overview reports the broker's alarms and the work queues that nobody consumes, the latter
// as far as the visitor may see them. During an alarm nothing can be read.
func TestAlarmsAndIdleQueuesAreReported(t *testing.T) {
	t.Parallel()
	var hide atomic.Value
	s := newStage(t, Config{Authorize: func(_ *http.Request, a Access) (string, error) {
		if a.Queue != "" && a.Queue == hide.Load() {
			return "", errors.New("no")
		}
		return "ada", nil
	}})
	s.orders(2)
	s.declare("mails")
	fresh := func(b *browser) string {
		s.handler.counts.mu.Lock()
		s.handler.counts.at = time.Time{}
		s.handler.counts.mu.Unlock()
		return b.settled("./").text
	}
	b := s.browser()
	calm := fresh(b)
	assert.NotContains(t, calm, "alarm on")
	assert.NotContains(t, calm, "No consumers")
	p, err := client.NewPublisher[deadLetter](t.Context(), s.conn, address.Queue("mails"), client.PublisherConfig{Codec: rawCodec{}})
	require.NoError(t, err)
	require.NoError(t, p.PublishAll(t.Context(), make([]deadLetter, 1200)))
	idle := `<strong>No consumers:</strong> <a href="messages?in=mails">mails</a> (1,200 messages waiting).`
	assert.Contains(t, fresh(b), idle)
	hide.Store("mails")
	assert.NotContains(t, fresh(s.browser()), "No consumers")
	hide.Store("")

	s.broker.SetMemoryAlarm(true)
	s.broker.SetDiskAlarm(true)
	text := fresh(b)
	assert.Regexp(t, `<div class="note bad" role="alert"><p><strong>The broker has a memory alarm on [^ ]+, a disk alarm on [^ ]+\.</strong> It accepts no messages`, text)
	ctx := t.Context()
	list := b.settled("messages?in=orders.dead")
	assert.Equal(t, http.StatusOK, list.status, "reading needs the HTTP API only")
	assert.Contains(t, list.text, "during the broker&#39;s memory or disk alarm it is unknown")
	s.broker.SetMemoryAlarm(false)
	s.broker.SetDiskAlarm(false)
	assert.NotContains(t, fresh(b), "The broker has")
	require.NoError(t, s.broker.Queue("orders.dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == 2 }))

	assert.Equal(t, []string{"a memory or disk alarm", "a disk alarm"}, alarmWords([]desk.Alarm{{}, {Resource: "disk"}}))
	assert.Len(t, alarmWords(make([]desk.Alarm, 100)), 10)
	found := withoutConsumers([]desk.QueueSurvey{
		{Name: "busy", Role: "work", Messages: 9, Consumers: 1}, {Name: "empty", Role: "work"}, {Name: "log", Role: "work", Type: "stream", Messages: 9}, {Name: "x.dead", Role: "dead-letter", Messages: 9},
		{Name: "a", Role: "work", Messages: 1}, {Name: "c", Role: "work", Messages: 5}, {Name: "b", Role: "work", Messages: 5}, {Name: "d", Role: "work", Messages: 1}, {Name: "e", Role: "work", Messages: 1},
		{Name: "f", Role: "work", Messages: 1}, {Name: "\u202eg", Role: "work", Messages: 7},
	})
	assert.Equal(t, idleQueues{Queues: []idleQueue{{"\u202eg", `\u202eg`, 7}, {"b", "b", 5}, {"c", "c", 5}, {"a", "a", 1}, {"d", "d", 1}}, More: 2}, found)
}
