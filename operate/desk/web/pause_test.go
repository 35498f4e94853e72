package web

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/middleware/pause"
)

// A queue is paused, shown, and resumed. The log says who did it, and the page escapes what others wrote.
func TestAQueueIsPausedOnThePage(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }})
	s.declare("orders")
	b := s.browser()
	assert.Contains(t, b.get("pause").text, "Pause a queue")
	in := url.Values{"in": {"orders"}}
	page := b.get("pause?" + in.Encode())
	assert.Contains(t, page.text, "The queue isn't paused.")
	assert.NotContains(t, page.text, "Resume</button>")
	page = b.post("pause-queue", url.Values{"in": {"orders"}, "do": {"pause"}, "why": {"<b>the bank</b> is down"}, "minutes": {"60"}})
	assert.Equal(t, http.StatusOK, page.status)
	assert.Contains(t, page.text, "The queue is paused.")
	assert.Contains(t, page.text, "&lt;b&gt;the bank&lt;/b&gt; is down")
	assert.Contains(t, page.text, "by <strong>ada</strong>")
	assert.Contains(t, page.text, ", until ")
	overview := s.recounted(b)
	assert.Contains(t, overview, `<strong>Paused:</strong> <a href="pause?in=orders">orders</a>`)
	assert.Contains(t, overview, ", by ada: &lt;b&gt;the bank&lt;/b&gt; is down</p>")
	state, is, err := pause.Of(t.Context(), s.conn, "orders")
	require.NoError(t, err)
	assert.True(t, is)
	assert.Equal(t, "ada", state.By)
	assert.Equal(t, http.StatusOK, b.post("pause-queue", url.Values{"in": {"orders"}, "do": {"pause"}, "why": {"not UTF-8: \xff"}}).status)
	page = b.post("pause-queue", url.Values{"in": {"orders"}, "do": {"resume"}})
	assert.Contains(t, page.text, "The queue is resumed.")
	_, is, err = pause.Of(t.Context(), s.conn, "orders")
	require.NoError(t, err)
	assert.False(t, is)
	for _, bad := range []struct {
		status int
		form   url.Values
	}{
		{http.StatusUnprocessableEntity, url.Values{"in": {"orders"}, "do": {"pause"}, "minutes": {"soon"}}},
		{http.StatusUnprocessableEntity, url.Values{"in": {"orders"}, "do": {"pause"}, "why": {strings.Repeat("w", 201)}}},
		{http.StatusBadRequest, url.Values{"in": {"orders"}}},
		{http.StatusNotFound, url.Values{"in": {"none"}, "do": {"pause"}}},
		{http.StatusNotFound, url.Values{"do": {"resume"}}},
	} {
		assert.Equal(t, bad.status, b.post("pause-queue", bad.form).status, "%v", bad.form)
	}
	assert.Equal(t, http.StatusNotFound, b.get("pause?in=none").status)
	assert.Contains(t, s.log.String(), "a pause was changed")
	assert.Contains(t, s.log.String(), "do=resume")
}

// recounted returns the overview with new counts. Those of a moment ago are shown otherwise.
func (s *stage) recounted(b *browser) string {
	s.handler.counts.mu.Lock()
	s.handler.counts.at = time.Time{}
	s.handler.counts.mu.Unlock()
	return b.get("").text
}

// Without Writable, and without the permission, nothing is paused.
func TestAReadOnlyPagePausesNothing(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }})
	s.declare("orders")
	b := s.browser()
	assert.Contains(t, b.get("pause?in=orders").text, "read-only")
	assert.Equal(t, http.StatusForbidden, b.post("pause-queue", url.Values{"in": {"orders"}, "do": {"pause"}}).status)
	_, is, err := pause.Of(t.Context(), s.conn, "orders")
	require.NoError(t, err)
	assert.False(t, is)
}
