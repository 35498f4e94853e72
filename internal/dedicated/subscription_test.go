package dedicated

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/frames"
)

// texts takes batches until there are n messages, and copies them.
func texts(ctx context.Context, t *testing.T, s *Subscription, n int) (all []string) {
	t.Helper()
	for len(all) < n {
		batch, err := s.Next(ctx)
		require.NoError(t, err)
		require.NotEmpty(t, batch)
		for _, b := range batch {
			all = append(all, string(b.Payload))
		}
	}
	return all
}

// Messages come in order, in parts or whole, and credit is granted again by halves. What
// is larger than a chunk has separate memory.
func TestSubscription(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("l", chunkSize)
	huge := strings.Repeat("h", (32 << 10))
	c, ctx := serve(t, func(b *fakeBroker) {
		a := b.attached(0)
		assert.Equal(b.t, frames.Some(uint8(1)), a.SenderSettleMode, "the broker settles")
		f := b.asked()
		assert.Equal(b.t, uint32(4), f.LinkCredit.Value)
		assert.Equal(b.t, uint32(0xffffffff), f.DeliveryCount.Value)
		b.deliver(0, "one")
		b.deliver(1, "t", "w", "o")
		b.put(&frames.Transfer{Handle: 40, DeliveryID: frames.Some(uint32(2)), More: true}, []byte("half")...)
		b.put(&frames.Transfer{Handle: 40, Aborted: true})
		b.deliver(3, large[:chunkSize/2], large[chunkSize/2:])
		f = b.asked()
		for id := uint32(4); f != nil && id < 20; f = b.asked() {
			left := f.DeliveryCount.Value + f.LinkCredit.Value - (id - 1) // the aborted one counts
			for range left {
				b.deliver(id, huge)
				id++
			}
		}
		b.put(&frames.Detach{Handle: 40, Closed: true, Error: &frames.Error{Condition: "amqp:resource-deleted"}})
		b.get()
	})
	s, err := c.Subscribe(ctx, "/queues/s", frames.Map{{Key: frames.Symbol("f"), Value: "x"}}, 4, 16<<20)
	require.NoError(t, err)
	v, _ := s.Filter().Get("f")
	assert.Equal(t, "x", v)
	got := texts(ctx, t, s, 3+8)
	assert.Equal(t, []string{"one", "two", large}, got[:3])
	for _, text := range got[3:] {
		assert.Equal(t, huge, text)
	}
	var refused *RefusedError
	for err == nil {
		_, err = s.Next(ctx)
	}
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "amqp:resource-deleted", refused.Condition)
}

// A broker that sends more than it may ends the subscription, and so does one that sends
// what wasn't subscribed to.
func TestSubscriptionToAHostileBroker(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]func(b *fakeBroker){
		"too many":     func(b *fakeBroker) { b.attached(0); b.asked(); b.deliverAtOnce(3) },
		"unknown link": func(b *fakeBroker) { b.attached(0); b.asked(); b.put(&frames.Transfer{Handle: 9}, 'x') },
		"rubbish": func(b *fakeBroker) {
			b.attached(0)
			b.asked()
			_, _ = b.net.Write([]byte("\x00\x00\x00\x10\x02\x00\x00\x00\x00\x53\x14rubbi"))
		},
		"its end":        func(b *fakeBroker) { b.attached(0); b.asked(); _ = b.net.Close() },
		"end of a drain": func(b *fakeBroker) { b.attached(0); b.drained(b.asked()); _ = b.net.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, ctx := serve(t, script)
			s, err := c.Subscribe(ctx, "/queues/s", nil, 2, 16<<20)
			for err == nil {
				_, err = s.Next(ctx)
			}
			require.Error(t, err)
			require.NoError(t, ctx.Err())
		})
	}
}

// deliverAtOnce sends n messages in one write.
func (b *fakeBroker) deliverAtOnce(n uint32) {
	var out []byte
	for id := range n {
		out, _ = frames.Append(out, frames.Frame{Body: &frames.Transfer{Handle: 40, DeliveryID: frames.Some(id), DeliveryTag: []byte{1}}, Payload: []byte("m")})
	}
	_, _ = b.net.Write(out)
}
