package client

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/deathlog"
	"github.com/hopback/hopback/internal/frames"
)

// dead is a message as it is read from a failed queue.
func dead(t testing.TB, fold bool) *Message {
	death := frames.Map{{Key: frames.Symbol("queue"), Value: "orders"}, {Key: frames.Symbol("reason"), Value: frames.Symbol("rejected")}}
	b, err := (&frames.Message{
		Annotations: frames.Map{
			{Key: frames.Symbol("x-last-death-queue"), Value: "orders"}, {Key: frames.Symbol("x-opt-deaths"), Value: frames.Array{Elements: []any{death}}},
			{Key: frames.Symbol("x-exchange"), Value: ""}, {Key: frames.Symbol("x-opt-own"), Value: int64(1)},
		},
		Body: []byte{0, 0x53, 0x75, 0xa0, 1, 'b'},
	}).Append(nil)
	require.NoError(t, err)
	if fold {
		frames.Fold(b)
	}
	m := &Message{}
	require.NoError(t, m.UnmarshalBinary(b))
	return m
}

// Central reads less than what everybody else is shown.
func TestFoldedAnnotationsAreShownAsTheyWere(t *testing.T) {
	t.Parallel()
	whole, folded := dead(t, false), dead(t, true)
	require.Len(t, folded.Annotations, 2)
	d := NewDelivery("failed", folded)
	for key, v := range whole.Annotations {
		assert.Equal(t, v, d.Annotation(key.(string)), key)
	}
	assert.Nil(t, d.Annotation("x-first-death-queue"))
	assert.Same(t, folded, deathlog.Peek(d))
	var all sync.WaitGroup
	for range 4 { // none of them writes what another reads
		all.Go(func() {
			assert.Equal(t, whole, d.Message())
			assert.Len(t, deathlog.Peek(d).(*Message).Annotations, 2)
		})
	}
	all.Wait()
	assert.Same(t, d.Message(), d.Message())
	assert.Equal(t, whole.Annotations["x-opt-own"], Copy(folded).Annotations["x-opt-own"])
	assert.Len(t, Copy(folded).Annotations, 1)
	ctx := WithDelivery(t.Context(), d)
	assert.Nil(t, Draining(ctx))

	// What go-amqp can't decode leaves the texts.
	broken := *folded
	broken.Annotations = map[any]any{deathlog.FoldedKey: "\x01\xe0\x05\x01\xc1\x02\x01\x00\x02\xa1\x01x\x08\xa1\x01q"}
	d = NewDelivery("failed", &broken)
	assert.Equal(t, "q", d.Message().Annotations["x-last-death-queue"])
	assert.Equal(t, "x", d.Annotation("x-exchange"))
	assert.Nil(t, d.Annotation("x-opt-deaths"))
	for _, nonsense := range []any{"", "\x01", 5, "\xff\xff"} {
		d = NewDelivery("failed", &Message{Annotations: map[any]any{deathlog.FoldedKey: nonsense}})
		assert.Empty(t, d.Message().Annotations)
	}
}
