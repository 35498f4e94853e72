package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
)

// A group is found, one of its messages is shown, and all of it is replayed after a dry
// run. The others stay. The log says who did what, and to how many.
func TestAGroupIsFoundShownAndReplayed(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Title: "the shop"})
	s.orders(120)
	b := s.browser()
	overview := b.settled("./")
	assert.Contains(t, overview.text, "<b>120</b> <span>dead letters</span>")
	assert.Contains(t, overview.text, "connect to #: timed out")
	assert.Contains(t, overview.text, ">score is too high</a>")
	assert.Contains(t, overview.text, "the shop")
	assert.Equal(t, 2, strings.Count(overview.text, "<svg class=\"draw"))
	group := s.groupOf("score is too high")
	messages := b.settled("messages?" + string(query("in", "orders.dead", "group", group)))
	assert.Contains(t, messages.text, "<b>60</b> <span>messages</span>")
	assert.NotContains(t, messages.text, "Error type", "*errors.errorString tells a person nothing")
	assert.NotContains(t, messages.text, "shown as #", "nothing in the text differs")
	assert.Contains(t, b.settled("messages?"+string(query("in", "orders.dead", "group", s.groupOf("connect to #: timed out")))).text, "shown as #")
	assert.Contains(t, messages.text, ">o-1<")
	assert.NotContains(t, messages.text, ">o-0<")
	second := b.settled(messages.link(t, "messages?group="+group+"&in=orders.dead&skip=50"))
	assert.Contains(t, second.text, ">o-119<")
	assert.NotContains(t, second.text, ">o-1<")

	message := b.settled(messages.link(t, "message?"))
	assert.Contains(t, message.text, "score is too high")
	assert.Contains(t, message.text, "dead-lettered")
	assert.Contains(t, message.text, "shop")
	assert.NotContains(t, message.text, "&#34;order&#34;", "the body is hidden")
	assert.NotContains(t, s.log.String(), "action=body")
	body := b.settled(message.link(t, "body?"))
	assert.Contains(t, body.text, "&#34;order&#34;: 1\n")
	assert.Contains(t, s.log.String(), "body shown")

	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "group": {group}, "do": {"replay all"}}))
	assert.Contains(t, dry.text, "<b>60</b> of 120 messages would be replayed")
	assert.Equal(t, 120, s.broker.Queue("orders.dead").Counts().Ready)
	plan := dry.at.Query().Get("id")
	done := b.run(b.post("replay", url.Values{"run": {plan}}))
	assert.Contains(t, done.text, "<b>60</b> messages were replayed")
	assert.Equal(t, 60, s.broker.Queue("orders.dead").Counts().Ready)
	assert.Equal(t, 60, s.broker.Queue("orders").Counts().Ready)
	assert.Regexp(t, `msg="hopback desk: run finished" action=replay who=local .*queue=orders.dead .*replayed=60 failed=0`, s.log)

	assert.NotContains(t, b.settled("./").text, ">score is too high</a>", "the survey is new")
	assert.Contains(t, b.settled("messages?"+string(query("in", "orders.dead", "group", group))).text, "No message matches")
	gone := b.settled(message.at.String())
	assert.Equal(t, http.StatusNotFound, gone.status)
	assert.Contains(t, gone.text, "was replayed or discarded")
	assert.Contains(t, b.get("runs").text, "60 of 60")
}

// groupOf is the ID of the group with that text.
func (s *stage) groupOf(text string) string {
	s.t.Helper()
	_, last, _ := s.handler.survey.state()
	require.NotNil(s.t, last)
	for _, g := range last.groups {
		if g.Text == text {
			return g.ID
		}
	}
	require.Fail(s.t, "no group "+text)
	return ""
}

