// Command outbox is the first program of docs/outbox.md: it writes an order and its message in
// one transaction, and relays the message to RabbitMQ.
package main

import (
	"cmp"
	"context"
	"log"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/outbox"
)

type Order struct {
	ID string `json:"id"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	check(err)
	check(postgres.Migrate(ctx, pool)) // creates the tables, or does nothing
	_, err = pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY)")
	check(err)
	conn, err := client.Connect(ctx, cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/"), client.Config{})
	check(err)
	orders := declare.QuorumQueue{Name: "orders", DeadLetter: declare.ToQueue("orders.dead")}
	dead := declare.QuorumQueue{Name: "orders.dead", DeadLetter: declare.Drop()}
	_, err = declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{orders, dead}})
	check(err)

	// The order and its message are both committed, or neither is.
	order := Order{ID: "o-1"}
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order.ID); err != nil {
			return err
		}
		_, err := outbox.Publish(ctx, tx, address.Queue("orders"), order)
		return err
	}))

	relay, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{})
	check(err)
	check(relay.Run(ctx)) // publishes what was committed, until ^C
	log.Println("published", relay.Stats().Published)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
