// Command desk is the program of docs/desk.md: a team's server with the desk at a path.
package main

import (
	"context"
	"errors"
	"log"
	"net/http"
	"os"
	"os/signal"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare/httpapi"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/desk/web"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	conn, err := client.Connect(ctx, "amqp://guest:guest@localhost:5672/", client.Config{})
	check(err)
	api, err := httpapi.New("http://guest:guest@localhost:15672", "/", httpapi.Config{})
	check(err)

	d, err := desk.New(conn, desk.Config{HTTP: api})
	check(err)
	page, err := web.New(d, web.Config{
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
	check(err)
	http.Handle("/ops/dead/", http.StripPrefix("/ops/dead", page))
	server := &http.Server{Addr: ":8443"}
	go func() { check(server.ListenAndServeTLS("cert.pem", "key.pem")) }()

	<-ctx.Done()
	check(page.Shutdown(context.Background())) // stops replays, and returns all messages to their queues
}

// signedIn is where your server recognizes its users.
func signedIn(*http.Request) (user string, operator bool, err error) {
	return "", false, errors.New("not signed in")
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