// Only the selected messages are replayed, to the queue that the form names.
func TestSelectedMessagesAreReplayed(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(10)
	s.declare("elsewhere")
	b := s.browser()
	list, err := s.desk.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
	require.NoError(t, err)
	ids := []string{list.Messages[3].ID, list.Messages[7].ID}
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay selected"}, "id": ids}))
	assert.Contains(t, dry.text, "<b>2</b> of 10 messages would be replayed")
	plan := dry.at.Query().Get("id")
	for form, status := range map[string]int{
		"rate=0": 400, "rate=x": 400, "rate=NaN": 400, "max=0": 400, "max=-1": 400, "to=nowhere": 400, "to=other": 400,
	} {
		f, err := url.ParseQuery(form)
		require.NoError(t, err)
		f.Set("run", plan)
		assert.Equal(t, status, b.post("replay", f).status, form)
	}
	done := b.run(b.post("replay", url.Values{"run": {plan}, "to": {"other"}, "other": {"elsewhere"}, "rate": {"1000"}}))
	assert.Contains(t, done.text, "<b>2</b> messages were replayed")
	assert.Equal(t, 2, s.broker.Queue("elsewhere").Counts().Ready)
	assert.Equal(t, 8, s.broker.Queue("orders.dead").Counts().Ready)

	none := b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay selected"}})
	assert.Equal(t, http.StatusUnprocessableEntity, none.status)
	assert.Contains(t, none.text, "No message is selected")
}

// A replay in progress shows how far it is, is stopped, and is resumed under the same
// name. What wasn't sent is in the queue all the time.
func TestAReplayIsStoppedAndGoesOn(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	const n = 60
	s.orders(n)
	b := s.browser()
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}}))
	began := b.post("replay", url.Values{"run": {dry.at.Query().Get("id")}, "rate": {"25"}})
	require.Equal(t, http.StatusOK, began.status)
	id := began.at.Query().Get("id")
	ctx, cancel := context.WithTimeout(t.Context(), testPatience)
	defer cancel()
	require.NoError(t, s.broker.Queue("orders").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready >= 5 }))
	waiting := b.get("messages?in=orders.dead")
	assert.Contains(t, waiting.text, "in use for a replay")
	assert.Contains(t, b.get("run?id="+id).text, "Stop</button>")
	stopped := b.run(b.post("stop", url.Values{"run": {id}}))
	assert.Contains(t, stopped.text, "Stopped. Messages that")
	sent := s.broker.Queue("orders").Counts().Ready
	assert.Less(t, sent, n)
	// What the replay held comes back a moment after it has ended.
	require.NoError(t, s.broker.Queue("orders.dead").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready == n-sent }))
	assert.Contains(t, s.log.String(), "stopped-by=local")

	again := b.run(b.post("replay", url.Values{"resume": {id}}))
	assert.Contains(t, again.text, fmt.Sprintf("<b>%d</b> messages were replayed", n-sent))
	assert.Equal(t, n, s.broker.Queue("orders").Counts().Ready)
	first, second := s.handler.runs.find(id), s.handler.runs.find(again.at.Query().Get("id"))
	assert.Equal(t, first.replayed.ID, second.replayed.ID)
	assert.Equal(t, http.StatusConflict, b.post("replay", url.Values{"resume": {dry.at.Query().Get("id")}}).status)
}

// Two people who replay the same messages at the same time don't double them: the second
// waits for the queue, and finds nothing.
func TestTwoReplaysOfTheSameMessages(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(200)
	one, two := s.browser(), s.browser()
	tokens := []string{one.token(), two.token()}
	plan := one.run(one.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}})).at.Query().Get("id")
	pages := make(chan answer, 2)
	for i, b := range []*browser{one, two} {
		go func() { pages <- b.do(http.MethodPost, "replay", url.Values{"run": {plan}, "token": {tokens[i]}}) }()
	}
	var sent uint64
	for range 2 {
		p := one.run(<-pages)
		sent += s.handler.runs.find(p.at.Query().Get("id")).replayed.Replayed
	}
	assert.EqualValues(t, 200, sent)
	assert.Equal(t, 200, s.broker.Queue("orders").Counts().Ready)
	assert.Zero(t, s.broker.Queue("orders.dead").Counts().Ready)
}

