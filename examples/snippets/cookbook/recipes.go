package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/dedupe"
	"github.com/hopback/hopback/middleware/ratelimit"
	"github.com/hopback/hopback/postgres/outbox"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

func publishWithHeaders(ctx context.Context, orders *hopback.Queue[Order]) error {
	return orders.Publish(ctx, Order{ID: "o-1"}, func(m *hopback.Message) {
		m.Properties.MessageID = "order-o-1"
		m.Properties.Subject = new("order.placed")
		m.ApplicationProperties = map[string]any{"tenant": "acme", "version": int64(2)}
		m.Header.TTL = time.Hour
	})
}

func readHeaders(ctx context.Context, _ Order) error {
	d, _ := client.DeliveryFrom(ctx)
	tenant, _ := d.Property("tenant").(string)
	if tenant == "" {
		return hopback.Permanent(errors.New("an order without a tenant"))
	}
	slog.InfoContext(ctx, "an order", "tenant", tenant, "id", d.Message().Properties.MessageID)
	return nil
}

func publishUrgent(ctx context.Context, orders *hopback.Queue[Order]) error {
	return orders.Publish(ctx, Order{ID: "o-1"}, func(m *hopback.Message) { m.Header.Priority = 9 })
}

func perTenant() client.Middleware {
	return ratelimit.With(ratelimit.Config{
		PerSecond: 5,
		Burst:     10,
		Key: func(d *client.Delivery) (string, bool) {
			tenant, ok := d.Property("tenant").(string)
			return tenant, ok
		},
	})
}

func untilStopped(orders *hopback.Queue[Order], charge func(context.Context, Order) error) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// When ctx ends, Consume receives nothing more, and waits for running handlers.
	return orders.Consume(ctx, charge, hopback.ConsumerConfig{Concurrency: 16, Grace: 20 * time.Second})
}

func withTimeout(charge func(context.Context, Order) error) client.Handler {
	return client.Chain(
		retry.With(policy),
		client.Timeout(10*time.Second), // the handler's ctx ends; its error is retried
	)(client.JSON(charge))
}

func publishWithin(ctx context.Context, orders *hopback.Queue[Order], o Order) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := orders.Publish(ctx, o)
	if err != nil && !client.SafeToRetry(err) {
		return fmt.Errorf("the broker may have order %s: %w", o.ID, err)
	}
	return err
}

// Report is published with its content, or with a link to it.
type Report struct {
	Content []byte `json:"content,omitempty"`
	URL     string `json:"url,omitempty"`
}

func publishLarge(ctx context.Context, reports *hopback.Queue[Report], content []byte, upload func(context.Context, []byte) (url string, err error)) error {
	err := reports.Publish(ctx, Report{Content: content})
	if !errors.Is(err, client.ErrTooLarge) {
		return err
	}
	url, err := upload(ctx, content) // to an object store, for instance
	if err != nil {
		return err
	}
	return reports.Publish(ctx, Report{URL: url})
}

func publishMany(ctx context.Context, orders *hopback.Queue[Order], many []Order) error {
	publisher, err := orders.Publisher(ctx)
	if err != nil {
		return err
	}
	err = publisher.PublishAll(ctx, many, func(o Order, m *client.Message) { m.Properties.MessageID = o.ID })
	if batch, ok := errors.AsType[*client.BatchError](err); ok {
		for _, f := range batch.Failed {
			slog.ErrorContext(ctx, "not published", "order", many[f.Index].ID, "error", f.Err, "safe to retry", client.SafeToRetry(f.Err))
		}
	}
	return err
}

func consumeBoth(ctx context.Context, conn *hopback.Conn, orders, emails client.Handler) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	errs := make([]error, 2)
	wg.Go(func() {
		defer stop() // if one stops, so does the other
		errs[0] = conn.Consume(ctx, "orders", orders, client.ConsumerConfig{Concurrency: 16})
	})
	wg.Go(func() {
		defer stop()
		errs[1] = conn.Consume(ctx, "emails", emails, client.ConsumerConfig{Concurrency: 4})
	})
	wg.Wait()
	return errors.Join(errs...)
}

func reportDeadLetters(ctx context.Context, conn *hopback.Conn, alert func(retry.DeadLetter)) error {
	report := client.HandlerFunc(func(_ context.Context, d *client.Delivery) error {
		alert(retry.DeadLetterOf(d.Message()))
		return client.Forward{To: address.Queue("orders.archive"), Message: client.Copy(d.Message())}
	})
	return conn.Consume(ctx, "orders.dead", report, client.ConsumerConfig{})
}

func remindLater(ctx context.Context, conn *client.Conn) (due time.Time, err error) {
	ladder, err := schedule.Topology(schedule.Names{}, "reminders") // once for all services
	if err != nil {
		return due, err
	}
	if _, err := declare.Apply(ctx, conn.Management(), ladder); err != nil {
		return due, err
	}
	publisher, err := schedule.NewPublisher[Order](ctx, conn, address.Queue("reminders"), schedule.PublisherConfig{})
	if err != nil {
		return due, err
	}
	scheduled, err := publisher.Publish(ctx, schedule.After(14*24*time.Hour), Order{ID: "o-1"})
	return scheduled.Due, err
}

func publishOnce(ctx context.Context, orders *hopback.Queue[Order], o Order) error {
	return orders.Publish(ctx, o, func(m *hopback.Message) { m.Properties.MessageID = "charge-" + o.ID })
}

func handleOnce(store dedupe.Store, charge func(context.Context, Order) error) client.Handler {
	return client.Chain(
		retry.With(policy),
		dedupe.With(dedupe.Config{Store: store, TTL: 7 * 24 * time.Hour}),
	)(client.JSON(charge))
}

func placeOrder(ctx context.Context, db interface {
	Begin(context.Context) (pgx.Tx, error)
}, o Order) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", o.ID); err != nil {
			return err
		}
		_, err := outbox.Publish(ctx, tx, address.Queue("orders"), o)
		return err
	})
}
