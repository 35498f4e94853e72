// Command desk is the first program of docs/desk.md: the page on this machine.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"net"
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
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	management := cmp.Or(os.Getenv("HOPBACK_MANAGEMENT_URL"), "http://guest:guest@localhost:15672")
	conn, err := client.Connect(ctx, url, client.Config{})
	check(err)
	api, err := httpapi.New(management, "/", httpapi.Config{})
	check(err)

	d, err := desk.New(conn, desk.Config{HTTP: api})
	check(err)
	page, err := web.New(d, web.Config{}) // read-only, and only for this machine
	check(err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Printf("Open http://%s/\n", listener.Addr())
	go func() { check(http.Serve(listener, page)) }()

	<-ctx.Done()
	check(page.Shutdown(context.Background())) // returns all messages to their queues
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
