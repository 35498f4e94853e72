package rabbitmq

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
		"no JSON":    {200, `<html>`, "", "/overview"},
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
