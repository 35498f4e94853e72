package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/schedule"
)

const tokenQueue = "schedule_recurring_billing"

// recurring starts a worker that publishes recurring messages to the queue orders.
func (s *stage) recurring(all ...schedule.Recurring) (stop func()) {
	s.t.Helper()
	topology, err := schedule.GroupTopology(schedule.Names{}, "billing")
	require.NoError(s.t, err)
	topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "orders", DeadLetter: declare.Drop()})
	_, err = declare.Apply(s.t.Context(), s.conn.Management(), topology)
	require.NoError(s.t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	done := make(chan error, 1)
	g := schedule.Group{Conn: s.conn, Name: "billing"}
	go func() { done <- g.Run(ctx, schedule.RunConfig{Recurring: all, Worker: "<b>w1</b>"}) }()
	require.Eventually(s.t, func() bool { _, err := g.List(s.t.Context(), schedule.ListConfig{}); return err == nil }, testPatience, tick)
	return func() { cancel(); assert.NoError(s.t, <-done) }
}

func hourly(name string) schedule.Recurring {
	return schedule.Recurring{Name: name, Times: schedule.Every(time.Hour), To: address.Queue("orders")}
}

func (s *stage) recurringState(name string) (found schedule.RecurringState, g schedule.GroupState) {
	s.t.Helper()
	g, err := schedule.Group{Conn: s.conn, Name: "billing"}.List(s.t.Context(), schedule.ListConfig{})
	require.NoError(s.t, err)
	for _, r := range g.Recurring {
		if r.Name == name {
			found = r
		}
	}
	return found, g
}

// The page shows groups and their messages, and pauses, resumes, runs, and removes them. The log says who did it, and what
// others wrote is text.
func TestRecurringMessagesOnThePage(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }})
	defer s.recurring(hourly("report"), hourly("<b>bold</b>&name=x"))()
	b := s.browser()
	page := b.get("recurring?group=billing")
	assert.Equal(t, http.StatusOK, page.status)
	next := time.Now().UTC().Truncate(time.Hour).Add(time.Hour).Format("15:04")
	for _, text := range []string{"report", "every 1h0m0s", "&lt;b&gt;bold&lt;/b&gt;", next, "2 messages, 0 paused", "to /queues/orders"} {
		assert.Contains(t, page.text, text)
	}
	assert.NotContains(t, page.text, "<b>")
	assert.NotContains(t, b.get("recurring?in="+tokenQueue+"&find=REP").text, "bold")
	assert.Contains(t, b.get("recurring?in="+tokenQueue+"&find=zzz").text, "No message matches")

	do := func(name, what string, more url.Values) answer {
		form := url.Values{"in": {tokenQueue}, "name": {name}, "do": {what}}
		for k, v := range more {
			form[k] = v
		}
		return b.post("recurring-do", form)
	}
	page = do("report", "pause", url.Values{"why": {"<i>the printer</i> is broken"}, "minutes": {"60"}})
	assert.Equal(t, http.StatusOK, page.status)
	for _, text := range []string{"The message is paused", "&lt;i&gt;the printer&lt;/i&gt; is broken", "by <strong>ada</strong>", ", until ", "Change the pause", "Resume</button>"} {
		assert.Contains(t, page.text, text)
	}
	r, _ := s.recurringState("report")
	require.NotNil(t, r.Paused)
	assert.Equal(t, "ada", r.Paused.By)
	page = b.get("recurring?in=" + tokenQueue)
	assert.Contains(t, page.text, " by ada, until ")
	assert.Contains(t, page.text, "2 messages, 1 paused")
	assert.Contains(t, do("report", "resume", nil).text, "The message isn't paused.")

	assert.Equal(t, http.StatusUnprocessableEntity, do("report", "run", nil).status, "not confirmed")
	assert.Equal(t, http.StatusUnprocessableEntity, do("report", "remove", nil).status)
	sure := url.Values{"sure": {"1"}}
	page = do("report", "run", sure)
	assert.Equal(t, http.StatusOK, page.status)
	assert.Contains(t, page.text, "with the message-id report@")
	require.Eventually(t, func() bool {
		info, err := declare.Inspect(t.Context(), s.conn.Management(), "orders")
		return err == nil && info.Messages == 1
	}, testPatience, tick)
	assert.Contains(t, do("report", "remove", sure).text, "The message is removed")
	r, _ = s.recurringState("report")
	assert.True(t, r.Removed)
	assert.Contains(t, b.get("recurring?in="+tokenQueue).text, `<span class="tag">removed</span>`)
	assert.Contains(t, do("report", "resume", nil).text, "The message is resumed")

	assert.Contains(t, do("", "pause", nil).text, "The group is paused")
	_, g := s.recurringState("report")
	assert.NotNil(t, g.Paused)
	assert.Contains(t, b.get("recurring?in="+tokenQueue+"&name=report").text, "The group is paused, too.")
	assert.Contains(t, do("", "resume", nil).text, "The group is resumed")

	for _, bad := range []struct {
		status     int
		name, do   string
		why, token string
	}{
		{http.StatusNotFound, "none", "pause", "", tokenQueue},
		{http.StatusNotFound, "report", "pause", "", "orders"},
		{http.StatusNotFound, "report", "pause", "", "schedule_recurring_none"},
		{http.StatusNotFound, "report", "pause", "", "schedule_recurring_"},
		{http.StatusBadRequest, "report", "", "", tokenQueue},
		{http.StatusBadRequest, "", "remove", "", tokenQueue},
		{http.StatusUnprocessableEntity, "report", "pause", strings.Repeat("w", 201), tokenQueue},
	} {
		assert.Equal(t, bad.status, do(bad.name, bad.do, url.Values{"in": {bad.token}, "why": {bad.why}, "sure": {"1"}}).status, "%v", bad)
	}
	for _, path := range []string{"recurring?group=none", "recurring?in=orders", "recurring?in=" + tokenQueue + "&name=none", "recurring?group=%00", "recurring?in=" + strings.Repeat("x", 3000)} {
		assert.Equal(t, http.StatusNotFound, b.get(path).status, path)
	}
	log := s.log.String()
	for _, text := range []string{"recurring messages were changed", "do=remove", "name=report", "who=ada"} {
		assert.Contains(t, log, text)
	}
}

