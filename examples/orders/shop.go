package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/postgres"
	"github.com/hopback/hopback/postgres/inbox"
	"github.com/hopback/hopback/postgres/outbox"
	"github.com/hopback/hopback/retry"
)

// shop is the prefix of all queue names.
var shop = "shop."

func ordersQueue() string   { return shop + "orders" }
func receiptsQueue() string { return shop + "receipts" }

// policy is how the worker retries an order.
func policy() retry.Policy {
	return retry.Policy{
		MaxRetries: 20,
		Backoff:    retry.Delays(100*time.Millisecond, time.Second),
		Names:      retry.Names{Prefix: shop},
	}
}

// order is sent by a customer. The customer chooses the ID. So if the answer was lost and the
// customer sends the order again, it is still the same order.
type order struct {
	ID       string `json:"id"`
	Item     string `json:"item"`
	Quantity int    `json:"quantity"`
}

// price is the price of each item, in cents.
const price = 250

// topology has the queue of orders with its retry queues, and the queue of receipts.
func topology() (declare.Topology, error) {
	t, err := retry.Topology(policy(), declare.QuorumQueue{Name: ordersQueue()})
	t.Queues = append(t.Queues, declare.QuorumQueue{Name: receiptsQueue(), DeadLetter: declare.Drop()})
	return t, err
}

// setUp creates the tables and the queues, if they don't exist yet. Each part calls it at its
// start.
func setUp(ctx context.Context, pool *pgxpool.Pool, conn *client.Conn) error {
	if err := postgres.Migrate(ctx, pool); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, `
SELECT pg_advisory_xact_lock(1);
CREATE TABLE IF NOT EXISTS items (
	name  text PRIMARY KEY,
	stock int NOT NULL CHECK (stock >= 0),
	sold  int NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS orders (
	id       text PRIMARY KEY,
	item     text NOT NULL REFERENCES items,
	quantity int NOT NULL,
	paid     boolean NOT NULL DEFAULT false
);
-- Nothing here keeps an order from being paid twice. The inbox does.
CREATE TABLE IF NOT EXISTS payments (order_id text NOT NULL, cents int NOT NULL);
INSERT INTO items (name, stock) VALUES ('apples', 100000), ('pears', 100000), ('plums', 100000) ON CONFLICT DO NOTHING`); err != nil {
		return err
	}
	t, err := topology()
	if err != nil {
		return err
	}
	_, err = declare.Apply(ctx, conn.Management(), t)
	return err
}

// serve accepts orders over HTTP. It writes an order and its message in one transaction, so
// there is no order without a message, and no message without an order.
func serve(ctx context.Context, pool *pgxpool.Pool, listen string) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", func(w http.ResponseWriter, r *http.Request) {
		var o order
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&o); err != nil || o.ID == "" || o.Quantity < 1 || strings.ContainsRune(o.ID+o.Item, 0) {
			http.Error(w, "an order needs an id, an item, and a quantity", http.StatusBadRequest)
			return
		}
		switch err := take(r.Context(), pool, o); {
		case errors.Is(err, errNoItem):
			http.Error(w, err.Error(), http.StatusNotFound)
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		default:
			w.WriteHeader(http.StatusCreated)
		}
	})
	mux.HandleFunc("GET /items", func(w http.ResponseWriter, r *http.Request) {
		var text string
		if err := pool.QueryRow(r.Context(), "SELECT json_agg(items ORDER BY name)::text FROM items").Scan(&text); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = fmt.Fprintln(w, text)
	})
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Shutdown(context.WithoutCancel(ctx)) })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

var errNoItem = errors.New("the shop doesn't have that")

// take writes an order and its message, unless the order already exists.
func take(ctx context.Context, pool *pgxpool.Pool, o order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var known bool
		if err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM items WHERE name = $1)", o.Item).Scan(&known); err != nil {
			return err
		}
		if !known {
			return errNoItem
		}
		tag, err := tx.Exec(ctx, "INSERT INTO orders (id, item, quantity) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING", o.ID, o.Item, o.Quantity)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = outbox.Publish(ctx, tx, address.Queue(ordersQueue()), o)
		return err
	})
}

// relay publishes the committed messages.
func relay(ctx context.Context, pool *pgxpool.Pool, conn *client.Conn) error {
	r, err := outbox.NewRelay(pool, conn, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// work charges each order and removes it from the stock, exactly once. The message can arrive
// several times: if a relay or a worker is killed at a bad moment, or if the bank fails.
func work(ctx context.Context, pool *pgxpool.Pool, conn *client.Conn) error {
	once := inbox.With(pool, inbox.Config{})
	return conn.Consume(ctx, ordersQueue(), retry.With(policy())(once(client.JSON(pay))), client.ConsumerConfig{Concurrency: 3})
}

// pay writes everything in the inbox's transaction, including the message of the receipt.
func pay(ctx context.Context, o order) error {
	tx, ok := inbox.Tx(ctx)
	if !ok {
		return errors.New("pay needs the inbox's transaction")
	}
	if _, err := tx.Exec(ctx, "INSERT INTO payments (order_id, cents) VALUES ($1, $2)", o.ID, o.Quantity*price); err != nil {
		return err
	}
	if rand.IntN(20) == 0 {
		return errors.New("the bank timed out") // the payment is rolled back, and the order retried
	}
	if _, err := tx.Exec(ctx, "UPDATE items SET stock = stock - $2, sold = sold + $2 WHERE name = $1", o.Item, o.Quantity); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "UPDATE orders SET paid = true WHERE id = $1", o.ID); err != nil {
		return err
	}
	_, err := outbox.Publish(ctx, tx, address.Queue(receiptsQueue()), o)
	return err
}
