package health_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
)

func ExampleHandler() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(context.Background(), broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(context.Background())

	http.Handle("/health/", health.Handler(health.Config{}, conn))

	server := httptest.NewServer(http.DefaultServeMux)
	defer server.Close()
	answer, err := http.Get(server.URL + "/health/ready")
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	fmt.Print(answer.Status, "\n", string(text))
	// Output:
	// 200 OK
	// {"live":true,"ready":true,"progress":true,"problems":[],"consumers":[]}
}
