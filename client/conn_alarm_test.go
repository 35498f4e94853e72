package client

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/failure"
)

// connectTo connects to a server of this package's tests, and returns the events.
func connectTo(t *testing.T, cfg Config, addrs ...string) (*Conn, chan Event) {
	t.Helper()
	limit := 30 * time.Second
	if cfg.PreferLeaderOf != "" { // the question isn't answered
		limit = 2 * time.Second
	}
	events := make(chan Event, 100)
	cfg.OnEvent = func(e Event) { events <- e }
	for _, addr := range addrs[1:] {
		cfg.Endpoints = append(cfg.Endpoints, "amqp://u:p@"+addr+"/")
	}
	c, err := Connect(within(t, limit), "amqp://u:p@"+addrs[0]+"/", cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(within(t, time.Second)) })
	return c, events
}

// The question which node leads a queue opens the first session, before the connection
// is the live one. An alarm that it meets is reported after Up, and so is its end.
func TestAlarmAtConnectIsReportedAfterUp(t *testing.T) {
	first, clear := alarmedServer(t)
	other := hostileServer(t, stepNever, nil)
	c, events := connectTo(t, Config{Logger: quiet, PreferLeaderOf: "q"}, first, other)
	for _, want := range []EventKind{EventUp, EventBlocked} {
		e := <-events
		assert.Equal(t, want, e.Kind)
		assert.EqualValues(t, 1, e.Generation)
	}
	assert.NotZero(t, c.State().BlockedSince)
	clear()
	p, err := NewPublisher[string](t.Context(), c, address.Queue("q"), PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), "m"))
	for e := range events {
		if e.Op == "connection" {
			assert.Equal(t, EventUnblocked, e.Kind, "%v", e)
			break
		}
	}
	assert.Zero(t, c.State().BlockedSince)
}

// A request that was made in an alarm is certainly unsent, and Close waits for nothing.
func TestConnClosesInAnAlarmAfterARequest(t *testing.T) {
	addr, _ := alarmedServer(t)
	log := &lines{}
	c, events := connectTo(t, Config{Logger: log.logger()}, addr)
	_, _, err := c.Management().Request(within(t, 200*time.Millisecond), "GET", "/queues/q", nil)
	require.ErrorIs(t, err, failure.ErrNotSent)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	closed := async(func() error { return c.Close(context.Background()) })
	select {
	case err := <-closed:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		t.Fatal("Close hangs")
	}
	for e := range events {
		assert.NotEqual(t, EventUnblocked, e.Kind, "the broker accepts no messages yet")
		if e.Kind == EventEnded && e.Op == "connection" {
			break
		}
	}
	assert.NotContains(t, log.String(), "accepts messages again")
}
