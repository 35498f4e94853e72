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

func TestEndpointsFromURLs(t *testing.T) {
	for _, c := range []struct {
		url  string
		want endpoint
	}{
		{"amqp://localhost", endpoint{address: "localhost:5672", host: "localhost", vhost: "/", sasl: plainLogin("guest", "guest"), shown: "amqp://localhost"}},
		{"amqp://localhost/", endpoint{address: "localhost:5672", host: "localhost", vhost: "/", sasl: plainLogin("guest", "guest"), shown: "amqp://localhost/"}},
		{"amqps://u:secret@broker:1234/%2F", endpoint{address: "broker:1234", host: "broker", vhost: "/", tls: true, sasl: plainLogin("u", "secret"), shown: "amqps://u:xxxxx@broker:1234/%2F"}},
		{"amqps://broker/team%40prod", endpoint{address: "broker:5671", host: "broker", vhost: "team@prod", tls: true, sasl: plainLogin("guest", "guest"), shown: "amqps://broker/team%40prod"}},
		{"amqp://u:p%40ss%2Fw%23%3F@[::1]/v%2Fw", endpoint{address: "[::1]:5672", host: "::1", vhost: "v/w", sasl: plainLogin("u", "p@ss/w#?"), shown: "amqp://u:xxxxx@[::1]/v%2Fw"}},
		{"amqp://u@host", endpoint{address: "host:5672", host: "host", vhost: "/", sasl: plainLogin("u", ""), shown: "amqp://u@host"}},
	} {
		ep, err := parseEndpoint("url", c.url, credentials{})
		require.NoError(t, err, c.url)
		assert.Equal(t, c.want, ep, c.url)
	}
}

func TestURLsThatAreRefusedKeepTheirPassword(t *testing.T) {
	for _, url := range []string{
		"", "://", "host:5672", "localhost", "http://u:secret@host", "amqp://", "amqp:///v", "amqp://u:secret@/v",
		"u:secret@host", "//u:secret@host", "amqp:u:secret@host", "amqp:secret",
		"amqp://u:12#secret@host", "amqp://u:12?secret@host", "amqp://u:12/secret@host", "amqp://u:1@secret/x@host",
		"amqp://u:secret#1@host", "amqp://u:secret/1@host", "amqp://u:sec ret@host", "amqp://u:%zzsecret@host",
		"amqp://u:secret@host/a/b", "amqp://host/v?password=secret", "amqp://host/v#secret",
		"amqp://u:secret%00@host", "amqp://u:secret%ff@host", "amqp://u:secret@host:port", "amqp://u:secret@host/%ff", "amqp://u:secret@ho st",
		"\x00amqp://u:secret@host",
	} {
		_, err := parseEndpoint("url", url, credentials{})
		require.ErrorAs(t, err, new(*argument.Error), "%q", url)
		assert.NotContains(t, err.Error(), "secret", "%q", url)
		assert.True(t, SafeToRetry(err))
	}
	_, err := Connect(t.Context(), "amqp://localhost", Config{Endpoints: []string{"amqp://a", "nonsense"}})
	assert.ErrorContains(t, err, "Config.Endpoints[1]")
	_, err = parseEndpoint("url", "amqp://localhost", External().login)
	assert.ErrorContains(t, err, "amqps")
}

func TestConfigDefaultsAndRefusals(t *testing.T) {
	c, err := Config{}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, 15*time.Second, c.ConnectTimeout)
	assert.Equal(t, 30*time.Second, c.IdleTimeout)
	assert.Equal(t, ReconnectBackoff{100 * time.Millisecond, 10 * time.Second}, c.Reconnect)
	assert.NotNil(t, c.Logger)
	other, err := Config{}.withDefaults()
	require.NoError(t, err)
	assert.NotEqual(t, c.Name, other.Name, "two clients of one program are told apart")

	c, err = Config{Reconnect: ReconnectBackoff{Min: time.Minute}}.withDefaults()
	require.NoError(t, err)
	assert.Equal(t, ReconnectBackoff{time.Minute, time.Minute}, c.Reconnect)

	for _, c := range []Config{
		{ConnectTimeout: -1}, {IdleTimeout: -1}, {Reconnect: ReconnectBackoff{Min: -1}}, {Reconnect: ReconnectBackoff{Max: -1}},
		{IdleTimeout: time.Millisecond}, {Name: "\xff"}, {Name: strings.Repeat("n", 256)},
	} {
		_, err := c.withDefaults()
		require.ErrorAs(t, err, new(*argument.Error), "%+v", c)
	}
	_, err = Config{TLS: &tls.Config{MinVersion: tls.VersionTLS13}}.withDefaults()
	require.NoError(t, err)
}

func TestConsumerConfigDefaults(t *testing.T) {
	for _, c := range []struct{ given, want ConsumerConfig }{
		{ConsumerConfig{}, ConsumerConfig{Concurrency: 1, Prefetch: 1024, Grace: 30 * time.Second, ForwardPatience: 30 * time.Second, near: 64}},
		{ConsumerConfig{Concurrency: 100}, ConsumerConfig{Concurrency: 100, Prefetch: 1024, Grace: 30 * time.Second, ForwardPatience: 30 * time.Second, near: 200}},
		{ConsumerConfig{Prefetch: 1, Grace: 1, ForwardPatience: 2}, ConsumerConfig{Concurrency: 1, Prefetch: 1, Grace: 1, ForwardPatience: 2}},
	} {
		got, err := c.given.withDefaults()
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
}

func FuzzParseEndpoint(f *testing.F) {
	for _, url := range []string{"amqp://u:PASSWORD@host:5672/v", "u:PASSWORD@host", "amqp://u:1#PASSWORD@h", "amqps://[::1]/%2F", "amqp:PASSWORD"} {
		f.Add(url)
	}
	f.Fuzz(func(t *testing.T, url string) {
		ep, err := parseEndpoint("url", url, credentials{})
		if err != nil {
			require.ErrorAs(t, err, new(*argument.Error))
		} else {
			require.NotEmpty(t, ep.address)
			require.NotEmpty(t, ep.vhost)
			if ep.sasl.password != "guest" && len(ep.sasl.password) > 8 {
				assert.NotContains(t, strings.TrimPrefix(ep.shown, "amqps://"), ":"+ep.sasl.password+"@")
			}
		}
		// A password that is written as in a URL is never repeated, whatever is
		// before and after it.
		for _, s := range []string{"amqp://u:PASSWORD" + url + "@h", "u:" + url + "PASSWORD@h", "amqp://u:" + url + "PASSWORD@h"} {
			if ep, err := parseEndpoint("url", s, credentials{}); err != nil {
				assert.NotContains(t, err.Error(), "PASSWORD", "%q", s)
			} else {
				assert.NotContains(t, ep.shown, "PASSWORD", "%q", s)
			}
		}
	})
}
