package web

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// policy is the content security policy of every answer. Nothing comes from elsewhere,
// nothing is inline, and no other page may hold this one in a frame.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// guard sets the headers that every answer has.
func guard(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("X-Frame-Options", "DENY")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	header.Set("Cache-Control", "no-store")
}

// Loopback is the default of Config.Authorize. It allows a request that comes from this
// machine, to a name of this machine, and not by a proxy. The name of who asks is
// "local". Others are refused: a name that isn't localhost may be a page elsewhere that has
// its own name resolve to this machine, and behind a proxy everybody seems to be here.
func Loopback(r *http.Request, _ Access) (who string, err error) {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().Unmap().IsLoopback() {
		return "", fmt.Errorf("the request comes from %.100q, and only this machine is allowed without an authorizer", r.RemoteAddr)
	}
	if !localName(r.Host) {
		return "", fmt.Errorf("the request is for the host %.100q, and only localhost is allowed without an authorizer", r.Host)
	}
	for _, name := range []string{"Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip"} {
		if r.Header.Get(name) != "" {
			return "", fmt.Errorf("the request came by a proxy, as its header %s says, and only this machine is allowed without an authorizer", name)
		}
	}
	return "local", nil
}

// localName reports whether a Host header names this machine by an address of its own, or
// by localhost, which browsers resolve themselves.
func localName(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if strings.EqualFold(name, "localhost") {
		return true
	}
	address, err := netip.ParseAddr(name)
	return err == nil && address.Zone() == "" && address.Unmap().IsLoopback()
}

// refusal is an answer other than success, for people.
type refusal struct {
	status int
	title  string
	text   string // what to do
	err    error  // for the log; shown only if there is no text
}

func (r *refusal) Error() string {
	if r.err != nil {
		return r.err.Error()
	}
	return r.title
}

func refuse(status int, title, text string) *refusal {
	return &refusal{status: status, title: title, text: text}
}

// visit is a request that was let in.
type visit struct {
	*http.Request
	w     http.ResponseWriter
	who   string
	token string
	// form has the request's fields: those of the body of a POST, and of the address of
	// others.
	form       url.Values
	unreadable error // why the form can't be read
	wants      Access
	views      map[string]bool // queues, and whether the person may view them
}

const cookieName = "hopback_desk"

// enter lets a request in, or says why not. It comes before anything is done.
func (h *Handler) enter(w http.ResponseWriter, r *http.Request, path string, a Action) (*visit, *refusal) {
	if h.ctx.Err() != nil {
		return nil, errEnding
	}
	v := &visit{Request: r, w: w, form: r.URL.Query(), views: map[string]bool{}}
	if r.Method == http.MethodPost {
		r.Body = http.MaxBytesReader(w, r.Body, maxForm) // an authorizer may read the form
		v.unreadable = r.ParseForm()
		v.form = r.PostForm
	}
	v.wants = h.wants(path, a, v.form)
	who, err := h.cfg.Authorize(r, v.wants)
	if err != nil {
		return nil, &refusal{http.StatusForbidden, "Not allowed", fmt.Sprintf("You aren't allowed to do this here (%s). The server's log says why.", a), err}
	}
	v.who = named(who)
	// Another site's page may link to this one, and may do nothing else with it.
	if site := r.Header.Get("Sec-Fetch-Site"); (site == "cross-site" || site == "same-site") && (r.Method != http.MethodGet || r.Header.Get("Sec-Fetch-Mode") != "navigate") {
		return nil, &refusal{http.StatusForbidden, "Refused", "The request came from another site.", errors.New("the request came from another site: Sec-Fetch-Site is " + site)}
	}
	var cookie string
	if c, err := r.Cookie(cookieName); err == nil && len(c.Value) == 43 {
		cookie = c.Value
	}
	if r.Method == http.MethodPost {
		if no := h.unforged(v, cookie); no != nil {
			return nil, no
		}
	} else if cookie == "" {
		cookie = randomText()
		// Without a Path it is that of the page, under whatever prefix that is.
		http.SetCookie(w, &http.Cookie{Name: cookieName, Value: cookie, HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil})
	}
	if a.changes() && !h.cfg.Writable {
		return nil, &refusal{http.StatusForbidden, "Read-only", "This page may look and change nothing. Start it with hopback desk --write, or with Config.Writable.", errors.New("the page is read-only")}
	}
	for _, queue := range []string{v.wants.Queue, v.wants.Target} {
		if queue != "" && !h.lists(queue) {
			return nil, notListed(queue)
		}
	}
	v.token = h.tokenFor(cookie, v.who)
	return v, nil
}

