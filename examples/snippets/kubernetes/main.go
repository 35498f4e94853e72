// Command kubernetes is the program of docs/kubernetes.md: a worker that serves probes and drains when its pod is deleted.
package main

import (
	"cmp"
	"context"
	"errors"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/health"
)

// Order is the body of a message, as JSON.
type Order struct {
	ID string `json:"id"`
}

func charge(_ context.Context, o Order) error {
	log.Println("charged", o.ID)
	return nil
}

func main() {
	// Kubernetes stops a pod with SIGTERM.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err) // Kubernetes starts the container again
	}
	log.Println("drained")
}

func run(ctx context.Context) error {
	url := cmp.Or(os.Getenv("HOPBACK_URL"), "amqp://guest:guest@localhost:5672/")
	conn, err := hopback.Connect(ctx, url, hopback.Config{})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()

	probes := &http.Server{Addr: ":8080", Handler: health.Handler(health.Config{}, conn)}
	defer probes.Close()
	go func() {
		if err := probes.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			log.Println("no probes:", err)
		}
	}()

	orders := hopback.Queue[Order]{
		Conn:  conn,
		Name:  "orders",
		Retry: hopback.Policy{MaxRetries: 3, Backoff: hopback.Delays(10*time.Second, time.Minute)}, // as in the topology file
	}
	return orders.Consume(ctx, charge, hopback.ConsumerConfig{Concurrency: 16, Grace: 30 * time.Second})
}
