package web

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/operate/desk"
)

// forms are forms that are carried out if nothing refuses them, by path.
func (s *stage) forms(b *browser) map[string]url.Values {
	s.t.Helper()
	list, err := s.desk.List(s.t.Context(), desk.ListConfig{Queue: "orders.dead"})
	require.NoError(s.t, err)
	id := list.Messages[0].ID
	plans := map[string]string{}
	for _, verb := range []verb{verbReplay, verbDiscard} {
		r := &run{verb: verb, dry: true, sel: selection{Queue: "orders.dead", All: true}}
		require.Nil(s.t, s.handler.begin(r))
		require.Eventually(s.t, r.over, testPatience, tick)
		plans[string(verb)] = r.id
	}
	return map[string]url.Values{
		"survey":        {},
		"stop-survey":   {},
		"accept":        {"page": {"messages"}, "query": {"in=orders.dead"}, "accept": {"x"}},
		"dry-run":       {"in": {"orders.dead"}, "do": {"replay all"}},
		"replay":        {"run": {plans["replay"]}},
		"discard":       {"run": {plans["discard"]}, "sure": {"1"}},
		"replay-edited": {"in": {"orders.dead"}, "id": {id}, "set": {"a=b"}},
		"stop":          {"run": {plans["replay"]}},
		"waiting":       {"in": {"orders.dead"}, "key": {"4711"}, "do": {"cancel"}},
		"pause-queue":   {"in": {"orders.dead"}, "do": {"resume"}},
		"recurring-do":  {"in": {"orders.dead"}, "do": {"resume"}},
		"pause-group":   {"group": {"orders"}, "do": {"resume"}},
	}
}

const tick = 5e6 // nanoseconds

// Every action is refused without the token or with another one, from another origin, by
// another browser or person, with GET, and when the page is read-only. Nothing happens
// then.
func TestEachActionIsRefused(t *testing.T) {
	t.Parallel()
	who := &sync.Map{}
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir(), Authorize: func(r *http.Request, _ Access) (string, error) {
		if w, ok := who.Load("who"); ok {
			return w.(string), nil
		}
		return "ada", nil
	}})
	s.orders(4)
	b := s.browser()
	token := b.token()
	forms := s.forms(b)
	paths := 0
	for path, route := range s.handler.paths {
		if route.method != http.MethodPost {
			no := b.do(http.MethodPost, path+"?in=orders.dead", url.Values{"token": {token}})
			assert.Equal(t, http.StatusMethodNotAllowed, no.status, path)
			continue
		}
		paths++
		form, ok := forms[path]
		require.True(t, ok, "%s has a form here", path)
		for name, change := range map[string]func(b *browser, f url.Values){
			"no token":      func(_ *browser, f url.Values) { f.Del("token") },
			"empty token":   func(_ *browser, f url.Values) { f.Set("token", "") },
			"another token": func(_ *browser, f url.Values) { f.Set("token", strings.Repeat("A", 43)) },
			"another browser": func(b *browser, _ url.Values) {
				other := s.browser()
				other.get("./")
				b.client = other.client
			},
			"no cookie":  func(b *browser, _ url.Values) { b.client = s.browser().client },
			"cross-site": func(b *browser, _ url.Values) { b.header["Sec-Fetch-Site"] = []string{"cross-site"} },
			"same-site":  func(b *browser, _ url.Values) { b.header["Sec-Fetch-Site"] = []string{"same-site"} },
			"old browser": func(b *browser, _ url.Values) {
				b.header["Sec-Fetch-Site"] = nil
				b.header["Origin"] = []string{"http://evil.example"}
			},
			"null origin": func(b *browser, _ url.Values) {
				b.header["Sec-Fetch-Site"] = nil
				b.header["Origin"] = []string{"null"}
			},
			"another kind":  func(b *browser, _ url.Values) { b.header["Content-Type"] = []string{"text/plain"} },
			"by its query":  func(_ *browser, f url.Values) { f.Del("token") },
			"a large form":  func(_ *browser, f url.Values) { f.Set("x", strings.Repeat("x", maxForm)) },
			"another who":   func(*browser, url.Values) { who.Store("who", "eve") },
			"a GET":         nil,
			"an odd method": nil,
		} {
			used := &browser{s: s, client: b.client, header: http.Header{}}
			f := url.Values{"token": {token}}
			for k, v := range form {
				f[k] = v
			}
			at, method, want := path, http.MethodPost, []int{http.StatusForbidden}
			switch name {
			case "a GET":
				at, method, want = path+"?"+f.Encode(), http.MethodGet, []int{http.StatusMethodNotAllowed}
			case "an odd method":
				method, want = http.MethodPut, []int{http.StatusMethodNotAllowed}
			case "another kind":
				want = []int{http.StatusUnsupportedMediaType}
			case "a large form":
				want = []int{http.StatusBadRequest}
			case "by its query":
				at = path + "?token=" + token
			}
			if change != nil {
				change(used, f)
			}
			a := used.do(method, at, f)
			who.Delete("who")
			assert.Contains(t, want, a.status, "%s, %s", path, name)
			assert.Equal(t, policy, a.header.Get("Content-Security-Policy"))
		}
	}
	assert.Len(t, forms, paths)
	assert.Equal(t, 4, s.broker.Queue("orders.dead").Counts().Ready)
	assert.Len(t, s.handler.runs.list(), 2, "those of the test itself")
	assert.NotContains(t, s.log.String(), "started")

	// And with all of it in order each is done.
	for _, path := range []string{"survey", "stop-survey", "accept", "dry-run", "stop"} {
		f := url.Values{"token": {token}}
		for k, v := range forms[path] {
			f[k] = v
		}
		assert.Equal(t, http.StatusOK, b.do(http.MethodPost, path, f).status, path)
	}
}

