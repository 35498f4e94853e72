package client

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Where there are as many workers as the window is large, credit is granted for all that
// is settled at once, and not one by one. Nothing is left ungranted at the end.
func TestSettlementsThatComeTogetherAreGrantedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBroker(t)
		sess, err := b.open(t.Context())
		require.NoError(t, err)
		link, err := sess.receiver(t.Context(), "/queues/q", receiverOptions{})
		require.NoError(t, err)
		const limit = 16
		w := newWindow(link, nil, nil, limit, limit)
		w.grant()
		settle := func(n int) {
			for range n {
				w.received(w.quiet)
			}
			for i := range n {
				w.settled(i < n-1)
			}
		}
		settle(1)
		settle(limit / 2)
		settle(limit)
		assert.Equal(t, []string{"credit 16", "credit 1", "credit 8", "credit 8", "credit 8"}, b.history("credit"), "half a window at the most")
		w.received(w.quiet)
		w.settled(true)
		assert.Len(t, b.history("credit"), 5)
		w.grant()
		assert.Len(t, b.history("credit"), 6)
		sess.close(t.Context())
	})
}
