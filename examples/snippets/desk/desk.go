// Package desk holds the code of docs/desk.md.
package desk

import (
	"errors"
	"net/http"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare/httpapi"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/desk/web"
)

type user struct {
	Name     string
	Operator bool
}

// signedIn is a team's own login.
var signedIn func(r *http.Request) (user, error)

func serve(conn *client.Conn, api *httpapi.Reader) (*web.Handler, error) {
	d, err := desk.New(conn, desk.Config{HTTP: api})
	if err != nil {
		return nil, err
	}
	page, err := web.New(d, web.Config{
		Writable:   true,
		DiscardDir: "/var/lib/orders/discarded",
		Authorize: func(r *http.Request, a web.Access) (string, error) {
			u, err := signedIn(r)
			if err == nil && a.Action != web.ActionView && !u.Operator {
				err = errors.New(u.Name + " isn't an operator")
			}
			return u.Name, err
		},
	})
	if err != nil {
		return nil, err
	}
	http.Handle("/ops/dead/", http.StripPrefix("/ops/dead", page))
	return page, nil
}

var _ = serve
