package grace_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/internal/grace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAwait(t *testing.T) {
	const span = 20 * time.Second
	for name, c := range map[string]struct {
		handler   time.Duration // how long it runs on
		ended     time.Duration // how long ago the grace time began
		expedite  time.Duration // after which there is a hurry, if above 0
		heeds     bool          // the handler ends with its ctx
		want      time.Duration
		cancelled bool
	}{
		"no handler":                     {want: 0},
		"in time":                        {handler: 10 * time.Second, want: 10 * time.Second},
		"heeds its ctx":                  {handler: time.Hour, heeds: true, want: span, cancelled: true},
		"takes some of the last time":    {handler: span + time.Second, want: span + time.Second, cancelled: true},
		"blocks":                         {handler: time.Hour, want: span + grace.Last, cancelled: true},
		"the grace time began before":    {handler: time.Hour, ended: 15 * time.Second, want: 5*time.Second + grace.Last, cancelled: true},
		"everything was over long since": {handler: time.Hour, ended: time.Hour, want: 0}, // the caller ends its ctx
		"in a hurry":                     {handler: time.Hour, expedite: time.Second, want: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				slots := make(chan struct{}, 2)
				ctx, end := context.WithCancelCause(context.Background())
				defer end(nil)
				if c.handler > 0 {
					slots <- struct{}{}
					go func() {
						done := ctx.Done()
						if !c.heeds {
							done = nil
						}
						select {
						case <-time.After(c.handler):
						case <-done:
						}
						<-slots
					}()
				}
				expedite := make(chan struct{})
				if c.expedite > 0 {
					time.AfterFunc(c.expedite, func() { close(expedite) })
				}
				began := time.Now()
				grace.Await(slots, expedite, began.Add(-c.ended), span, end)
				assert.Equal(t, c.want, time.Since(began))
				if c.cancelled {
					assert.Equal(t, grace.ErrOver, context.Cause(ctx))
				} else {
					assert.NoError(t, ctx.Err())
				}
				time.Sleep(2 * time.Hour) // the handler ends
			})
		})
	}
}
