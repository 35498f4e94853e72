// Command orders is a shop whose books stay right while its processes are killed: an HTTP
// service with PostgreSQL, an outbox, a worker, and an inbox. See README.md.
//
//	make orders                                    at the top of the repository
//	go run ./examples/orders                       the shop, in one process
//	go run ./examples/orders -torture              kills its parts at random, then checks the books
//	go run ./examples/orders service|relay|worker  one part, to run next to the others
//
// HOPBACK_URL names the broker, HOPBACK_POSTGRES_URL the database.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hopback/hopback/client"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "the address of the service")
	tortured := flag.Bool("torture", false, "send orders, kill the parts at random, and check the books")
	orders := flag.Int("orders", 2000, "the number of orders that -torture sends")
	kills := flag.Int("kills", 30, "the number of processes that -torture kills")
	flag.StringVar(&shop, "shop", shop, "the prefix of all queue names")
	leashed := flag.Bool("leashed", false, "stop when the standard input ends")
	flag.Parse()
	if *leashed {
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	database := cmp.Or(os.Getenv("HOPBACK_POSTGRES_URL"), "postgres://postgres@127.0.0.1:5432/postgres")
	broker := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@127.0.0.1:5672/")
	var err error
	if *tortured {
		err = torture(ctx, database, broker, *orders, *kills)
	} else {
		err = run(ctx, database, broker, *listen, flag.Arg(0))
	}
	stop()
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

// run runs one part of the shop, or all of them if part is empty.
func run(ctx context.Context, database, broker, listen, part string) error {
	parts := map[string]func(context.Context, *pgxpool.Pool, *client.Conn) error{
		"service": func(ctx context.Context, pool *pgxpool.Pool, _ *client.Conn) error { return serve(ctx, pool, listen) },
		"relay":   relay,
		"worker":  work,
	}
	if part != "" {
		only, ok := parts[part]
		if !ok {
			return fmt.Errorf("there is no part %q; use service, relay, or worker", part)
		}
		clear(parts)
		parts[part] = only
	}
	pool, err := pgxpool.New(ctx, database)
	if err != nil {
		return err
	}
	defer pool.Close()
	conn, err := client.Connect(ctx, broker, client.Config{Name: "orders " + part, Logger: slog.Default()})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := setUp(ctx, pool, conn); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, len(parts))
	for _, part := range parts {
		go func() { ended <- part(ctx, pool, conn) }()
	}
	if part == "" {
		fmt.Printf("The shop is open. Order something:\n\n  curl -d '{\"id\": \"order-1\", \"item\": \"apples\", \"quantity\": 3}' http://%s/orders\n  curl http://%s/items\n\n", listen, listen)
	}
	var errs error
	for range parts {
		errs = errors.Join(errs, <-ended)
		cancel() // if one part stops, all stop
	}
	return errs
}
