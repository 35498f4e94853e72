package client

import (
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestObserverKeepsTheOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []int
		o := &observer{log: slog.New(slog.DiscardHandler), call: func(e Event) { got = append(got, e.Attempt) }}
		for i := range 500 {
			o.notify(Event{Attempt: i})
			if i%100 == 0 {
				synctest.Wait() // its goroutine ends, and begins again
			}
		}
		synctest.Wait()
		require.Len(t, got, 500)
		for i, n := range got {
			require.Equal(t, i, n)
		}
	})
}

func TestObserverThatBlocksCostsEventsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var mu sync.Mutex
		var got []Event
		o := &observer{log: slog.New(slog.DiscardHandler), call: func(e Event) {
			<-release
			mu.Lock()
			defer mu.Unlock()
			got = append(got, e)
		}}
		o.notify(Event{Attempt: -1})
		synctest.Wait() // it hangs in that one
		for i := range maxEvents + 10 {
			o.notify(Event{Attempt: i})
		}
		close(release)
		synctest.Wait()
		require.Len(t, got, 1+maxEvents)
		assert.Equal(t, 10, got[1].Dropped, "and the next one says so")
		assert.Equal(t, 10, got[1].Attempt, "the oldest are dropped")
		assert.Equal(t, maxEvents+9, got[maxEvents].Attempt)
		assert.Zero(t, got[2].Dropped)
	})
}

func TestObserverSurvivesItsCallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []int
		o := &observer{log: slog.New(slog.DiscardHandler), call: func(e Event) {
			got = append(got, e.Attempt)
			switch e.Attempt {
			case 1:
				panic("callback")
			case 2:
				runtime.Goexit()
			}
		}}
		for i := range 5 {
			o.notify(Event{Attempt: i})
		}
		synctest.Wait()
		assert.Equal(t, []int{0, 1, 2, 3, 4}, got)
		(*observer)(nil).notify(Event{})
		(&observer{}).notify(Event{})
	})
}
