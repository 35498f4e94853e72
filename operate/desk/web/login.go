package web

import (
	"crypto/hmac"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// loginPath is the path of LoginURL, and loginField the field of its query.
const loginPath, loginField = "login", "secret"

// login replaces a missing Config.Authorize. A browser that opens the link gets a cookie, and
// only browsers with that cookie are let in. Nothing else proves that a request is from the
// person who started the process: what a proxy adds to a request is the proxy's choice.
type login struct {
	who             string
	secret, session string // of the link, and of the cookie
}

// LoginURL returns the link that opens the page, which is at the URL page:
//
//	fmt.Println("Open", handler.LoginURL("http://127.0.0.1:8484/"))
//
// Without Config.Authorize, the link has a secret, and only browsers that have opened it can use
// the page, until the process ends. Print it where only the person sees it who may use the page,
// such as a terminal; don't log it. With Config.Authorize, LoginURL returns page.
func (h *Handler) LoginURL(page string) string {
	if h.login == nil {
		return page
	}
	return strings.TrimRight(page, "/") + "/" + loginPath + "?" + loginField + "=" + h.login.secret
}

var (
	errNoLogin = errors.New("the browser hasn't opened the login link; without Config.Authorize, each browser must open it once")
	noLogin    = &refusal{http.StatusForbidden, "Not logged in", "Open the link that the page's server printed when it started. Each browser needs that once.", errNoLogin}
)

// authorize is Config.Authorize where none is set.
func (l *login) authorize(r *http.Request, _ Access) (who string, err error) {
	if err := fromHere(r); err != nil {
		return "", err
	}
	for _, c := range r.CookiesNamed(loginCookie(r)) {
		if hmac.Equal([]byte(c.Value), []byte(l.session)) {
			return l.who, nil
		}
	}
	return "", errNoLogin
}

// open serves LoginURL.
func (l *login) open(w http.ResponseWriter, r *http.Request) *refusal {
	if err := fromHere(r); err != nil {
		return &refusal{http.StatusForbidden, "Not allowed", "You aren't allowed to do this. The server's log has the reason.", err}
	}
	if !hmac.Equal([]byte(r.URL.Query().Get(loginField)), []byte(l.secret)) {
		return &refusal{http.StatusForbidden, "This link isn't valid", "Open the link that the page's server printed when it started. After a restart it prints another one.", errors.New("the secret of the login link is missing or wrong")}
	}
	// Lax, and not Strict: a person may follow the link, or one to a message, from another site,
	// such as a terminal in a browser. Other requests of other sites are refused.
	http.SetCookie(w, &http.Cookie{Name: loginCookie(r), Value: l.session, HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: r.TLS != nil})
	w.Header().Set("Location", "./") // the address of the page has no secret
	w.WriteHeader(http.StatusSeeOther)
	return nil
}

// loginCookie is the cookie's name. A browser sends a cookie to all ports of a host, so each
// desk has a name with its port: two desks on one machine don't log each other out.
func loginCookie(r *http.Request) string {
	const name = "hopback_desk_login"
	_, port, err := net.SplitHostPort(r.Host)
	if err != nil {
		return name
	}
	if n, err := strconv.ParseUint(port, 10, 16); err == nil {
		return name + "_" + strconv.FormatUint(n, 10)
	}
	return name
}