// Read-only means that nothing is changed by anybody, and that no page offers it.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	s.orders(4)
	b := s.browser()
	for path, form := range s.forms(b) {
		a := b.post(path, form)
		if s.handler.paths[path].action == ActionView {
			assert.Equal(t, http.StatusOK, a.status, path)
			continue
		}
		assert.Equal(t, http.StatusForbidden, a.status, path)
		assert.Contains(t, a.text, "This page can&#39;t change anything", path)
	}
	assert.Equal(t, http.StatusForbidden, b.get("edit?in=orders.dead&id=o-1").status)
	overview := b.settled("./")
	list := b.settled("messages?in=orders.dead")
	message := b.settled(list.link(t, "message?"))
	for _, a := range []answer{overview, list, message} {
		assert.Contains(t, a.text, "read-only")
		for _, l := range a.links() {
			path, _, _ := strings.Cut(l, "?")
			if to, ok := s.handler.paths[strings.TrimPrefix(path, "./")]; ok {
				assert.False(t, to.action.changes(), "%s on %s", l, a.at)
			}
		}
	}
	assert.Equal(t, http.StatusOK, b.settled(message.link(t, "body?")).status, "bodies may be read")
	assert.Equal(t, 4, s.broker.Queue("orders.dead").Counts().Ready)
}

// The authorizer is asked about every action, before anything is done. What it says is
// kept in the log.
func TestTheAuthorizerIsAsked(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []Action
	var no Action
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir(), Authorize: func(r *http.Request, x Access) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		a := x.Action
		asked = append(asked, a)
		if a == no {
			return "", errors.New("eve is on leave")
		}
		return "eve\n\xff" + strings.Repeat("é", 100), nil
	}})
	s.orders(4)
	b := s.browser()
	forms := s.forms(b)
	token := b.token()
	deny := func(a Action) {
		mu.Lock()
		defer mu.Unlock()
		no, asked = a, nil
	}
	for path, route := range s.handler.paths {
		deny(route.action)
		a := answer{}
		if form, ok := forms[path]; ok {
			f := url.Values{"token": {token}}
			for k, v := range form {
				f[k] = v
			}
			a = b.do(route.method, path, f)
		} else {
			a = b.get(path + "?in=orders.dead&id=o-1")
		}
		assert.Equal(t, http.StatusForbidden, a.status, path)
		assert.NotContains(t, a.text, "on leave", "that is for the log")
		mu.Lock()
		assert.Equal(t, []Action{route.action}, asked, path)
		mu.Unlock()
	}
	assert.Contains(t, s.log.String(), "eve is on leave")
	// Accepting the side effects of a scan is a separate permission for every form.
	deny(ActionAccept)
	f := url.Values{"token": {token}, "in": {"orders.dead"}, "do": {"replay all"}, "accept": {"delivery-limit"}}
	assert.Equal(t, http.StatusForbidden, b.do(http.MethodPost, "dry-run", f).status)
	deny("")
	done := b.run(b.post("replay", url.Values{"run": forms["replay"]["run"], "max": {"1"}, "token": {token}}))
	assert.Equal(t, http.StatusOK, done.status)
	assert.Contains(t, done.text, "eve\n?é")
	m := s.take("orders", 1)[0]
	by, _ := m.Annotations[annotation.ReplayedBy].(string)
	assert.True(t, strings.HasPrefix(by, "eve\n?éé"))
	assert.LessOrEqual(t, len(by), 100)
	for line := range strings.Lines(s.log.String()) {
		assert.Regexp(t, "^time=", line, "a name makes no line of the log")
	}
}

