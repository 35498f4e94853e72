// Command night-shift is for whoever is called at three in the morning: 500 of 2,000
// orders are in the dead-letter queue. Which, why, and can just those be sent back?
//
// A handler has a bug: it panics at every fourth order, the ones with a coupon. Others fail
// of a bank that refuses their card, and are dead for good. Package desk groups the dead by
// where they died, why, and of which error. The handler is mended, the one group is
// replayed, and all of its orders are paid. The refused ones stay where they are.
//
// At a command line it is "hopback dlq survey", and "hopback dlq replay" with the group.
//
//	HOPBACK_URL=amqp://guest:guest@localhost:5672/ go run ./examples/night-shift
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/retry"
)

const (
	queue   = "night.orders"
	dead    = "night.orders.dead"
	all     = 2000
	coupons = 500 // every fourth
	refused = 20  // every hundredth, but for those with a coupon
)

var policy = retry.Policy{
	MaxRetries:  3,
	Backoff:     retry.Exponential(50*time.Millisecond, 2),
	GiveUpAfter: time.Hour,
	Names:       retry.Names{Prefix: "night."},
}

var errRefused = errors.New("the bank refuses the card")

type order struct {
	Number  int      `json:"number"`
	Coupons []string `json:"coupons"`
	Refused bool     `json:"refused"`
}

func main() { show.Main(example) }

func example(s *show.Stage) {
	s.Act("2,000 orders, and a handler with a bug")
	s.Declare(show.Must(retry.Topology(policy, declare.QuorumQueue{Name: queue})))
	send(s)
	var till till
	// The worker's log would tell of each of the 520, with the stack. It is turned off here.
	workers := show.Must(client.Connect(s.Ctx, s.URL, client.Config{Name: "night-shift-worker", Logger: slog.New(slog.DiscardHandler)}))
	defer func() { _ = workers.Close(s.Ctx) }()
	stop := work(s, workers, worker(&till, discountWithABug))
	s.Holds(dead, coupons+refused)
	s.Holds(queue, 0)
	stop()
	s.Say("%d orders are paid, %d are dead", till.paid(), coupons+refused)
	s.Want(till.paid() == all-coupons-refused, "all others are paid: %d", till.paid())

	s.Act("03:00: what is dead, and why?")
	d := show.Must(desk.New(s.Conn, desk.Config{Names: policy.Names}))
	survey := show.Must(d.Survey(s.Ctx, desk.SurveyConfig{Queues: []string{dead}}))
	for _, g := range survey.Groups {
		s.Say("group %s  %4d  %-9s  %s", g.ID, g.Count, g.Reason, g.Text)
	}
	s.Want(len(survey.Groups) == 2, "there are two groups, not %d", len(survey.Groups))
	bug := survey.Groups[0]
	s.Want(bug.Count == coupons && bug.Reason == client.ReasonPanicked, "the largest group is that of the bug: %+v", bug)
	deadLetter := show.Must(d.Show(s.Ctx, desk.ShowConfig{Queue: dead, ID: bug.Example}))
	s.Say("one of them: %s", deadLetter.Error)
	for _, event := range deadLetter.History {
		s.Say("  %-13s %s %s", event.Kind, event.Queue, event.Reason)
	}

	s.Act("The handler is mended, and the group is replayed")
	stop = work(s, workers, worker(&till, discount))
	defer stop()
	selected := desk.ReplayConfig{Queue: dead, Filter: desk.Filter{Groups: []string{bug.ID}}, By: "the night shift", DryRun: true}
	dry := show.Must(d.Replay(s.Ctx, selected))
	s.Say("dry run: %d of %d would be replayed", dry.Matched, dry.Seen)
	selected.DryRun = false
	report := show.Must(d.Replay(s.Ctx, selected))
	s.Say("replay %s: %d replayed in %v", report.ID, report.Replayed, report.Took.Round(time.Millisecond))
	s.Want(report.Replayed == coupons && report.Failed == 0, "all of the group are replayed: %+v", report)
	for till.paid() < all-refused {
		s.Want(s.Ctx.Err() == nil, "all of them are paid: %d", till.paid())
		time.Sleep(20 * time.Millisecond)
	}
	s.Holds(dead, refused)
	s.Proven("%d of %d orders died of a bug, and %d of a refused card; the group of the bug was replayed alone, and all %d are paid, %d of them twice",
		coupons, all, refused, till.paid(), till.twice.Load())
}

// send publishes the orders.
func send(s *show.Stage) {
	p := show.Must(client.NewPublisher[order](s.Ctx, s.Conn, address.Queue(queue), client.PublisherConfig{}))
	orders := make([]order, all)
	for i := range orders {
		orders[i] = order{Number: i, Coupons: []string{}}
		switch {
		case i%4 == 0:
			orders[i].Coupons = []string{"WELCOME"}
		case i%100 == 1:
			orders[i].Refused = true
		}
	}
	s.Check(p.PublishAll(s.Ctx, orders, func(o order, m *client.Message) { m.Properties.MessageID = fmt.Sprintf("order-%d", o.Number) }))
}

// work consumes from the queue until stop is called.
func work(s *show.Stage, conn *client.Conn, h client.Handler) (stop func()) {
	ctx, cancel := context.WithCancel(s.Ctx)
	done := make(chan error, 1)
	go func() { done <- conn.Consume(ctx, queue, h, client.ConsumerConfig{Concurrency: 10}) }()
	return func() {
		cancel()
		s.Check(<-done)
	}
}

// till has what was paid.
type till struct {
	orders sync.Map
	count  atomic.Int64
	twice  atomic.Int64
}

func (t *till) pay(number int) {
	if _, before := t.orders.LoadOrStore(number, true); before {
		t.twice.Add(1)
		return
	}
	t.count.Add(1)
}

func (t *till) paid() int { return int(t.count.Load()) }

// worker handles orders.
func worker(t *till, discount func(order) int) client.Handler {
	return retry.With(policy)(client.JSON(func(_ context.Context, o order) error {
		if discount(o); o.Refused {
			return retry.Permanent(fmt.Errorf("order %d: %w", o.Number, errRefused))
		}
		t.pay(o.Number)
		return nil
	}))
}

var discounts = map[string][]int{"SUMMER": {5, 10}}

// discountWithABug doesn't think of coupons that it doesn't know.
func discountWithABug(o order) (percent int) {
	for _, c := range o.Coupons {
		percent += discounts[c][o.Number%2]
	}
	return percent
}

func discount(o order) (percent int) {
	for _, c := range o.Coupons {
		if known := discounts[c]; len(known) > 0 {
			percent += known[o.Number%len(known)]
		}
	}
	return percent
}