// A visitor sees and changes the groups that the authorizer allows.
func TestRecurringMessagesThatAVisitorMayNotSee(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, Authorize: func(r *http.Request, a Access) (string, error) {
		if a.Queue == tokenQueue && (r.Header.Get("X-Blind") != "" || a.Action == ActionRecurring) {
			return "", errors.New("not yours")
		}
		return "ada", nil
	}})
	defer s.recurring(hourly("report"))()
	b := s.browser()
	assert.Equal(t, http.StatusOK, b.get("recurring?group=billing").status)
	assert.Equal(t, http.StatusForbidden, b.post("recurring-do", url.Values{"in": {tokenQueue}, "do": {"pause"}}).status)
	assert.Equal(t, http.StatusForbidden, b.post("recurring-do", url.Values{"group": {"billing"}, "in": {"orders"}, "do": {"pause"}}).status)
	_, g := s.recurringState("")
	assert.Nil(t, g.Paused)
	b.header = http.Header{"X-Blind": {"1"}}
	assert.Equal(t, http.StatusForbidden, b.get("recurring?group=billing").status)
	assert.NotContains(t, b.get("recurring").text, "billing")
}

// A group of many messages costs a page of bounded size, and times of hostile descriptions aren't read.
func TestManyRecurringMessagesAreBounded(t *testing.T) {
	t.Parallel()
	read := 0
	s := newStage(t, Config{Times: func(spec string) schedule.Times {
		read++
		assert.LessOrEqual(t, len(spec), maxSpec)
		return nil
	}})
	all := make([]schedule.Recurring, 3000)
	for i := range all {
		all[i] = hourly(fmt.Sprintf("message-%04d", i))
		all[i].Spec = "0 * * * *"
		if i%2 == 1 {
			all[i].Spec = strings.Repeat("x", maxSpec+1)
		}
	}
	defer s.recurring(all...)()
	page := s.browser().get("recurring?group=billing")
	assert.Equal(t, http.StatusOK, page.status)
	assert.Contains(t, page.text, "The first 200 of 3,000 messages")
	assert.Contains(t, page.text, "message-0199")
	assert.NotContains(t, page.text, "message-0200")
	assert.Less(t, len(page.text), 300_000)
	assert.Equal(t, shownRecurring/2, read)
	assert.Contains(t, page.text, "read-only")
	assert.NotContains(t, page.text, "<button name")
	assert.Contains(t, s.browser().get("recurring?in="+tokenQueue+"&name=message-2999").text, "isn't paused")
}
