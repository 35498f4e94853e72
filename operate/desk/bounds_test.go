package desk_test

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/operate/desk"
)

// A page and a survey hold little of each message, however much of it is in its properties.
func TestAPageIsBoundedInBytes(t *testing.T) {
	if explore.UnderRace {
		t.Skip("memory is measured without the race detector")
	}
	const n = 40
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "orders.dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("orders.dead"), client.PublisherConfig{})
	require.NoError(t, err)
	long := strings.Repeat("x", 256<<10)
	for i := range n {
		text := fmt.Sprint(i, long)
		require.NoError(t, p.Publish(t.Context(), i, func(m *client.Message) {
			m.Properties.MessageID, m.Properties.ContentType = text, &text
			m.ApplicationProperties = map[string]any{"p": text}
			m.Annotations = map[any]any{"x-last-death-reason": "rejected", client.AnnotationReason: text, "x-last-death-queue": text}
		}))
	}
	d, err := desk.New(conn, desk.Config{Logger: quiet})
	require.NoError(t, err)
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	_, err = d.List(t.Context(), desk.ListConfig{Queue: "orders.dead", Limit: 1}) // so that the broker has counted deliveries
	require.NoError(t, err)
	before := heap()
	l, err := d.List(t.Context(), desk.ListConfig{Queue: "orders.dead", PropertyTexts: true})
	require.NoError(t, err)
	s, err := d.Survey(t.Context(), desk.SurveyConfig{Queues: []string{"orders.dead"}})
	require.NoError(t, err)
	assert.Less(t, heap()-before, int64(4<<20), "of %d messages that each have 5 texts of 256 KiB", n)
	require.Len(t, l.Messages, n)
	require.Len(t, s.Groups, n)
	assert.Len(t, l.Messages[0].MessageID, 1000)
	assert.True(t, strings.HasPrefix(l.Messages[n-1].MessageID, fmt.Sprint(n-1, "x")))

	// The message has all of it.
	m, err := d.Show(t.Context(), desk.ShowConfig{Queue: "orders.dead", ID: l.Messages[0].ID})
	require.NoError(t, err)
	assert.Equal(t, "0"+long, m.MessageID)
}