// Without an authorizer only this machine is answered, by its own name, even with the login.
func TestWithoutAnAuthorizerOnlyThisMachineIsAnswered(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{User: "ada"})
	for _, c := range []struct {
		remote, host string
		header       string
		ok           bool
	}{
		{"127.0.0.1:4711", "127.0.0.1:8484", "", true},
		{"127.0.0.9:4711", "localhost:8484", "", true},
		{"[::1]:4711", "[::1]:8484", "", true},
		{"[::1]:4711", "[::1]", "", true},
		{"[::ffff:127.0.0.1]:4711", "LocalHost", "", true},
		{"10.0.0.1:4711", "127.0.0.1:8484", "", false},
		{"192.168.0.1:4711", "localhost", "", false},
		{"", "localhost", "", false},
		{"@", "localhost", "", false},
		{"127.0.0.1:4711", "", "", false},
		{"127.0.0.1:4711", "evil.example", "", false},
		{"127.0.0.1:4711", "evil.example:8484", "", false},
		{"127.0.0.1:4711", "localhost.evil.example", "", false},
		{"127.0.0.1:4711", "127.0.0.1.evil.example:80", "", false},
		{"127.0.0.1:4711", "10.0.0.1:8484", "", false},
		{"127.0.0.1:4711", "0.0.0.0:8484", "", false},
		{"127.0.0.1:4711", "localhost.:8484", "", false},
		{"127.0.0.1:4711", "[::1%25lo]:8484", "", false},
		{"127.0.0.1:4711", "localhost", "X-Forwarded-For", false},
		{"127.0.0.1:4711", "localhost", "Forwarded", false},
		{"127.0.0.1:4711", "localhost", "Via", false},
		{"127.0.0.1:4711", "localhost", "X-Real-IP", false},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.RemoteAddr, r.Host = c.remote, c.host
		if c.header != "" {
			r.Header.Set(c.header, "10.0.0.1")
		}
		r.AddCookie(&http.Cookie{Name: loginCookie(r), Value: s.handler.login.session})
		who, err := s.handler.cfg.Authorize(r, Access{Action: ActionView})
		assert.Equal(t, c.ok, err == nil, "%+v: %v", c, err)
		assert.Equal(t, c.ok, who == "ada", who)
		w := httptest.NewRecorder()
		r.URL.Path, r.URL.RawQuery = "/"+loginPath, loginField+"="+s.handler.login.secret
		s.handler.ServeHTTP(w, r)
		assert.Equal(t, c.ok, w.Code == http.StatusSeeOther, "the link, for %+v", c)
		assert.Equal(t, c.ok, len(w.Result().Cookies()) == 1, "the link, for %+v", c)
	}

	for path := range s.handler.paths {
		r := httptest.NewRequestWithContext(t.Context(), s.handler.paths[path].method, "/"+path, nil)
		r.Host, r.RemoteAddr = "evil.example", "127.0.0.1:1"
		w := httptest.NewRecorder()
		s.handler.ServeHTTP(w, r)
		assert.Equal(t, http.StatusForbidden, w.Code, path)
		assert.Empty(t, w.Result().Cookies(), path)
	}
}

