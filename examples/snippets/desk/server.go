package main

import (
	"errors"
	"net/http"

	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/desk/web"
)

// mount adds the page to a server that knows its users.
func mount(mux *http.ServeMux, d *desk.Desk) (*web.Handler, error) {
	page, err := web.New(d, web.Config{
		Title:      "shop, production",
		Writable:   true,
		DiscardDir: "/var/lib/orders/discarded",
		Authorize: func(r *http.Request, a web.Access) (who string, err error) {
			user, operator, err := signedIn(r) // your own login
			if err == nil && a.Action != web.ActionView && !operator {
				err = errors.New(user + " isn't an operator")
			}
			return user, err
		},
	})
	if err != nil {
		return nil, err
	}
	mux.Handle("/ops/dead/", http.StripPrefix("/ops/dead", page))
	return page, nil
}

// signedIn is where your server recognizes its users.
func signedIn(*http.Request) (user string, operator bool, err error) {
	return "", false, errors.New("not signed in")
}

var _ = mount
