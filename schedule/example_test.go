package schedule_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/schedule"
)

// Reminder is what the examples send later.
type Reminder struct {
	Invoice string `json:"invoice"`
}

func ExamplePublisher() {
	ctx, conn, end := inMemory("reminders")
	defer end()

	// Once, or at each start: the ladder, and the queues that get their messages from it.
	topology, err := schedule.Topology(schedule.Names{}, "reminders")
	report(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	report(err)

	p, err := schedule.NewPublisher[Reminder](ctx, conn, address.Queue("reminders"), schedule.PublisherConfig{})
	report(err)
	_, err = p.Publish(ctx, schedule.At(time.Now().Add(400*time.Millisecond)), Reminder{"in a while"})
	report(err)
	_, err = p.Publish(ctx, schedule.After(100*time.Millisecond), Reminder{"soon"})
	report(err)

	consume(ctx, conn, "reminders", 2, client.JSON(func(_ context.Context, r Reminder) error {
		fmt.Println(r.Invoice)
		return nil
	}))
	// Output:
	// soon
	// in a while
}

// A group's messages come once for each time, however many workers it has.
func ExampleGroup() {
	ctx, conn, end := inMemory("reminders")
	defer end()
	topology, err := schedule.GroupTopology(schedule.Names{}, "billing")
	report(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	report(err)

	group := schedule.Group{Conn: conn, Name: "billing"}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 2)
	for range 2 { // two workers
		go func() {
			ended <- group.Run(running, schedule.RunConfig{Recurring: []schedule.Recurring{{
				Name:  "remind",
				Times: schedule.Every(time.Second), // or a schedule of github.com/robfig/cron/v3
				To:    address.Queue("reminders"),
				Message: func(time.Time) (*client.Message, error) {
					return client.NewMessage([]byte(`{"invoice": "all"}`)), nil
				},
			}}})
		}()
	}
	consume(ctx, conn, "reminders", 2, client.JSON(func(ctx context.Context, r Reminder) error {
		d, _ := client.DeliveryFrom(ctx)
		name, _, _ := schedule.ParseMessageID(d.Message().Properties.MessageID.(string))
		fmt.Println(name, r.Invoice)
		return nil
	}))
	report(group.Pause(ctx, schedule.PauseConfig{Names: []string{"remind"}, Why: "an example"}))
	state, err := group.List(ctx, schedule.ListConfig{})
	report(err)
	for _, r := range state.Recurring {
		fmt.Println(r.Name, r.Spec, r.Paused.Why)
	}
	stop()
	report(<-ended)
	report(<-ended)
	// Output:
	// remind all
	// remind all
	// remind every 1s an example
}

func ExampleCancel() {
	ctx, conn, end := inMemory("reminders")
	defer end()
	topology, err := schedule.Topology(schedule.Names{}, "reminders")
	report(err)
	_, err = declare.Apply(ctx, conn.Management(), topology)
	report(err)
	p, err := schedule.NewPublisher[Reminder](ctx, conn, address.Queue("reminders"), schedule.PublisherConfig{})
	report(err)

	// Where workers are several processes: schedule.OnDedupe(redisstore.New(...)).
	store := schedule.OnDedupe(dedupe.NewMemory(0))
	scheduled, err := p.Publish(ctx, schedule.After(2*time.Second), Reminder{"17"})
	report(err)
	inTime, err := schedule.Cancel(ctx, store, scheduled) // the invoice was paid
	report(err)
	fmt.Println(inTime)

	handler := client.JSON(func(_ context.Context, r Reminder) error {
		fmt.Println("please pay", r.Invoice)
		return nil
	})
	with := schedule.With(schedule.Config{Store: store, OnCanceled: func(d *client.Delivery) { fmt.Println("dropped") }})
	consume(ctx, conn, "reminders", 1, with(handler))
	// Output:
	// true
	// dropped
}

// Dispatch delivers messages to exchanges, and messages with a ttl or a priority.
func ExampleDispatch() {
	ctx, conn, end := inMemory("mails")
	defer end()
	topology, err := schedule.Topology(schedule.Names{})
	report(err)
	topology.Exchanges = append(topology.Exchanges, declare.Exchange{Name: "events", Type: declare.ExchangeTopic})
	topology.Bindings = append(topology.Bindings, declare.Binding{Source: "events", Queue: "mails", Key: "reminder.*"})
	_, err = declare.Apply(ctx, conn.Management(), topology)
	report(err)

	// In any process, or in several.
	dispatching, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- schedule.Dispatch(dispatching, conn, schedule.DispatchConfig{}) }()

	p, err := schedule.NewPublisher[Reminder](ctx, conn, address.Exchange("events", "reminder.paid"), schedule.PublisherConfig{})
	report(err)
	_, err = p.Publish(ctx, schedule.After(100*time.Millisecond), Reminder{"17"}, func(m *client.Message) {
		m.Header.TTL = time.Hour // from when it is delivered
	})
	report(err)
	consume(ctx, conn, "mails", 1, client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		fmt.Println(d.Message().Header.TTL)
		return nil
	}))
	stop()
	fmt.Println(<-ended)
	// Output:
	// 1h0m0s
	// <nil>
}

// inMemory connects to a broker in memory that has the queues.
func inMemory(queues ...string) (ctx context.Context, conn *client.Conn, end func()) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	broker, err := hopbacktest.New(hopbacktest.Config{})
	report(err)
	conn, err = client.Connect(ctx, broker.URL(), client.Config{Dial: broker.Dial, Logger: slog.New(slog.DiscardHandler)})
	report(err)
	var topology declare.Topology
	for _, name := range queues {
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: name, DeadLetter: declare.Drop()})
	}
	_, err = declare.Apply(ctx, conn.Management(), topology)
	report(err)
	return ctx, conn, func() {
		_ = conn.Close(ctx)
		broker.Close()
		cancel()
	}
}

// consume handles n messages.
func consume(ctx context.Context, conn *client.Conn, queue string, n int, h client.Handler) {
	ctx, stop := context.WithCancel(ctx)
	report(conn.Consume(ctx, queue, client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
		err := h.Handle(ctx, d)
		if n--; n == 0 {
			stop()
		}
		return err
	}), client.ConsumerConfig{}))
}

func report(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Only reminders can be scheduled.
func ExampleDispatchConfig() {
	cfg :=
		schedule.DispatchConfig{Allow: func(to address.Address) bool { return to == address.Exchange("shop", "order.reminder") }}
	fmt.Println(cfg.Allow(address.Exchange("shop", "order.reminder")), cfg.Allow(address.Queue("payments")))
	// Output: true false
}
