package client

import (
	"strings"
	"testing"

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
	_, err := parseEndpoint("url", "amqp://localhost", credentials{mechanism: "EXTERNAL"})
	assert.ErrorContains(t, err, "amqps")
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
