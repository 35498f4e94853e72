package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// A blockage is logged once it lasts, and its end once the broker has said so. The end of
// the connection isn't that.
func TestBlockageIsLoggedOnceItLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []eventKind
		log := &lines{}
		b := &blockage{log: log.logger()}
		b.tell(false)
		b.tell(true) // before the connection is the live one
		time.Sleep(time.Minute)
		assert.Empty(t, log.String())
		b.start("rabbit@a", func(e stateEvent) { events = append(events, e.Kind) })
		time.Sleep(noticeAfter + time.Second)
		assert.Contains(t, log.String(), "the broker accepts no messages")
		assert.Contains(t, log.String(), "rabbit@a")
		b.tell(false)
		b.tell(false)
		synctest.Wait()
		assert.Contains(t, log.String(), "accepts messages again")
		assert.Equal(t, []eventKind{eventBlocked, eventUnblocked}, events)

		lines := log.String()
		b.tell(true)
		b.tell(false)
		b.tell(true)
		b.end()
		b.tell(false)
		time.Sleep(time.Minute)
		assert.Equal(t, lines, log.String())
		assert.Equal(t, []eventKind{eventBlocked, eventUnblocked, eventBlocked, eventUnblocked, eventBlocked}, events)
	})
}
