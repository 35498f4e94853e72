package client_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// A canceled ctx sends nothing, each time.
func TestPublishWithACanceledContextSendsNothing(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := client.Connect(t.Context(), b.URL(), client.Config{Dial: b.Dial})
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	p, err := client.NewPublisher[string](t.Context(), conn, address.Queue("q"), client.PublisherConfig{})
	require.NoError(t, err)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for range 200 {
		require.ErrorIs(t, p.Publish(canceled, "one"), client.ErrNotSent)
		require.ErrorIs(t, p.PublishAll(canceled, []string{"two", "three"}), client.ErrNotSent)
	}
	require.NoError(t, p.Close(t.Context()))
	assert.Empty(t, b.Queue("q").Messages())
}
