package web

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
)

// A page shows what its scan has found while the queue's order is restored. Until then the
// queue is in use, and actions and other scans say for what. The scan continues, although
// nobody asks for it.
func TestAPageIsShownBeforeTheQueueIsInOrder(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.declare("orders")
	const n = 9000
	p, err := client.NewPublisher[deadLetter](t.Context(), s.conn, address.Queue("orders.dead"), client.PublisherConfig{Codec: rawCodec{}})
	require.NoError(t, err)
	all := make([]deadLetter, n)
	for i := range all {
		all[i] = deadLetter{id: fmt.Sprint("o-", i), body: "{}"}
	}
	require.NoError(t, p.PublishAll(t.Context(), all, func(l deadLetter, m *client.Message) { m.Properties.MessageID = l.id }))
	first := func(skip int) string {
		l, err := s.desk.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Skip: skip, Limit: 1, Count: true})
		require.NoError(t, err)
		require.EqualValues(t, n, l.Matched)
		return l.Messages[0].MessageID
	}
	require.Equal(t, "o-0", first(0)) // from now on, all were returned before
	b := s.browser()
	b.token()
	const running = "The queue's order is being restored"
	until := func(path, text string) answer {
		t.Helper()
		var a answer
		require.Eventually(t, func() bool { a = b.get(path); return strings.Contains(a.text, text) }, testPatience, 20*time.Millisecond, "%s", &a.text)
		return a
	}
	slow := func(path, key, row string) answer {
		t.Helper()
		s.broker.SetLatency(120 * time.Millisecond)
		page := until(path, row)
		assert.Equal(t, http.StatusOK, page.status)
		assert.Contains(t, page.text, running)
		assert.Contains(t, page.text, `data-refresh="5"`)
		assert.Less(t, s.broker.Queue("orders.dead").Counts().Ready, n, "the scan continues")
		s.handler.peeks.mu.Lock()
		k := s.handler.peeks.all[key]
		s.handler.peeks.mu.Unlock()
		require.NotNil(t, k)
		assert.False(t, k.over())
		assert.False(t, k.idle.Stop(), "nothing ends it")
		return page
	}
	after := func(path, key string) {
		t.Helper()
		s.broker.SetLatency(0)
		s.handler.peeks.mu.Lock()
		k := s.handler.peeks.all[key]
		s.handler.peeks.mu.Unlock()
		<-k.done
		page := b.get(path)
		assert.NotContains(t, page.text, running)
		assert.NotContains(t, page.text, "may be out of order")
		assert.NotContains(t, page.text, "data-refresh")
		require.NoError(t, s.broker.Queue("orders.dead").Await(t.Context(), func(c hopbacktest.Counts) bool { return c.Ready == n }))
	}

	here := "messages?in=orders.dead"
	key := listKey(selection{Back: query("in", "orders.dead")}, 0)
	page := slow(here, key, ">o-49<")
	assert.Contains(t, page.text, "9,000")
	dry := b.post("dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay selected"}, "id": {"o-7"}})
	assert.Contains(t, dry.text, "in use for another page, which is restoring its order")
	assert.Contains(t, b.get("message?in=orders.dead&id=o-8").text, "in use for another page, which is restoring its order")
	again := b.get(here + "&again=1")
	assert.Contains(t, again.text, ">o-49<", "the page stays")
	after(here, key)
	assert.Contains(t, b.run(dry).text, "<b>1</b> of 9,000 messages would be replayed")
	assert.Contains(t, b.settled("message?in=orders.dead&id=o-8").text, "<h1>o-8</h1>")

	here = "message?in=orders.dead&id=o-9"
	key = showKey("orders.dead", "o-9")
	slow(here, key, "<h1>o-9</h1>")
	body := b.get("body?in=orders.dead&id=o-9")
	assert.Contains(t, body.text, `<pre class="body" id="c-body" tabindex="0">{}</pre>`)
	assert.Equal(t, "{}", b.get("download?in=orders.dead&id=o-9").text)
	after(here, key)
	assert.Equal(t, "o-0", first(0))
	assert.Equal(t, "o-8999", first(n-1))
}

// What was found is shown although the order couldn't be restored, and the page says so.
func TestAPageWhoseQueueMayBeOutOfOrder(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	s.orders(3)
	b := s.browser()
	require.Equal(t, http.StatusOK, b.settled("messages?in=orders.dead").status)
	s.handler.peeks.mu.Lock()
	k := s.handler.peeks.all[listKey(selection{Back: query("in", "orders.dead")}, 0)]
	require.NotNil(t, k)
	require.True(t, k.early)
	k.err = &client.Error{Op: "walk", Target: "orders.dead", Kind: client.ErrConnectionLost}
	s.handler.peeks.mu.Unlock()
	page := b.get("messages?in=orders.dead")
	assert.Equal(t, http.StatusOK, page.status)
	assert.Contains(t, page.text, ">o-1<")
	assert.Contains(t, page.text, "The queue may be out of order: ")
	assert.NotContains(t, page.text, "read to its end")
}
