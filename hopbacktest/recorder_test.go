package hopbacktest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

func TestRecorderRecordsWhatWouldBeSent(t *testing.T) {
	t.Parallel()
	var r hopbacktest.Recorder[map[string]int]
	var p hopbacktest.Publisher[map[string]int] = &r
	require.NoError(t, p.Publish(t.Context(), map[string]int{"a": 1}, client.PublishTo(address.Queue("orders")), nil))
	all := r.Published()
	require.Len(t, all, 1)
	assert.Equal(t, map[string]int{"a": 1}, all[0].Value)
	body, err := client.Body(all[0].Message)
	require.NoError(t, err)
	assert.JSONEq(t, `{"a":1}`, string(body))
	assert.Equal(t, "/queues/orders", *all[0].Message.Properties.To)
	assert.NotEmpty(t, all[0].Message.Properties.MessageID)
	assert.False(t, all[0].Time.IsZero())
	require.NoError(t, r.Wait(t.Context(), 1))
	r.Reset()
	assert.Empty(t, r.Values())
}

func TestRecorderRefusesWhatAPublisherRefuses(t *testing.T) {
	t.Parallel()
	full := errors.New("full")
	r := hopbacktest.Recorder[any]{Fail: func(v any) error {
		if v == "third" {
			return full
		}
		return nil
	}}
	spoil := func(m *client.Message) { m.Annotations = map[any]any{1: nil} }
	var bad *argument.Error
	require.ErrorAs(t, r.Publish(t.Context(), "first", spoil), &bad)
	require.ErrorAs(t, r.Publish(t.Context(), (*client.Message)(nil)), &bad)
	require.Error(t, r.Publish(t.Context(), make(chan int)))
	err := r.PublishAll(t.Context(), []any{"second", "third", "fourth"}, func(_ any, m *client.Message) { m.Properties.MessageID = "id" })
	var batch *client.BatchError
	require.ErrorAs(t, err, &batch)
	assert.Equal(t, []client.BatchFailure{{Index: 1, ID: "id", Err: full}}, batch.Failed)
	assert.Equal(t, []any{"second", "fourth"}, r.Values())
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, r.Publish(ended, "late"), client.ErrNotSent)
	require.ErrorIs(t, r.Wait(ended, 3), context.Canceled)

	m := client.NewMessage([]byte("body"))
	m.ApplicationProperties = map[string]any{"a": "b"}
	require.NoError(t, r.Publish(t.Context(), m, func(m *client.Message) { m.ApplicationProperties["a"] = "c" }))
	assert.Equal(t, "b", m.ApplicationProperties["a"], "an edit doesn't show in the caller's message")
}
