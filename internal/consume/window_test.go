package consume

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// Where there are as many workers as the window is large, credit is granted for all that
// is settled at once, and not one by one. Nothing is left ungranted at the end.
func TestSettlementsThatComeTogetherAreGrantedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		sess, err := b.Open(t.Context())
		require.NoError(t, err)
		link, err := sess.Receiver(t.Context(), "/queues/q", link.ReceiverOptions{})
		require.NoError(t, err)
		const limit = 16
		w := NewWindow(link, nil, nil, limit, limit)
		w.Grant()
		settle := func(n int) {
			for range n {
				w.Received(w.Quiet)
			}
			for i := range n {
				w.Settled(i < n-1)
			}
		}
		settle(1)
		settle(limit / 2)
		settle(limit)
		assert.Equal(t, []string{"credit 16", "credit 1", "credit 8", "credit 8", "credit 8"}, b.History("credit"), "half a window at the most")
		w.Received(w.Quiet)
		w.Settled(true)
		assert.Len(t, b.History("credit"), 5)
		w.Grant()
		assert.Len(t, b.History("credit"), 6)
		sess.Close(t.Context())
	})
}
