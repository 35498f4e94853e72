package link

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
		o := &blockages{}
		log := &lines{}
		b := &Blockage{Log: log.logger()}
		b.Notify(false)
		b.Notify(true) // before the connection is the live one
		time.Sleep(time.Minute)
		assert.Empty(t, log.String())
		b.Start(Place{Node: "rabbit@a"}, o)
		time.Sleep(noticeAfter + time.Second)
		assert.Contains(t, log.String(), "the broker accepts no messages")
		assert.Contains(t, log.String(), "rabbit@a")
		b.Notify(false)
		b.Notify(false)
		synctest.Wait()
		assert.Contains(t, log.String(), "accepts messages again")
		assert.Equal(t, []string{"blocked", "unblocked"}, o.all)

		lines := log.String()
		b.Notify(true)
		b.Notify(false)
		b.Notify(true)
		b.end()
		b.Notify(false)
		time.Sleep(time.Minute)
		assert.Equal(t, lines, log.String())
		assert.Equal(t, []string{"blocked", "unblocked", "blocked", "unblocked", "blocked"}, o.all)
	})
}

// blockages is an Observer that hears of nothing else.
type blockages struct {
	Observer
	all []string
}

func (o *blockages) Blocked(Place)                  { o.all = append(o.all, "blocked") }
func (o *blockages) Unblocked(Place, time.Duration) { o.all = append(o.all, "unblocked") }
