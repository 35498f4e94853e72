package link

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
)

// A receiver whose consumer always lags behind doesn't keep room for all deliveries that have come.
func TestAReceiversQueueIsAsLargeAsWhatWaits(t *testing.T) {
	t.Parallel()
	l := newWireReceiver(&WireSession{w: &Wire{}}, new(atomic.Uint64))
	d := &engine.Delivery{Payload: []byte{0, 0x53, 0x75, 0xa0, 1, 'm'}}
	for range 3 {
		l.Delivered(d)
	}
	for range 5000 {
		l.Delivered(d)
		a, ok := l.Prefetched()
		require.True(t, ok)
		require.False(t, a.Unreadable)
	}
	assert.Equal(t, 3, l.queue.Len())
	assert.LessOrEqual(t, l.queue.Cap(), 16)
}
