package main

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// handler is one of the list that the page offers.
type handler struct {
	Name string `json:"name"`
	Text string `json:"text"`
	// code is the body of the handler in Go, as run behaves. A %d is settings.Failures.
	code string
	run  func(ctx context.Context, l *lab, d *client.Delivery) error
}

var errShop = errors.New("the shop doesn't answer")

// errCrash is the result of a handler whose worker crashes. Nothing of it reaches the broker, since its
// connection is cut.
var errCrash = errors.New("its process is gone")

func handlers() []handler {
	return []handler{
		{"fails", "fails a number of times, then succeeds", "if retry.Attempt(ctx) <= %d {\n\treturn errors.New(\"the shop doesn't answer\")\n}\nreturn nil",
			func(ctx context.Context, l *lab, _ *client.Delivery) error {
				if retry.Attempt(ctx) <= l.settings.Failures {
					return errShop
				}
				return nil
			}},
		{"always", "always fails", "return errors.New(\"the shop doesn't answer\")",
			func(context.Context, *lab, *client.Delivery) error { return errShop }},
		{"succeeds", "succeeds", "return nil",
			func(context.Context, *lab, *client.Delivery) error { return nil }},
		{"permanent", "fails, and says that retries are useless", "return retry.Permanent(errors.New(\"there is no such customer\"))",
			func(context.Context, *lab, *client.Delivery) error {
				return retry.Permanent(errors.New("there is no such customer"))
			}},
		{"after", "is asked to wait 30 s once, then succeeds", "if retry.Attempt(ctx) == 1 {\n\treturn retry.After(30*time.Second, errors.New(\"429 Too Many Requests\"))\n}\nreturn nil",
			func(ctx context.Context, _ *lab, _ *client.Delivery) error {
				if retry.Attempt(ctx) == 1 {
					return retry.After(30*time.Second, errors.New("429 Too Many Requests"))
				}
				return nil
			}},
		{"slow", "takes 5 s, then succeeds", "select {\ncase <-time.After(5 * time.Second):\n\treturn nil\ncase <-ctx.Done():\n\treturn ctx.Err()\n}",
			func(ctx context.Context, _ *lab, _ *client.Delivery) error {
				select {
				case <-time.After(5 * time.Second):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}},
		{"panics", "panics", "panic(\"index out of range\")",
			func(context.Context, *lab, *client.Delivery) error { panic("index out of range") }},
		{"crashes", "crashes its worker each time (a poison message)", "os.Exit(1) // and something starts the worker again\nreturn nil",
			func(_ context.Context, l *lab, _ *client.Delivery) error {
				l.cutWorker()
				return errCrash
			}},
	}
}

// handlerNamed returns nil if there is none of that name.
func handlerNamed(name string) *handler {
	for _, h := range handlers() {
		if h.Name == name {
			return &h
		}
	}
	return nil
}
