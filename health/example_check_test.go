package health_test

import (
	"context"
	"fmt"
	"log"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/health"
	"github.com/hopback/hopback/hopbacktest"
)

// Check returns the same report as the probes, for an endpoint or a metric of your own.
func ExampleCheck() {
	broker, err := hopbacktest.New(hopbacktest.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer broker.Close()
	conn, err := client.Connect(context.Background(), broker.URL(), client.Config{Dial: broker.Dial})
	if err != nil {
		log.Fatal(err)
	}
	report, err := health.Check(health.Config{}, conn)
	fmt.Println(report.Live, report.Ready, report.Progress, err)

	conn.Close(context.Background())
	report, _ = health.Check(health.Config{}, conn)
	fmt.Println(report.Live, report.Ready, report.Problems[0].Kind)
	// Output:
	// true true true <nil>
	// false false closed
}