// wants is what a request to a path asks for.
func (h *Handler) wants(path string, a Action, form url.Values) Access {
	x := Access{Action: a}
	var r *run
	switch path {
	case "messages", "message", "body", "download", "edit", "dry-run", "mend":
		x.Queue = form.Get("in")
	case "look":
		q, _ := url.ParseQuery(form.Get("query"))
		x.Queue = q.Get("in")
	case "run":
		r = h.runs.find(form.Get("id"))
	case "stop", "discard":
		r = h.runs.find(form.Get("run"))
	case "replay":
		if id := form.Get("resume"); id != "" {
			if r = h.runs.find(id); r != nil {
				x.ToExchange, x.Target = r.replay.ToExchange, r.replay.Address.QueueName()
			}
			break
		}
		r = h.runs.find(form.Get("run"))
		switch form.Get("to") {
		case "exchange":
			x.ToExchange = true
		case "other":
			x.Target = form.Get("other")
		}
	}
	if r != nil {
		x.Queue = r.sel.Queue
	}
	return x
}

// lists reports whether the page is for a queue.
func (h *Handler) lists(queue string) bool {
	return len(h.cfg.Queues) == 0 || slices.Contains(h.cfg.Queues, queue)
}

func notListed(queue string) *refusal {
	return &refusal{http.StatusNotFound, "There is no such queue", "This page is for other queues. Start it with hopback desk --queue, or with Config.Queues, to have this one here.",
		fmt.Errorf("the queue %.100q isn't one of the page's queues", queue)}
}

// sees reports whether the person may view a queue. Pages about several queues ask it.
func (h *Handler) sees(v *visit, queue string) bool {
	may, known := v.views[queue]
	if !known {
		_, err := h.cfg.Authorize(v.Request, Access{Action: ActionView, Queue: queue})
		may = err == nil && h.lists(queue)
		v.views[queue] = may
	}
	return may
}

// mayAccept refuses a user who may not accept the side effects of scanning the request's queue.
func (h *Handler) mayAccept(v *visit) *refusal {
	x := v.wants
	x.Action = ActionAccept
	if _, err := h.cfg.Authorize(v.Request, x); err != nil {
		return &refusal{http.StatusForbidden, "Not allowed", "You aren't allowed to accept what looking into this queue costs.", err}
	}
	return nil
}

// maxForm bounds what a form sends: an edited body, escaped.
const maxForm = 2 << 20

// unforged refuses what a form of ours didn't send.
func (h *Handler) unforged(v *visit, cookie string) *refusal {
	if err := new(http.CrossOriginProtection).Check(v.Request); err != nil {
		return &refusal{http.StatusForbidden, "Refused", "The request came from another site.", err}
	}
	if kind, _, _ := strings.Cut(v.Header.Get("Content-Type"), ";"); strings.TrimSpace(kind) != "application/x-www-form-urlencoded" {
		return refuse(http.StatusUnsupportedMediaType, "Refused", "An action is sent by a form of this page.")
	}
	if v.unreadable != nil {
		return &refusal{http.StatusBadRequest, "The form can't be read", "It may be larger than 2 MiB.", v.unreadable}
	}
	if cookie == "" || !hmac.Equal([]byte(v.PostForm.Get("token")), []byte(h.tokenFor(cookie, v.who))) {
		return &refusal{http.StatusForbidden, "The page is too old", "Its server has been started again, or you are somebody else now. Go back, reload the page, and try again.", errors.New("the token is missing or wrong")}
	}
	return nil
}

// tokenFor is what a form has to bring: it belongs to the browser, to who asks, and to this
// process.
func (h *Handler) tokenFor(cookie, who string) string {
	mac := hmac.New(sha256.New, h.secret[:])
	_, _ = mac.Write([]byte(cookie + "\x00" + who))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

func randomText() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // it never fails
	return base64.RawURLEncoding.EncodeToString(b)
}

// named is who asks, as a replay can keep it.
func named(who string) string {
	who = strings.ToValidUTF8(who, "?")
	for len(who) > 100 {
		_, size := utf8.DecodeLastRuneInString(who)
		who = who[:len(who)-size]
	}
	if who == "" {
		return "unknown"
	}
	return who
}
