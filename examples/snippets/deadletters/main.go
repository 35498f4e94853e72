// Command deadletters is the program of docs/dead-letters.md: it replays one group of dead
// letters.
package main

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"os"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare/httpapi"
	"github.com/hopback/hopback/desk"
)

func main() {
	ctx := context.Background()
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	defer conn.Close(ctx)
	api, err := httpapi.New(cmp.Or(os.Getenv("HOPBACK_MANAGEMENT_URL"), "http://guest:guest@localhost:15672"), "/", httpapi.Config{})
	check(err)
	d, err := desk.New(conn, desk.Config{HTTP: api})
	check(err)

	survey, err := d.Survey(ctx, desk.SurveyConfig{})
	check(err)
	for _, g := range survey.Groups {
		fmt.Printf("%d in %s, %s: %s\n", g.Count, g.In, g.Reason, g.Text)
	}
	if len(survey.Groups) == 0 {
		return
	}
	first := survey.Groups[0]
	report, err := d.Replay(ctx, desk.ReplayConfig{
		Queue:  first.In,
		Filter: desk.Filter{Groups: []string{first.ID}},
		By:     "ada",
	})
	fmt.Println("replayed", report.Replayed)
	check(err)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
