package web

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/operate/desk"
)

// Config.Queues bounds what the page reads and changes.
func TestQueuesThatAreNotListedAreOutOfReach(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir(), Queues: []string{"emails.dead", "emails"}})
	s.orders(4)
	s.declare("emails")
	b := s.browser()
	token := b.token()
	for _, path := range []string{"messages", "message", "body", "download", "edit"} {
		a := b.get(path + "?in=orders.dead&id=o-1")
		assert.Equal(t, http.StatusNotFound, a.status, path)
		assert.NotContains(t, a.text, "o-1", path)
	}
	for path, form := range map[string]url.Values{
		"dry-run":       {"in": {"orders.dead"}, "do": {"replay all"}},
		"replay-edited": {"in": {"orders.dead"}, "id": {"o-1"}, "set": {"a=b"}},
		"accept":        {"page": {"messages"}, "query": {"in=orders.dead"}, "accept": {"x"}},
	} {
		form["token"] = []string{token}
		assert.Equal(t, http.StatusNotFound, b.do(http.MethodPost, path, form).status, path)
		// The address doesn't name another queue than the form.
		assert.Equal(t, http.StatusNotFound, b.do(http.MethodPost, path+"?in=emails.dead&query=in%3Demails.dead", form).status, path)
	}
	assert.Equal(t, http.StatusOK, b.settled("messages?in=emails.dead").status)
	dry := b.run(b.post("dry-run", url.Values{"in": {"emails.dead"}, "do": {"replay all"}, "token": {token}}))
	_, id, _ := strings.Cut(dry.at.RawQuery, "id=")
	to := url.Values{"run": {id}, "to": {"other"}, "other": {"orders"}, "token": {token}}
	assert.Equal(t, http.StatusNotFound, b.do(http.MethodPost, "replay", to).status, "a destination is a queue, too")
	assert.Equal(t, 4, s.broker.Queue("orders.dead").Counts().Ready)
}

// The authorizer learns which queue a request is about, and where a replay goes. What it
// hides of one queue no page shows.
func TestTheAuthorizerLearnsTheQueue(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []Access
	deny := func(Access) bool { return false }
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir(), Authorize: func(_ *http.Request, a Access) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, a)
		if deny(a) {
			return "", errors.New("not this one")
		}
		return "ada", nil
	}})
	s.orders(4)
	b := s.browser()
	token := b.token()
	forms := s.forms(b)
	denying := func(f func(Access) bool) {
		mu.Lock()
		defer mu.Unlock()
		asked, deny = nil, f
	}
	first := func() Access {
		mu.Lock()
		defer mu.Unlock()
		return asked[0]
	}
	all := func(Access) bool { return true }
	for path, route := range s.handler.paths {
		denying(all)
		form, ok := forms[path]
		if ok {
			form.Set("token", token)
			b.do(route.method, path, form)
		} else {
			b.get(path + "?in=orders.dead&id=" + forms["stop"].Get("run"))
		}
		want := Access{Action: route.action, Queue: "orders.dead"}
		switch path {
		case "", "runs", "partitions", "workers", "survey", "stop-survey", "pause-group":
			want.Queue = ""
		}
		assert.Equal(t, want, first(), path)
	}
	for _, c := range []struct {
		form url.Values
		want Access
	}{
		{url.Values{"to": {"exchange"}}, Access{ToExchange: true}},
		{url.Values{"to": {"other"}, "other": {"payments"}}, Access{Target: "payments"}},
		{url.Values{"to": {"queue"}, "other": {"payments"}}, Access{}},
	} {
		denying(all)
		c.form["run"], c.form["token"] = forms["replay"]["run"], []string{token}
		assert.Equal(t, http.StatusForbidden, b.do(http.MethodPost, "replay", c.form).status)
		c.want.Action, c.want.Queue = ActionReplay, "orders.dead"
		assert.Equal(t, c.want, first())
	}
	// Another person's page says nothing about a queue that they may not view.
	denying(func(a Access) bool { return a.Queue == "orders.dead" })
	for _, path := range []string{"./", "runs"} {
		a := b.get(path)
		assert.Equal(t, http.StatusOK, a.status)
		assert.NotContains(t, a.text, "orders.dead", path)
	}
	assert.Equal(t, http.StatusForbidden, b.get("run?id="+forms["stop"].Get("run")).status)
}

// A run whose caveats were accepted can't be resumed by somebody who may not accept them.
func TestResumingNeedsTheRightToAccept(t *testing.T) {
	t.Parallel()
	var strict atomic.Bool
	s := newStage(t, Config{Writable: true, Authorize: func(_ *http.Request, a Access) (string, error) {
		if strict.Load() && a.Action == ActionAccept && a.Queue == "orders.dead" {
			return "", errors.New("not you")
		}
		return "ada", nil
	}})
	s.orders(4)
	b := s.browser()
	token := b.token()
	old := &run{verb: verbReplay, sel: selection{Queue: "orders.dead", All: true, Accept: []desk.WarningCode{desk.WarningLimit}}}
	old.replay.Address = address.Queue("nowhere")
	require.Nil(t, s.handler.begin(old))
	require.Eventually(t, old.over, testPatience, tick)
	strict.Store(true)
	form := url.Values{"resume": {old.id}, "token": {token}}
	assert.Equal(t, http.StatusForbidden, b.do(http.MethodPost, "replay", form).status)
	strict.Store(false)
	assert.Equal(t, http.StatusOK, b.do(http.MethodPost, "replay", form).status, "it runs")
}
