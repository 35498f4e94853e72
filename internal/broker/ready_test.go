package broker

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	saslHeader     = "AMQP\x03\x01\x00\x00"
	saslMechanisms = "\x00\x00\x00\x10\x02\x01\x00\x00\x00\x53\x40\xc0\x03\x01\xe0\x00"
	saslWelcome    = "\x00\x00\x00\x10\x02\x01\x00\x00\x00\x53\x44\xc0\x03\x01\x50\x00"
	saslRefused    = "\x00\x00\x00\x10\x02\x01\x00\x00\x00\x53\x44\xc0\x03\x01\x50\x01"
)

// peer answers whatever it is sent with what was given.
type peer struct {
	io.Reader
	io.Writer
}

func TestLoginReadsEveryAnswer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ answer, err string }{
		"welcome":      {saslHeader + saslMechanisms + saslWelcome, ""},
		"refused":      {saslHeader + saslMechanisms + saslRefused, `login of user "me" refused, SASL code 1`},
		"AMQP 0-9-1":   {"AMQP\x00\x00\x09\x01", "not AMQP 1.0"},
		"closed":       {"", "protocol header"},
		"closed later": {saslHeader + saslMechanisms[:9], "SASL frame"},
		"huge frame":   {saslHeader + "\xff\xff\xff\xff\x02\x01\x00\x00", "a SASL frame of 4294967295 bytes"},
		"tiny frame":   {saslHeader + "\x00\x00\x00\x07\x02\x01\x00\x00", "a SASL frame of 7 bytes"},
		"empty frame":  {saslHeader + saslMechanisms + "\x00\x00\x00\x08\x02\x01\x00\x00", "unexpected answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u, err := url.Parse("amqp://me:pass@host")
			require.NoError(t, err)
			var sent strings.Builder
			err = saslPlain(peer{strings.NewReader(c.answer), &sent}, u)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			assert.Contains(t, sent.String(), "\xa3\x05PLAIN\xb0\x00\x00\x00\x08\x00me\x00pass")
		})
	}
}

func TestOverviewTellsTheVersion(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status       int
		body         string
		version, err string
	}{
		"good":       {200, `{"rabbitmq_version":"4.3.6","node":"x"}`, "4.3.6", ""},
		"refused":    {401, ``, "", "401"},
		"no version": {200, `{}`, "", "no rabbitmq_version"},
		"no JSON":    {200, `<html>`, "", "/api/overview"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				user, password, _ := r.BasicAuth()
				assert.Equal(t, "me pass /api/overview", user+" "+password+" "+r.URL.Path)
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.body)
			}))
			defer s.Close()
			got, err := overview(t.Context(), strings.Replace(s.URL, "://", "://me:pass@", 1))
			assert.Equal(t, c.version, got)
			if c.err != "" {
				assert.ErrorContains(t, err, c.err)
			} else {
				assert.NoError(t, err)
			}
		})
	}
}

func TestProbeOfASilentBrokerEnds(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		conn, err := ln.Accept()
		if err == nil {
			_, _ = io.ReadFull(conn, make([]byte, 8))
			cancel()
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	_, err = probe(ctx, "amqp://"+ln.Addr().String(), "http://127.0.0.1:1")
	assert.ErrorContains(t, err, "AMQP: ")
}