// An edit changes what the form changed, and nothing else.
func TestAMessageIsEdited(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	bodies := map[string]string{"o-1": "\n<textarea>{\"order\": 1}</textarea>\n\n", "o-2": "a\r\nb", "o-3": "\xff\x00"}
	for id, body := range bodies {
		s.die("orders", deadLetter{id: id, body: body, err: errors.New("no"), kind: "application/json", properties: map[string]any{"shop": "s1", "old": "x"}})
	}
	b := s.browser()
	ids := map[string]string{}
	list, err := s.desk.List(t.Context(), desk.ListConfig{Queue: "orders.dead"})
	require.NoError(t, err)
	for _, m := range list.Messages {
		ids[m.MessageID] = m.ID
	}
	form := b.settled("edit?" + string(query("in", "orders.dead", "id", ids["o-1"])))
	assert.Contains(t, form.text, ">\n\n&lt;textarea&gt;{&#34;order&#34;: 1}&lt;/textarea&gt;\n\n</textarea>", "a parser drops the first end of a line")
	assert.Contains(t, b.settled("edit?"+string(query("in", "orders.dead", "id", ids["o-2"]))).text, "carriage returns")
	assert.Contains(t, b.settled("edit?"+string(query("in", "orders.dead", "id", ids["o-3"]))).text, "be edited here")

	same := b.run(b.post("replay-edited", url.Values{"in": {"orders.dead"}, "id": {ids["o-1"]}, "body": {strings.ReplaceAll(bodies["o-1"], "\n", "\r\n")}, "content-type": {"application/json"}}))
	assert.Contains(t, same.text, "the edit changes nothing")
	assert.Equal(t, 3, s.broker.Queue("orders.dead").Counts().Ready)
	assert.Equal(t, http.StatusBadRequest, b.post("replay-edited", url.Values{"in": {"orders.dead"}, "id": {ids["o-1"]}, "set": {"=x"}}).status)

	done := b.run(b.post("replay-edited", url.Values{
		"in": {"orders.dead"}, "id": {ids["o-1"]}, "body": {"{\r\n\"order\": 2}"}, "content-type": {"text/plain"}, "set": {"shop=s2\r\nnew=a=b\r\n"}, "remove": {"old"},
	}))
	assert.Contains(t, done.text, "<b>1</b> message was replayed")
	done = b.run(b.post("replay-edited", url.Values{"in": {"orders.dead"}, "id": {ids["o-3"]}, "content-type": {"application/json"}, "set": {"shop=s3"}}))
	assert.Contains(t, done.text, "<b>1</b> message was replayed")
	gone := b.run(b.post("replay-edited", url.Values{"in": {"orders.dead"}, "id": {ids["o-3"]}, "set": {"shop=s3"}}))
	assert.Contains(t, gone.text, "is no longer in the queue")

	got := map[string]*client.Message{}
	for _, m := range s.take("orders", 2) {
		got[m.Properties.MessageID.(string)] = m
	}
	assert.Equal(t, "{\n\"order\": 2}", string(got["o-1"].GetData()))
	assert.Equal(t, "text/plain", *got["o-1"].Properties.ContentType)
	assert.Equal(t, map[string]any{"shop": "s2", "new": "a=b"}, got["o-1"].ApplicationProperties)
	assert.Equal(t, bodies["o-3"], string(got["o-3"].GetData()))
	assert.Equal(t, "application/json", *got["o-3"].Properties.ContentType)
}

// take consumes n messages.
func (s *stage) take(queue string, n int) (all []*client.Message) {
	s.t.Helper()
	ctx, stop := context.WithTimeout(s.t.Context(), testPatience)
	defer stop()
	got := make(chan *client.Message, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- s.conn.Consume(ctx, queue, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
			got <- d.Message()
			return nil
		}), client.ConsumerConfig{})
	}()
	for len(all) < n {
		select {
		case m := <-got:
			all = append(all, m)
		case <-ctx.Done():
			require.Fail(s.t, "too few messages")
		}
	}
	stop()
	require.NoError(s.t, <-ended)
	return all
}

// Discarded messages are in a file first, from which they are imported again. Without a
// directory nothing is discarded.
func TestMessagesAreDiscarded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := newStage(t, Config{Writable: true, DiscardDir: dir})
	s.orders(20)
	b := s.browser()
	b.settled("./")
	group := s.groupOf("score is too high")
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "group": {group}, "do": {"discard all"}}))
	assert.Contains(t, dry.text, "<b>10</b> of 20 messages would be discarded")
	plan := dry.at.Query().Get("id")
	assert.Equal(t, http.StatusUnprocessableEntity, b.post("discard", url.Values{"run": {plan}}).status, "it asks twice")
	assert.Equal(t, http.StatusBadRequest, b.post("replay", url.Values{"run": {plan}}).status, "it is the dry run of something else")
	assert.Equal(t, 20, s.broker.Queue("orders.dead").Counts().Ready)
	done := b.run(b.post("discard", url.Values{"run": {plan}, "sure": {"1"}, "max": {"7"}}))
	assert.Contains(t, done.text, "<b>7</b> messages were discarded")
	assert.Equal(t, 13, s.broker.Queue("orders.dead").Counts().Ready)
	files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	assert.Contains(t, done.text, files[0])
	f, err := os.Open(files[0])
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	report, err := s.desk.Import(t.Context(), f, desk.ImportConfig{})
	require.NoError(t, err)
	assert.EqualValues(t, 7, report.Imported)
	assert.Regexp(t, `action=discard who=local .*discarded=7 file=`, s.log)

	without := newStage(t, Config{Writable: true})
	without.orders(1)
	no := without.browser().post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"discard all"}})
	assert.Equal(t, http.StatusForbidden, no.status)
	assert.NotContains(t, without.browser().settled("messages?in=orders.dead").text, "Discard")
}

