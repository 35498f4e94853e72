// Command health is the program of docs/operations.md: it serves the probes of a connection.
package main

import (
	"cmp"
	"context"
	"log"
	"net/http"
	"os"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/health"
)

func main() {
	conn, err := client.Connect(context.Background(), cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/health/", health.Handler(health.Config{}, conn))
	log.Fatal(http.ListenAndServe(":8080", nil))
}
