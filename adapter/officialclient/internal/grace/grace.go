// Package grace waits for handlers when a consumer ends, as package client's consumer does.
package grace

import (
	"context"
	"fmt"
	"time"
)

// Last is how long a handler may take after its ctx was ended.
const Last = 5 * time.Second

// ErrOver is the cause of a handler's ctx that ended with the grace time.
var ErrOver = fmt.Errorf("hopback: the consumer's grace time is over: %w", context.Canceled)

// Await waits for the handlers that still run. A handler holds one of slots while it
// runs; Await takes them all. The grace time began at ended. When it is over, Await
// ends the handlers' ctx and waits for [Last]. It returns early when hurry is closed.
func Await(slots chan<- struct{}, expedite <-chan struct{}, ended time.Time, grace time.Duration, end context.CancelCauseFunc) {
	last := ended.Add(grace + Last)
	timer := time.NewTimer(time.Until(ended.Add(grace)))
	defer timer.Stop()
	for n := 0; n < cap(slots); {
		select {
		case slots <- struct{}{}:
			n++
		case <-expedite:
			return
		case <-timer.C:
			if !time.Now().Before(last) {
				return
			}
			end(ErrOver)
			timer.Reset(time.Until(last))
		}
	}
}
