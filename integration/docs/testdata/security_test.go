package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// The page's openssl lines make certificates with which the page's program publishes to a broker
// in memory that speaks TLS and wants client certificates.
func TestTheProgramWithThePagesCertificates(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("page.md")
	require.NoError(t, err)
	_, script, ok := strings.Cut(string(page), "\n```sh\nopenssl ")
	require.True(t, ok)
	script, _, ok = strings.Cut(script, "\n```")
	require.True(t, ok)
	dir := t.TempDir()
	make := exec.CommandContext(t.Context(), "sh", "-e", "-c", "openssl "+script)
	make.Dir = dir
	out, err := make.CombinedOutput()
	require.NoError(t, err, "%s", out)

	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key"))
	require.NoError(t, err)
	config, err := tlsConfig(dir)
	require.NoError(t, err)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: config.RootCAs, MinVersion: tls.VersionTLS12})
	require.NoError(t, err)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	go func() { _ = broker.Serve(l) }()
	url := "amqps://guest:guest@" + l.Addr().String() + "/"

	require.NoError(t, publish(t.Context(), url, config))
	assert.Equal(t, 1, broker.Queue("orders").Counts().Ready)

	// What the page's table says about mistakes.
	fails := func(change func(*tls.Config)) error {
		c := config.Clone()
		change(c)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err := publish(ctx, url, c)
		require.Error(t, err)
		return err
	}
	quoted := func(err error, text string) {
		t.Helper()
		assert.ErrorContains(t, err, text)
		assert.Contains(t, string(page), "| `"+text+"` |")
	}
	err = fails(func(c *tls.Config) { c.RootCAs = x509.NewCertPool() })
	assert.ErrorIs(t, err, client.ErrTLS)
	quoted(err, "trust the authority of the broker's certificate in the TLS configuration")
	quoted(fails(func(c *tls.Config) { c.ServerName = "another.test" }), "use a host that the broker's certificate names, or set the server name in the TLS configuration")
	quoted(fails(func(c *tls.Config) { c.Certificates = nil }), "check the client certificate in the TLS configuration")
}

// The token comes from the server, and is asked for before the broker is.
func TestTokensComeFromTheServer(t *testing.T) {
	t.Parallel()
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := broker.Listen("127.0.0.1:0")
	require.NoError(t, err)
	_, host, _ := strings.Cut(url, "@")
	asked := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.FormValue("grant_type") + " " + r.FormValue("client_id")
		http.Error(w, "no", http.StatusUnauthorized)
	}))
	defer server.Close()
	_, err = connectWithToken(t.Context(), "amqp://"+host, server.URL, "worker", "secret")
	require.ErrorContains(t, err, "token: 401 Unauthorized")
	assert.Equal(t, "client_credentials worker", <-asked)

	// The broker in memory knows no tokens, and refuses them as RabbitMQ refuses a wrong one.
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("a.b.c\n"), 0o600))
	_, err = connectWithTokenFile(t.Context(), "amqp://"+host, file)
	require.ErrorIs(t, err, client.ErrAuthentication)
	require.ErrorContains(t, err, "the broker refused the OAuth 2 token; check its audience, scopes, and expiry")
}