// The login is the secret of the link, which gives a browser a cookie. Every path but those of
// the style sheet and the script needs it. With an authorizer there is none.
func TestOnlyTheLinkLetsABrowserIn(t *testing.T) {
	t.Parallel()
	s := stageUnder(t, Config{Writable: true, DiscardDir: t.TempDir(), Title: "the secret shop"}, "/ops/dead/")
	s.orders(2)
	forms := s.forms(s.browser())
	b := s.stranger()
	for path, route := range s.handler.paths {
		a := b.get(path + "?in=orders.dead&id=o-1")
		if form, ok := forms[path]; ok {
			a = b.do(route.method, path, form)
		}
		assert.Equal(t, http.StatusForbidden, a.status, path)
		assert.Empty(t, a.header.Get("Set-Cookie"), path)
		assert.False(t, strings.Contains(a.text, "secret shop"), path)
	}
	login := s.handler.login
	for _, query := range []string{"", "?secret=", "?secret=" + strings.Repeat("A", 43), "?secret=" + login.secret[:42], "?secret=" + login.session, "?token=" + login.secret} {
		a := b.get("login" + query)
		assert.Equal(t, http.StatusForbidden, a.status, query)
		assert.Empty(t, a.header.Get("Set-Cookie"), query)
	}
	assert.Equal(t, http.StatusNotFound, b.do(http.MethodPost, "login", url.Values{"secret": {login.secret}}).status, "a form of another page is no login")
	link := s.handler.LoginURL(s.server.URL + s.prefix)
	require.Equal(t, s.server.URL+"/ops/dead/login?secret="+login.secret, link)
	b.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	a := b.get(link)
	assert.Equal(t, http.StatusSeeOther, a.status)
	assert.Equal(t, "./", a.header.Get("Location"), "the prefix stays, and the secret goes")
	for name, want := range map[string]string{"Referrer-Policy": "no-referrer", "Cache-Control": "no-store"} {
		assert.Equal(t, want, a.header.Get(name))
	}
	cookie := a.header.Get("Set-Cookie")
	for _, want := range []string{"HttpOnly", "SameSite=Lax", "hopback_desk_login_"} {
		assert.Contains(t, cookie, want)
	}
	assert.NotContains(t, cookie, login.secret, "the cookie doesn't open other browsers")
	b.client.CheckRedirect = nil
	assert.Equal(t, http.StatusOK, b.settled("messages?in=orders.dead").status)
	log := s.log.String()
	assert.NotContains(t, log, login.secret)
	assert.NotContains(t, log, login.session)
	assert.Contains(t, log, "hasn't opened the login link")

	// Another desk on the same host has another port, so another cookie, and another secret.
	other := newStage(t, Config{})
	assert.NotEqual(t, login.secret, other.handler.login.secret)
	both := other.browser()
	both.client.Jar = b.client.Jar
	require.Equal(t, http.StatusOK, both.get(other.handler.LoginURL(other.server.URL+"/")).status)
	assert.Equal(t, http.StatusOK, b.get("./").status)
	assert.Equal(t, http.StatusOK, both.get("./").status)

	open := newStage(t, Config{Authorize: func(*http.Request, Access) (string, error) { return "ada", nil }})
	assert.Equal(t, "https://ops.example/", open.handler.LoginURL("https://ops.example/"))
	assert.Equal(t, http.StatusNotFound, open.browser().get("login?secret="+login.secret).status)
	assert.Equal(t, http.StatusOK, open.browser().get("./").status)
}

// Another site may link to the page, and may not load it for itself.
func TestAnotherSiteMayOnlyLink(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{})
	b := s.browser()
	b.header["Sec-Fetch-Site"] = []string{"cross-site"}
	assert.Equal(t, http.StatusOK, b.get("./").status)
	b.header["Sec-Fetch-Mode"] = []string{"no-cors"}
	assert.Equal(t, http.StatusForbidden, b.get("./").status)
	b.header["Sec-Fetch-Mode"] = []string{"cors"}
	b.header["Sec-Fetch-Site"] = []string{"same-site"}
	assert.Equal(t, http.StatusForbidden, b.get("runs").status)
}

