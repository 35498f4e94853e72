package client

import (
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
)

func TestConfigDefaultsAndRefusals(t *testing.T) {
	c, err := Config{}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, 15*time.Second, c.ConnectTimeout)
	assert.Equal(t, 30*time.Second, c.IdleTimeout)
	assert.Equal(t, ReconnectBackoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}, c.Reconnect)
	assert.NotNil(t, c.Logger)
	other, err := Config{}.withDefaults()
	require.NoError(t, err)
	assert.NotEqual(t, c.Name, other.Name, "two clients of one program have different names")

	c, err = Config{Reconnect: ReconnectBackoff{Min: time.Minute}}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, ReconnectBackoff{Min: time.Minute, Max: time.Minute}, c.Reconnect)

	for _, c := range []Config{
		{ConnectTimeout: -1}, {IdleTimeout: -1}, {Reconnect: ReconnectBackoff{Min: -1}}, {Reconnect: ReconnectBackoff{Max: -1}},
		{IdleTimeout: time.Millisecond}, {MaxMessageSize: -1}, {Name: "\xff"}, {Name: strings.Repeat("n", 256)},
	} {
		_, err := c.withDefaults()
		require.ErrorAs(t, err, new(*argument.Error), "%+v", c)
	}
	_, err = Config{TLS: &tls.Config{MinVersion: tls.VersionTLS13}}.withDefaults()
	require.NoError(t, err)
}

func TestConsumerConfigDefaults(t *testing.T) {
	for _, c := range []struct{ given, want ConsumerConfig }{
		{ConsumerConfig{}, ConsumerConfig{Concurrency: 1, Prefetch: 1024, Grace: 30 * time.Second, ForwardPatience: 30 * time.Second, PrefetchBytes: 64 << 20, near: 64}},
		{ConsumerConfig{Concurrency: 100}, ConsumerConfig{Concurrency: 100, Prefetch: 1024, Grace: 30 * time.Second, ForwardPatience: 30 * time.Second, PrefetchBytes: 64 << 20, near: 200}},
		{ConsumerConfig{Prefetch: 1, Grace: 1, ForwardPatience: 2}, ConsumerConfig{Concurrency: 1, Prefetch: 1, PrefetchBytes: 64 << 20, Grace: 1, ForwardPatience: 2}},
		{ConsumerConfig{Prefetch: 1, PrefetchBytes: 1, Grace: 1, ForwardPatience: 2}, ConsumerConfig{Concurrency: 1, Prefetch: 1, PrefetchBytes: 1, Grace: 1, ForwardPatience: 2}},
	} {
		got, err := c.given.withDefaults()
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
}

func TestARefusedEndpointIsNamed(t *testing.T) {
	_, err := Connect(t.Context(), "amqp://localhost", Config{Endpoints: []string{"amqp://a", "nonsense"}})
	assert.ErrorContains(t, err, "Config.Endpoints[1]")
}
