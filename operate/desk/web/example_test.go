package web_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/desk/web"
)

// Mount the page in a service's http.ServeMux, under a prefix. Authorize checks the user with
// the service's own login; here it is HTTP basic authentication. Everybody may read, and only
// "ada" may replay.
func ExampleNew() {
	broker, err := hopbacktest.New(hopbacktest.Config{}) // in a service: a real RabbitMQ
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	ctx := context.Background()
	conn, err := client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)

	d, err := desk.New(conn, desk.Config{})
	if err != nil {
		log.Fatal(err)
	}
	handler, err := web.New(d, web.Config{
		Title:    "production",
		Writable: true,
		Queues:   []string{"orders.dead"},
		Authorize: func(r *http.Request, a web.Access) (who string, err error) {
			user, password, _ := r.BasicAuth()
			switch {
			case password != "secret":
				return "", errors.New("wrong user or password")
			case user != "ada" && a.Action == web.ActionReplay:
				return "", errors.New("only ada may replay")
			}
			return user, nil
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer handler.Shutdown(ctx)

	mux := http.NewServeMux()
	mux.Handle("/ops/dead/", http.StripPrefix("/ops/dead", handler))

	// A service calls http.ListenAndServe(":8080", mux). This example sends two requests.
	get := func(password string) int {
		r := httptest.NewRequest("GET", "/ops/dead/", nil)
		r.SetBasicAuth("ada", password)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		return w.Code
	}
	fmt.Println("with a wrong password:", get("guess"))
	fmt.Println("with the password:", get("secret"))
	// Output:
	// with a wrong password: 403
	// with the password: 200
}
