package link

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"

	"github.com/hopback/hopback/internal/failure"
)

func TestEndpointsFromURLs(t *testing.T) {
	for _, c := range []struct {
		url  string
		want Endpoint
	}{
		{"amqp://localhost", Endpoint{address: "localhost:5672", host: "localhost", vhost: "/", sasl: PlainLogin("guest", "guest"), Shown: "amqp://localhost"}},
		{"amqp://localhost/", Endpoint{address: "localhost:5672", host: "localhost", vhost: "/", sasl: PlainLogin("guest", "guest"), Shown: "amqp://localhost/"}},
		{"amqps://u:secret@broker:1234/%2F", Endpoint{address: "broker:1234", host: "broker", vhost: "/", tls: true, sasl: PlainLogin("u", "secret"), Shown: "amqps://u:xxxxx@broker:1234/%2F"}},
		{"amqps://broker/team%40prod", Endpoint{address: "broker:5671", host: "broker", vhost: "team@prod", tls: true, sasl: PlainLogin("guest", "guest"), Shown: "amqps://broker/team%40prod"}},
		{"amqp://u:p%40ss%2Fw%23%3F@[::1]/v%2Fw", Endpoint{address: "[::1]:5672", host: "::1", vhost: "v/w", sasl: PlainLogin("u", "p@ss/w#?"), Shown: "amqp://u:xxxxx@[::1]/v%2Fw"}},
		{"amqp://u@host", Endpoint{address: "host:5672", host: "host", vhost: "/", sasl: PlainLogin("u", ""), Shown: "amqp://u@host"}},
	} {
		ep, err := ParseEndpoint("url", c.url, Credentials{})
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
		_, err := ParseEndpoint("url", url, Credentials{})
		require.ErrorAs(t, err, new(*argument.Error), "%q", url)
		assert.NotContains(t, err.Error(), "secret", "%q", url)
		assert.True(t, failure.SafeToRetry(err))
	}
	_, err := ParseEndpoint("url", "amqp://localhost", Credentials{Mechanism: "EXTERNAL"})
	assert.ErrorContains(t, err, "amqps")
}

func FuzzParseEndpoint(f *testing.F) {
	for _, url := range []string{"amqp://u:PASSWORD@host:5672/v", "u:PASSWORD@host", "amqp://u:1#PASSWORD@h", "amqps://[::1]/%2F", "amqp:PASSWORD"} {
		f.Add(url)
	}
	f.Fuzz(func(t *testing.T, url string) {
		ep, err := ParseEndpoint("url", url, Credentials{})
		if err != nil {
			require.ErrorAs(t, err, new(*argument.Error))
		} else {
			require.NotEmpty(t, ep.address)
			require.NotEmpty(t, ep.vhost)
			if ep.sasl.password != "guest" && len(ep.sasl.password) > 8 {
				assert.NotContains(t, strings.TrimPrefix(ep.Shown, "amqps://"), ":"+ep.sasl.password+"@")
			}
		}
		// A password that is written as in a URL is never repeated, no matter what is before and after it.
		for _, s := range []string{"amqp://u:PASSWORD" + url + "@h", "u:" + url + "PASSWORD@h", "amqp://u:" + url + "PASSWORD@h"} {
			if ep, err := ParseEndpoint("url", s, Credentials{}); err != nil {
				assert.NotContains(t, err.Error(), "PASSWORD", "%q", s)
			} else {
				assert.NotContains(t, ep.Shown, "PASSWORD", "%q", s)
			}
		}
	})
}
