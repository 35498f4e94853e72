package outbox_test

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

func relay() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := postgres.Migrate(ctx, pool); err != nil { // creates the tables, or does nothing
		return err
	}
	conn, err := client.Connect(ctx, os.Getenv("HOPBACK_URL"), client.Config{})
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())

	r, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{
		Order:         outbox.OrderByKey,
		SetAsideAfter: 10 * time.Minute,
	})
	if err != nil {
		return err
	}
	err = r.Run(ctx) // until SIGTERM; then it finishes the batches in flight
	stats := r.Stats()
	log.Println("published", stats.Published, "set aside", stats.SetAside)
	return err
}

// A relay publishes what transactions have committed. Run it in the service, or in a separate
// program such as this one.
func ExampleRelay() {
	_ = relay
}