// Looking into a queue where that costs deliveries is refused with the reason, until
// somebody accepts that.
func TestAPriceIsNamedAndAccepted(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true}, "4.0.5")
	s.declare("orders")
	p, err := client.NewPublisher[deadLetter](t.Context(), s.conn, address.Queue("orders"), client.PublisherConfig{Codec: rawCodec{}})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), deadLetter{body: "x"}))
	b := s.browser()
	no := b.settled("messages?in=orders")
	assert.Equal(t, http.StatusConflict, no.status)
	assert.Contains(t, no.text, "counts each scan as a delivery")
	assert.Contains(t, no.text, `name="accept" value="delivery-limit"`)
	list := b.post("accept", url.Values{"page": {"messages"}, "query": {"in=orders"}, "accept": {"delivery-limit"}})
	list = b.settled(list.at.String())
	require.Equal(t, http.StatusOK, list.status, list.text)
	message := list.link(t, "message?")
	assert.Equal(t, http.StatusConflict, b.settled(message).status, "each look has its price")
	_, q, _ := strings.Cut(message, "?")
	shown := b.post("accept", url.Values{"page": {"message"}, "query": {q}, "accept": {"delivery-limit"}})
	assert.Equal(t, http.StatusOK, b.settled(shown.at.String()).status)
	assert.Contains(t, s.log.String(), "side effects accepted")
	for _, form := range []url.Values{{"page": {"messages"}, "query": {"in=orders"}}, {"page": {"x"}, "query": {"in=orders"}, "accept": {"delivery-limit"}}, {"page": {"message"}, "query": {"%"}, "accept": {"x"}}} {
		assert.Equal(t, http.StatusBadRequest, b.post("accept", form).status)
	}
	quiet := newStage(t, Config{}, "4.0.5")
	quiet.declare("orders")
	assert.NotContains(t, quiet.browser().settled("messages?in=orders").text, "Accept that")
}

// The page works under a prefix: every link and every form stays below it and leads
// somewhere.
func TestUnderAPrefix(t *testing.T) {
	t.Parallel()
	s := stageUnder(t, Config{Writable: true, DiscardDir: t.TempDir()}, "/ops/dead/")
	s.orders(60)
	b := s.browser()
	b.settled("./")
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}}))
	assert.Equal(t, "/ops/dead/run", dry.at.Path)
	b.run(b.post("replay", url.Values{"run": {dry.at.Query().Get("id")}, "max": {"1"}}))
	seen := map[string]bool{}
	todo := []string{s.server.URL + "/ops/dead"}
	for len(todo) > 0 && len(seen) < 400 {
		at := todo[0]
		todo = todo[1:]
		if seen[at] {
			continue
		}
		seen[at] = true
		a := b.settled(at)
		require.Equal(t, http.StatusOK, a.status, "%s: %s", at, a.text)
		if len(a.header.Values("Content-Disposition")) > 0 {
			continue
		}
		for _, l := range a.links() {
			if strings.HasPrefix(l, "#") || l == "messages" { // the form to search
				continue
			}
			to, err := a.at.Parse(l)
			require.NoError(t, err)
			assert.True(t, strings.HasPrefix(to.Path, "/ops/dead/"), "%s on %s", l, at)
			to.Fragment = ""
			isAction := s.handler.paths[strings.TrimPrefix(to.Path, "/ops/dead/")].method == http.MethodPost
			// Not all of the messages, which are alike.
			if !isAction && !(strings.Contains(to.RawQuery, "id=") && len(seen) > 60) && to.Query().Get("again") == "" {
				todo = append(todo, to.String())
			}
		}
	}
	assert.Greater(t, len(seen), 20)
	cookies := b.client.Jar.Cookies(&url.URL{Scheme: "http", Host: strings.TrimPrefix(s.server.URL, "http://"), Path: "/"})
	assert.Empty(t, cookies, "the cookie is for the prefix alone")
}

