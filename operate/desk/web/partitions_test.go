package web

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
)

// group declares partitions, and starts a worker for them.
func (s *stage) group(g partition.Group, worker string) {
	s.t.Helper()
	topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("orders.dead")})
	require.NoError(s.t, err)
	_, err = declare.Apply(s.t.Context(), s.conn.Management(), topology)
	require.NoError(s.t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended, owned := make(chan error, 1), make(chan int, g.Partitions)
	go func() {
		h := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		ended <- partition.Consume(ctx, s.conn, g, h, partition.Config{Worker: worker, OnAssigned: func(i int, has bool) {
			if has {
				owned <- i
			}
		}})
	}()
	s.t.Cleanup(func() {
		stop()
		assert.NoError(s.t, <-ended)
	})
	for range g.Partitions {
		select {
		case <-owned:
		case err := <-ended:
			ended <- err
			require.NoError(s.t, err)
		}
	}
}

// The page names the owner of each partition, and shows hostile names as text.
func TestOwnersOfPartitions(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{}, "4.3.6")
	s.declare("orders")
	s.group(partition.Group{Name: "changes", Partitions: 3}, "<b>ada</b>")
	b := s.browser()
	assert.Contains(t, b.get("").text, `href="partitions"`)
	form := b.get("partitions")
	assert.Equal(t, http.StatusOK, form.status)
	assert.NotContains(t, form.text, "changes.1.000")
	page := b.get("partitions?group=changes")
	assert.Equal(t, http.StatusOK, page.status)
	for _, queue := range []string{"changes.1.000", "changes.1.001", "changes.1.002"} {
		assert.Contains(t, page.text, queue)
	}
	assert.Contains(t, page.text, "&lt;b&gt;ada&lt;/b&gt;")
	assert.NotContains(t, page.text, "<b>ada</b>")
	assert.NotContains(t, page.text, "without a worker")
}

// A group that isn't there, or whose queues the visitor may not see, looks the same.
func TestPartitionsThatAVisitorMayNotSee(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Authorize: func(_ *http.Request, a Access) (string, error) {
		if a.Queue == "changes.1.000" {
			return "", errors.New("not yours")
		}
		return "ada", nil
	}}, "4.3.6")
	s.declare("orders")
	s.group(partition.Group{Name: "changes", Partitions: 1}, "w1")
	b := s.browser()
	for _, name := range []string{"changes", "nothing", "orders", "%00", "a/b"} {
		page := b.get("partitions?group=" + name)
		assert.Equal(t, http.StatusNotFound, page.status, name)
		assert.Contains(t, page.text, "No such group")
		assert.NotContains(t, page.text, "w1")
	}
}

// A group is paused for all of its partitions, shown, and resumed.
func TestAGroupIsPausedOnThePage(t *testing.T) {
	t.Parallel()
	refused := &sync.Map{}
	s := newStage(t, Config{Writable: true, Authorize: func(_ *http.Request, a Access) (string, error) {
		if _, no := refused.Load(a.Queue); no && a.Action == ActionPause {
			return "", errors.New("not yours")
		}
		return "ada", nil
	}}, "4.3.6")
	s.group(partition.Group{Name: "changes", Partitions: 2}, "w1")
	b := s.browser()
	assert.Contains(t, b.get("partitions?group=changes").text, "The group isn't paused.")
	page := b.post("pause-group", url.Values{"group": {"changes"}, "do": {"pause"}, "why": {"<b>the bank</b> is down"}, "minutes": {"60"}})
	assert.Equal(t, http.StatusOK, page.status)
	for _, text := range []string{"The group is paused.", "&lt;b&gt;the bank&lt;/b&gt; is down", "by <strong>ada</strong>", ", until ", "changes.1.001", "Change the pause"} {
		assert.Contains(t, page.text, text)
	}
	assert.Equal(t, 1, strings.Count(s.recounted(b), `<strong>Paused:</strong> <a href="partitions?group=changes">changes</a>`), "once for both partitions")
	state, is, err := pause.OfGroup(t.Context(), s.conn, "changes")
	require.NoError(t, err)
	assert.True(t, is)
	assert.Equal(t, "ada", state.By)

	refused.Store("changes.1.001", true)
	for _, bad := range []struct {
		status int
		form   url.Values
	}{
		{http.StatusNotFound, url.Values{"group": {"changes"}, "do": {"resume"}}}, // one of its partitions isn't theirs
		{http.StatusNotFound, url.Values{"group": {"changes"}, "do": {"pause"}}},
		{http.StatusNotFound, url.Values{"group": {"none"}, "do": {"pause"}}},
		{http.StatusNotFound, url.Values{"do": {"resume"}}},
		{http.StatusBadRequest, url.Values{"group": {"changes"}}},
		{http.StatusUnprocessableEntity, url.Values{"group": {"changes"}, "do": {"pause"}, "minutes": {"-1"}}},
	} {
		assert.Equal(t, bad.status, b.post("pause-group", bad.form).status, "%v", bad.form)
	}
	state, _, err = pause.OfGroup(t.Context(), s.conn, "changes")
	require.NoError(t, err)
	assert.False(t, state.Until.IsZero(), "nothing has changed")
	refused.Clear()
	topology, err := partition.Group{Name: "changes", Partitions: 3, Generation: 2}.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("orders.dead")})
	require.NoError(t, err)
	_, err = declare.Apply(t.Context(), s.conn.Management(), topology)
	require.NoError(t, err)
	refused.Store("changes.2.002", true) // of the generation to which a Reshard leads: the pause is of both
	for _, do := range []string{"pause", "resume"} {
		assert.Equal(t, http.StatusNotFound, b.post("pause-group", url.Values{"group": {"changes"}, "do": {do}}).status)
	}
	now, is, err := pause.OfGroup(t.Context(), s.conn, "changes")
	require.NoError(t, err)
	assert.True(t, is)
	assert.Equal(t, state, now, "nothing has changed")
	refused.Clear()
	page = b.post("pause-queue", url.Values{"in": {"changes.1.000"}, "do": {"pause"}})
	assert.Equal(t, http.StatusUnprocessableEntity, page.status)
	assert.Contains(t, page.text, "Pause its group")

	page = b.post("pause-group", url.Values{"group": {"changes"}, "do": {"resume"}})
	assert.Contains(t, page.text, "The group is resumed.")
	assert.Contains(t, page.text, "The group isn't paused.")
	assert.Contains(t, s.log.String(), "group=changes do=pause")
}
