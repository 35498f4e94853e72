package link

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/event"
)

// A blockage is logged once it lasts, and its end once the broker has said so. The end of
// the connection isn't that.
func TestBlockageIsLoggedOnceItLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []event.EventKind
		log := &lines{}
		b := &Blockage{Log: log.logger()}
		b.Notify(false)
		b.Notify(true) // before the connection is the live one
		time.Sleep(time.Minute)
		assert.Empty(t, log.String())
		b.Start("rabbit@a", func(e event.StateEvent) { events = append(events, e.Kind) })
		time.Sleep(noticeAfter + time.Second)
		assert.Contains(t, log.String(), "the broker accepts no messages")
		assert.Contains(t, log.String(), "rabbit@a")
		b.Notify(false)
		b.Notify(false)
		synctest.Wait()
		assert.Contains(t, log.String(), "accepts messages again")
		assert.Equal(t, []event.EventKind{event.EventBlocked, event.EventUnblocked}, events)

		lines := log.String()
		b.Notify(true)
		b.Notify(false)
		b.Notify(true)
		b.end()
		b.Notify(false)
		time.Sleep(time.Minute)
		assert.Equal(t, lines, log.String())
		assert.Equal(t, []event.EventKind{event.EventBlocked, event.EventUnblocked, event.EventBlocked, event.EventUnblocked, event.EventBlocked}, events)
	})
}
