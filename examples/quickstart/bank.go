package main

import (
	"context"
	"errors"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// What can happen to an order.
const (
	paid            = "paid at once"
	failsOnce       = "the bank fails once"
	failsThreeTimes = "the bank fails three times"
	failsAlways     = "the bank never answers"
	declined        = "the card is declined"
	brokenBody      = "the body is broken JSON"
	panics          = "the handler panics"
	busy            = "the bank asks for time"
)

var (
	errTimeout  = errors.New("bank timed out")
	errDeclined = errors.New("card declined")
)

// busyError is a service's "429 Too Many Requests", with its Retry-After.
type busyError struct{ time time.Duration }

func (e busyError) Error() string { return "bank is busy for " + human(e.time) }

// askBank is a fake service that fails sometimes.
func askBank(ctx context.Context, o Order) error {
	d, ok := client.DeliveryFrom(ctx)
	if !ok {
		return errors.New("called without a delivery")
	}
	retries := retry.Count(d.Message())
	switch {
	case o.History == failsOnce && retries < 1,
		o.History == failsThreeTimes && retries < 3,
		o.History == failsAlways:
		return errTimeout
	case o.History == declined:
		return errDeclined
	case o.History == busy && retries == 0:
		return busyError{2 * time.Second}
	case o.History == panics:
		panic("no bank")
	}
	return nil
}
