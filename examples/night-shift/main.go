// Command night-shift is for the engineer on call at three in the morning: 500 of 2,000 orders
// are in the dead-letter queue. Which ones, why, and can I replay only those?
//
// A handler has a bug: it panics on every fourth order, which has a coupon. Some other orders
// fail permanently, because the bank refuses the card. Package desk groups the dead letters by
// queue, reason, and error. After the bug is fixed, the example replays the group of the bug,
// and all of its orders are paid. The refused orders stay in the dead-letter queue.
//
// To do the same on the command line, use "hopback dlq survey", and "hopback dlq replay" with
// the group.
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
	"github.com/hopback/hopback/examples/internal/show"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const (
	queue   = "night.orders"
	dead    = "night.orders.dead"
	all     = 2000
	coupons = 500 // every fourth
	refused = 20  // every hundredth, except those with a coupon
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
	// The worker would log each of the 520 failures, with the stack. The example turns that off.
	workers := show.Must(client.Connect(s.Ctx, s.URL, client.Config{Name: "night-shift-worker", Logger: slog.New(slog.DiscardHandler)}))
	defer func() { _ = workers.Close(s.Ctx) }()
	stop := work(s, workers, worker(&till, discountWithABug))
	s.Holds(dead, coupons+refused)
	s.Holds(queue, 0)
	stop()
	s.Say("%d orders are paid, %d are dead-lettered", till.paid(), coupons+refused)
	s.Want(till.paid() == all-coupons-refused, "all other orders are paid: %d", till.paid())

	s.Act("03:00: which orders failed, and why?")
	d := show.Must(desk.New(s.Conn, desk.Config{Names: policy.Names}))
	survey := show.Must(d.Survey(s.Ctx, desk.SurveyConfig{Queues: []string{dead}}))
	for _, g := range survey.Groups {
		s.Say("group %s  %4d  %-9s  %s", g.ID, g.Count, g.Reason, g.Text)
	}
	s.Want(len(survey.Groups) == 2, "there are two groups: there were %d", len(survey.Groups))
	bug := survey.Groups[0]
	s.Want(bug.Count == coupons && bug.Reason == client.ReasonPanicked, "the largest group is the bug: %+v", bug)
	deadLetter := show.Must(d.Show(s.Ctx, desk.ShowConfig{Queue: dead, ID: bug.Example}))
	s.Say("one of the messages: %s", deadLetter.Error)
	for _, event := range deadLetter.History {
		s.Say("  %-13s %s %s", event.Kind, event.Queue, event.Reason)
	}

	s.Act("The bug is fixed, and the group is replayed")
	stop = work(s, workers, worker(&till, discount))
	defer stop()
	selected := desk.ReplayConfig{Queue: dead, Filter: desk.Filter{Groups: []string{bug.ID}}, By: "the night shift", DryRun: true}
	dry := show.Must(d.Replay(s.Ctx, selected))
	s.Say("dry run: a replay would send %d of %d", dry.Matched, dry.Seen)
	selected.DryRun = false
	report := show.Must(d.Replay(s.Ctx, selected))
	s.Say("replay %s: %d replayed in %v", report.ID, report.Replayed, report.Took.Round(time.Millisecond))
	s.Want(report.Replayed == coupons && report.Failed == 0, "the whole group is replayed: %+v", report)
	for till.paid() < all-refused {
		s.Want(s.Ctx.Err() == nil, "all of these orders are paid: %d", till.paid())
		time.Sleep(20 * time.Millisecond)
	}
	s.Holds(dead, refused)
	s.Proven("%d of %d orders failed because of a bug, and %d because of a refused card; only the group of the bug was replayed, and all %d are paid, %d of them twice",
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

// till has the payments.
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

// discountWithABug doesn't expect coupons that it doesn't know.
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
