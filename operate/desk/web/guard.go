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

// policy is the content security policy of every answer. Nothing is loaded from other hosts,
// nothing is inline, and no other page can show this one in a frame.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// guard sets the headers of every answer.
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

// fromHere refuses a request that visibly doesn't come from a browser on this machine. It can't
// recognize every such request: a proxy on this machine may send the page's own address as Host,
// and no header that names the client. So a login is required, too.
//
//   - With another host name, the request may come from a website whose name resolves to this
//     machine.
//   - Behind a proxy, every request seems to come from this machine.
func fromHere(r *http.Request) error {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !peer.Addr().Unmap().IsLoopback() {
		return fmt.Errorf("the request comes from %.100q; without Config.Authorize, only this machine is allowed", r.RemoteAddr)
	}
	if !localName(r.Host) {
		return fmt.Errorf("the request is for the host %.100q; without Config.Authorize, only localhost is allowed", r.Host)
	}
	for _, name := range []string{"Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-Ip"} {
		if r.Header.Get(name) != "" {
			return fmt.Errorf("the request came through a proxy: it has the header %s; without Config.Authorize, only this machine is allowed", name)
		}
	}
	return nil
}

// localName reports whether a Host header is a loopback address, or localhost, which browsers
// resolve themselves.
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

// visit is an authorized request.
type visit struct {
	*http.Request
	w     http.ResponseWriter
	who   string
	token string
	// form has the fields of a POST's body, or of any other request's URL.
	form       url.Values
	unreadable error // why the form can't be read
	wants      Access
	shows      string          // the ID of the run that the page shows
	views      map[string]bool // queues, and whether the person may view them
}

const cookieName = "hopback_desk"

// enter authorizes a request before anything else happens, or returns why it is refused.
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
	if errors.Is(err, errNoLogin) {
		return nil, noLogin
	}
	if err != nil {
		return nil, &refusal{http.StatusForbidden, "Not allowed", fmt.Sprintf("You aren't allowed to do this (%s). The server's log has the reason.", a), err}
	}
	v.who = named(who)
	// A page of another site may link to this one, and nothing else.
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
		// Without a Path, browsers use the page's path, which has the prefix.
		http.SetCookie(w, &http.Cookie{Name: cookieName, Value: cookie, HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: r.TLS != nil})
	}
	if a.changes() && !h.cfg.Writable {
		return nil, &refusal{http.StatusForbidden, "Read-only", "This page can't change anything. To allow changes, start it with hopback desk --write, or set Config.Writable.", errors.New("the page is read-only")}
	}
	for _, queue := range []string{v.wants.Queue, v.wants.Target} {
		if queue != "" && !h.lists(queue) {
			return nil, notListed(queue)
		}
	}
	v.token = h.tokenFor(cookie, v.who)
	return v, nil
}

// wants is the Access that a request to a path needs.
func (h *Handler) wants(path string, a Action, form url.Values) Access {
	x := Access{Action: a}
	var r *run
	switch path {
	case "messages", "message", "body", "download", "edit", "dry-run", "replay-edited", "parked", "waiting", "pause", "pause-queue":
		x.Queue = form.Get("in")
	case "recurring", "recurring-do":
		x.Queue = recurringQueue(form)
	case "accept":
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
	return &refusal{http.StatusNotFound, "Queue not found", "This page doesn't include the queue. To add it, start the page with hopback desk --queue, or change Config.Queues.",
		fmt.Errorf("the queue %.100q isn't one of the page's queues", queue)}
}

// sees reports whether the user may view a queue. Pages about several queues call it.
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
		return &refusal{http.StatusForbidden, "Not allowed", "You aren't allowed to accept the side effects of reading this queue.", err}
	}
	return nil
}

// maxForm is the maximum size of a submitted form: an edited body, escaped.
const maxForm = 2 << 20

// unforged refuses a request that wasn't sent by one of this page's forms.
func (h *Handler) unforged(v *visit, cookie string) *refusal {
	if err := new(http.CrossOriginProtection).Check(v.Request); err != nil {
		return &refusal{http.StatusForbidden, "Refused", "The request came from another site.", err}
	}
	if kind, _, _ := strings.Cut(v.Header.Get("Content-Type"), ";"); strings.TrimSpace(kind) != "application/x-www-form-urlencoded" {
		return refuse(http.StatusUnsupportedMediaType, "Refused", "Only a form of this page can start an action.")
	}
	if v.unreadable != nil {
		return &refusal{http.StatusBadRequest, "Invalid form", "It may be larger than 2 MiB.", v.unreadable}
	}
	if cookie == "" || !hmac.Equal([]byte(v.PostForm.Get("token")), []byte(h.tokenFor(cookie, v.who))) {
		return &refusal{http.StatusForbidden, "This page has expired", "The server was restarted, or you are logged in as somebody else. Go back, reload the page, and try again.", errors.New("the token is missing or wrong")}
	}
	return nil
}

// tokenFor is the token of a form: it is bound to the browser, the user, and this process.
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

// named is the user's name in the form that a replay can keep.
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
