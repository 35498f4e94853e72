package desk_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/operate/httpapi"
)

// failing is an HTTP API some of whose paths fail.
type failing struct {
	check.Reader
	paths map[string]error
}

func (f failing) Get(ctx context.Context, path string) ([]byte, error) {
	if err, ok := f.paths[path]; ok {
		return []byte("[{"), err
	}
	return f.Reader.Get(ctx, path)
}

// A survey has the broker's alarms, as far as the user may see them. An API that fails isn't an
// alarm.
func TestASurveyHasTheAlarms(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	server := httptest.NewServer(broker.HTTPHandler())
	t.Cleanup(server.Close)
	api, err := httpapi.New(strings.Replace(server.URL, "http://", "http://guest:guest@", 1), "/", httpapi.Config{})
	require.NoError(t, err)
	alarms := func(paths map[string]error) []desk.Alarm {
		t.Helper()
		d, err := desk.New(conn, desk.Config{HTTP: failing{api, paths}, Logger: quiet})
		require.NoError(t, err)
		s, err := d.Survey(t.Context(), desk.SurveyConfig{CountsOnly: true})
		require.NoError(t, err)
		return s.Alarms
	}
	const check = "/health/checks/alarms"
	assert.Empty(t, alarms(nil))
	assert.Empty(t, alarms(map[string]error{check: errors.New("no"), "/nodes": nil}))
	assert.Empty(t, alarms(map[string]error{check: declare.ErrUnavailable}), "the nodes have none")
	assert.Empty(t, alarms(map[string]error{check: declare.ErrForbidden}))

	broker.SetMemoryAlarm(true)
	broker.SetDiskAlarm(true)
	all := alarms(nil)
	require.Len(t, all, 2)
	assert.Equal(t, "memory", all[0].Resource)
	assert.Equal(t, "disk", all[1].Resource)
	assert.NotEmpty(t, all[0].Node)
	assert.Equal(t, []desk.Alarm{{}}, alarms(map[string]error{"/nodes": fmt.Errorf("no tag: %w", declare.ErrForbidden)}), "the user may not see the nodes")
	assert.Empty(t, alarms(map[string]error{"/nodes": declare.ErrUnavailable}), "the API is down")
	assert.Empty(t, alarms(map[string]error{"/nodes": nil}), "a reply that isn't JSON")
	broker.SetDiskAlarm(false)
	assert.Equal(t, all[:1], alarms(nil))
	broker.SetMemoryAlarm(false)
	assert.Empty(t, alarms(nil))
}

// A list has the application properties as text if it is asked for them. What a sender wrote is
// bounded.
func TestAListHasPropertyTexts(t *testing.T) {
	t.Parallel()
	quiet := slog.New(slog.DiscardHandler)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial, Logger: quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "dead", DeliveryLimit: declare.Unlimited, DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[int](t.Context(), conn, address.Queue("dead"), client.PublisherConfig{})
	require.NoError(t, err)
	long := strings.Repeat("n", 1001)
	require.NoError(t, p.PublishAll(t.Context(), []int{0, 1, 2}, func(i int, m *client.Message) {
		switch i {
		case 0:
			m.ApplicationProperties = map[string]any{"tenant": "a", "n": int64(42), "f": true, "long": strings.Repeat("é", 1000), long: "x", "": "empty"}
		case 1:
			m.ApplicationProperties = map[string]any{}
			for k := range 300 {
				m.ApplicationProperties[fmt.Sprint("k", k)] = k
			}
		}
	}))
	d, err := desk.New(conn, desk.Config{Logger: quiet})
	require.NoError(t, err)
	l, err := d.List(t.Context(), desk.ListConfig{Queue: "dead", PropertyTexts: true})
	require.NoError(t, err)
	require.Len(t, l.Messages, 3)
	assert.Equal(t, map[string]string{"tenant": "a", "n": "42", "f": "true", "long": strings.Repeat("é", 500), "": "empty"}, l.Messages[0].PropertyTexts)
	assert.Len(t, l.Messages[1].PropertyTexts, 100)
	assert.Empty(t, l.Messages[2].PropertyTexts)
	l, err = d.List(t.Context(), desk.ListConfig{Queue: "dead"})
	require.NoError(t, err)
	assert.Nil(t, l.Messages[0].PropertyTexts)
}