// Every answer has the headers.
func TestHeaders(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true})
	s.orders(1)
	b := s.browser()
	for _, path := range []string{"./", "messages", "messages?in=orders.dead", "messages?in=nowhere", "message?in=orders.dead&id=o-0", "body?in=orders.dead&id=o-0", "download?in=orders.dead&id=o-0", "run?id=x", "no/such/page", "../", "style.css", "script.js", "stop"} {
		a := b.settled(path)
		for name, want := range map[string]string{
			"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
			"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
		} {
			assert.Equal(t, want, a.header.Get(name), path)
		}
		if path != "style.css" && path != "script.js" {
			assert.Equal(t, "no-store", a.header.Get("Cache-Control"), path)
		}
		assert.NotContains(t, a.text, "<script>", path)
		assert.NotContains(t, a.text, " style=", path)
		assert.NotContains(t, a.text, " onclick", path)
	}
	download := b.get("download?in=orders.dead&id=o-0")
	assert.Equal(t, "application/octet-stream", download.header.Get("Content-Type"))
	assert.True(t, strings.HasPrefix(download.header.Get("Content-Disposition"), "attachment;"))
	cookie := s.browser().get("./").header.Get("Set-Cookie")
	for _, word := range []string{"HttpOnly", "SameSite=Strict"} {
		assert.Contains(t, cookie, word)
	}
	for _, source := range strings.Split(policy, ";") {
		fields := strings.Fields(source)
		assert.Len(t, fields, 2)
		assert.Contains(t, []string{"'none'", "'self'"}, fields[1])
	}
	assert.True(t, slices.Contains(strings.Split(policy, "; "), "default-src 'none'"))
}

// Addresses and forms that make no sense are refused. None of them is an error of the page.
func TestNonsense(t *testing.T) {
	t.Parallel()
	s := newStage(t, Config{Writable: true, DiscardDir: t.TempDir()})
	s.orders(2)
	b := s.browser()
	long := strings.Repeat("x", 2000)
	for path, status := range map[string]int{
		"messages": 400, "messages?in=" + long: 400, "messages?in=orders.dead&skip=x": 400, "messages?in=orders.dead&skip=-1": 400, "messages?in=orders.dead&skip=99999999999999999999": 400,
		"messages?in=orders.dead&property=x": 400, "messages?in=orders.dead&skip=1000": 200, "messages?in=nowhere": 404, "message?in=orders.dead": 400,
		"message?in=orders.dead&id=" + long: 400, "message?in=orders.dead&id=none": 404, "message?in=nowhere&id=x": 404, "download?in=orders.dead&id=none": 404,
		"edit?in=orders.dead&id=none": 404, "run": 404, "run?id=none": 404, "%2e%2e/": 404, "%00": 404, "messages?in=%ff%00&text=%ff": 400, "messages?in=orders.dead&group=%00": 400, "messages?in=orders.dead&group=0123456789ab": 200,
	} {
		assert.Equal(t, status, b.settled(path).status, "%.100s", path)
	}
	for _, c := range []struct {
		path   string
		form   url.Values
		status int
	}{
		{"dry-run", url.Values{}, 400},
		{"dry-run", url.Values{"in": {"orders.dead"}}, 400},
		{"dry-run", url.Values{"in": {"orders.dead"}, "do": {"destroy all"}}, 400},
		{"dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay selected"}, "id": make([]string, 1001)}, 400},
		{"dry-run", url.Values{"in": {"orders.dead"}, "do": {"replay all"}, "accept": make([]string, 21)}, 400},
		{"replay", url.Values{}, 404},
		{"replay", url.Values{"run": {"none"}}, 404},
		{"replay", url.Values{"resume": {"none"}}, 404},
		{"discard", url.Values{"run": {"none"}}, 404},
		{"replay-edited", url.Values{}, 400},
		{"replay-edited", url.Values{"in": {"orders.dead"}, "id": {"x"}, "set": {strings.Repeat("a=b\n", 10) + "c"}}, 400},
		{"stop", url.Values{"run": {"none"}}, 404},
		{"accept", url.Values{}, 400},
	} {
		assert.Equal(t, c.status, b.post(c.path, c.form).status, "%s %.100v", c.path, fmt.Sprint(c.form))
	}
	gone := b.run(b.post("dry-run", url.Values{"in": {"nowhere"}, "do": {"replay all"}}))
	assert.Contains(t, gone.text, "failed")
	assert.Equal(t, 2, s.broker.Queue("orders.dead").Counts().Ready)
	assert.NotContains(t, s.log.String(), "level=ERROR")
}