// After Shutdown nothing runs, and nothing is held.
func TestShutdownGivesBack(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(50)
	b := s.browser()
	dry := b.run(b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}}))
	b.post("replay", url.Values{"run": {dry.at.Query().Get("id")}, "rate": {"2"}})
	ctx, cancel := context.WithTimeout(t.Context(), testPatience)
	defer cancel()
	require.NoError(t, s.broker.Queue("orders").Await(ctx, func(c hopbacktest.Counts) bool { return c.Ready >= 1 }))
	require.NoError(t, s.handler.Shutdown(ctx))
	sent := s.broker.Queue("orders").Counts().Ready
	c := s.broker.Queue("orders.dead").Counts()
	assert.Equal(t, 50-sent, c.Ready)
	assert.Zero(t, c.Unacknowledged)
	assert.Equal(t, http.StatusServiceUnavailable, b.get("./").status)
	assert.False(t, s.handler.survey.start(s.handler, "x"))
	require.NoError(t, s.handler.Shutdown(ctx), "twice")
}

// The state is bounded: runs that have ended are forgotten, and there are few at a time.
func TestRunsAndLooksAreBounded(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	b := s.browser()
	token := b.token()
	release, err := s.handler.queues.acquire(t.Context(), "orders.dead", "a test")
	require.NoError(t, err)
	for range maxRuns {
		require.Equal(t, http.StatusOK, b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}, "token": {token}}).status)
	}
	full := b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}, "token": {token}})
	assert.Equal(t, http.StatusServiceUnavailable, full.status)
	assert.Contains(t, b.get("runs").text, "waiting")
	for i := range maxOpen {
		v := &visit{Request: (&http.Request{}).WithContext(canceled())}
		_, no := s.handler.peeks.get(s.handler, v, fmt.Sprint(i), "orders.dead", s.handler.list(selection{Queue: "orders.dead"}, 0, nil))
		require.Nil(t, no)
	}
	assert.Equal(t, http.StatusServiceUnavailable, b.get("messages?in=orders.dead").status)
	release()
	require.Eventually(t, func() bool {
		for _, r := range s.handler.runs.list() {
			if !r.over() {
				return false
			}
		}
		return b.get("messages?in=orders.dead").status == http.StatusOK
	}, testPatience, 10*time.Millisecond)
	for range maxKept + 20 {
		r := &run{verb: verbReplay, dry: true, sel: selection{Queue: "orders.dead", All: true}}
		require.Nil(t, s.handler.begin(r))
		require.Eventually(t, r.over, testPatience, time.Millisecond)
	}
	assert.Len(t, s.handler.runs.list(), maxKept)
	for i := range maxPeeks + 20 {
		v := &visit{Request: (&http.Request{}).WithContext(t.Context())}
		k, no := s.handler.peeks.get(s.handler, v, fmt.Sprint("x", i), "orders.dead", func(context.Context, func(peekResult), func(desk.Progress)) (peekResult, error) {
			return peekResult{raw: make([]byte, maxRaw/4)}, nil
		})
		require.Nil(t, no)
		<-k.done
	}
	s.handler.peeks.mu.Lock()
	defer s.handler.peeks.mu.Unlock()
	assert.LessOrEqual(t, len(s.handler.peeks.all), maxPeeks)
	raw := 0
	for _, k := range s.handler.peeks.all {
		raw += len(k.raw)
	}
	assert.LessOrEqual(t, raw, maxRaw)
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// The page reports a broker that is away, and finds it again.
func TestABrokerThatIsAway(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	s.orders(3)
	b := s.browser()
	assert.Contains(t, b.settled("./").text, "<b>3</b>")
	s.broker.Stop()
	require.Eventually(t, func() bool { return strings.Contains(b.get("./").text, "The broker didn") }, testPatience, 50*time.Millisecond)
	assert.GreaterOrEqual(t, b.settled("message?in=orders.dead&id=o-1").status, 500)
	s.broker.Restart()
	require.Eventually(t, func() bool { return b.settled("message?in=orders.dead&id=o-1").status == http.StatusOK }, testPatience, 50*time.Millisecond)
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := New(nil, Config{})
	require.ErrorAs(t, err, new(*argument.Error))
	s := newStage(t, Config{})
	_, err = New(s.desk, Config{DiscardDir: filepath.Join(t.TempDir(), "none")})
	require.ErrorAs(t, err, new(*argument.Error))
}
