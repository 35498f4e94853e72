package cli_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestHelpOfDead(t *testing.T) {
	t.Parallel()
	for _, sub := range []string{"survey", "list", "show", "replay", "edit", "discard", "export", "import"} {
		r := world{env: map[string]string{"HOPBACK_URL": "amqp://me:secret@h", "HOPBACK_TOKEN": "secret"}}.run("dlq", sub, "--help")
		assert.Zero(t, r.code)
		assert.Contains(t, r.stdout, "Examples:", sub)
		assert.Contains(t, r.stdout, "hopback help connection", sub)
		assert.NotContains(t, r.stdout, "--token-file", sub)
		assert.NotContains(t, r.stdout, "secret", sub)
	}
}

// Errors of the command line are reported before anything connects.
func TestMisuseOfDead(t *testing.T) {
	t.Parallel()
	empty := file(t, "empty", "")
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"dlq", "lst"}, `did you mean "list"?`},
		{[]string{"dlq", "list"}, "write it as hopback dlq list QUEUE"},
		{[]string{"dlq", "list", ""}, "empty argument"},
		{[]string{"dlq", "list", "q", "--property", "x"}, "key=value"},
		{[]string{"dlq", "list", "q", "--match", "("}, "--match"},
		{[]string{"dlq", "list", "q", "--newer-than", "-1s"}, "negative"},
		{[]string{"dlq", "list", "q", "--newer-than", "1h", "--older-than", "2h"}, "use a shorter --older-than"},
		{[]string{"dlq", "list", "q", "--group", "nope"}, "hopback dlq survey"},
		{[]string{"dlq", "list", "q", "--min-replays", "2", "--max-replays", "1"}, "below --min-replays"},
		{[]string{"dlq", "list", "q", "--limit", "10001"}, "use 1 to 10000"},
		{[]string{"dlq", "list", "q", "--skip", "-1"}, "--skip is negative"},
		{[]string{"dlq", "list", "q", "--accept", "other-consumer"}, `did you mean "other-consumers"?`},
		{[]string{"dlq", "replay", "q"}, "add --all"},
		{[]string{"dlq", "discard", "q", "--dry-run"}, "add --all"},
		{[]string{"dlq", "replay", "q", "--to", "x", "--to-exchange"}, "choose one"},
		{[]string{"dlq", "edit", "q", "id"}, "changes nothing"},
		{[]string{"dlq", "edit", "q", "id", "--body", "/nowhere"}, "--body"},
		{[]string{"dlq", "edit", "q", "id", "--set", "x"}, "key=value"},
		{[]string{"dlq", "edit", "q", "id", "--set", "a\xff=b"}, "--set"},
		{[]string{"dlq", "edit", "q", "id", "--set", "a=b\xff"}, "--set"},
		{[]string{"dlq", "edit", "q", "id", "--set", strings.Repeat("a", 256) + "=b"}, "255 bytes"},
		{[]string{"dlq", "edit", "q", "id", "--content-type", "a\xff"}, "--content-type"},
		{[]string{"dlq", "edit", "q", "id", "--content-type", "naïve"}, "ASCII"},
		{[]string{"dlq", "edit", "q", "id", "--content-type", strings.Repeat("a", 256)}, "255 bytes"},
		{[]string{"dlq", "discard", "q", "--all"}, "--destroy"},
		{[]string{"dlq", "import", "/nowhere"}, "nowhere"},
		{[]string{"dlq", "list", "q", "--ca", "/nowhere"}, "--ca"},
		{[]string{"dlq", "list", "q", "--ca", empty}, "no certificate"},
		{[]string{"dlq", "list", "q", "--cert", empty}, "--cert"},
		{[]string{"dlq", "list", "q", "--key", empty}, "without --cert"},
		{[]string{"dlq", "list", "q", "--external"}, "needs a client certificate"},
		{[]string{"dlq", "list", "q", "--token-file", empty}, "the file is empty"},
		{[]string{"topology", "verify", "--token-file", "/nowhere"}, "--token-file"},
	} {
		r := world{env: map[string]string{"HOPBACK_URL": "amqp://u:secret@127.0.0.1:1/", "HOPBACK_MANAGEMENT_URL": "none"}}.run(c.args...)
		assert.Equal(t, 64, r.code, "%v: %s", c.args, r.stderr)
		assert.Contains(t, r.stderr, c.says, c.args)
		assert.NotContains(t, r.stderr, "secret", c.args)
	}
}

// --ca and --cert are used: a server with a private authority is trusted, and sees the
// client's certificate.
func TestPrivateAuthorityAndClientCertificate(t *testing.T) {
	t.Parallel()
	made := httptest.NewTLSServer(nil) // for its certificate
	made.Close()
	pair := made.TLS.Certificates[0]
	ca := file(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]})))
	seen := make(chan int, 10)
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12})
	if !assert.NoError(t, err) {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if t := c.(*tls.Conn); t.Handshake() == nil {
				seen <- len(t.ConnectionState().PeerCertificates)
			}
			_ = c.Close()
		}
	}()
	defer func() { _ = ln.Close(); <-done }()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	w := world{env: map[string]string{"HOPBACK_URL": "amqps://u:secret@127.0.0.1:" + port + "/", "HOPBACK_MANAGEMENT_URL": "none"}}

	r := w.run("dlq", "list", "q")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "TLS handshake failed")
	assert.Empty(t, seen)
	r = w.run("dlq", "list", "q", "--ca", ca)
	assert.Equal(t, 2, r.code)
	assert.NotContains(t, r.stderr, "TLS handshake failed")
	assert.Equal(t, 0, <-seen)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	assert.NoError(t, err)
	mine := file(t, "mine.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))+string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})))
	w.run("dlq", "list", "q", "--ca", ca, "--cert", mine)
	assert.Equal(t, 1, <-seen)
	r = w.run("topology", "apply", "--ca", ca, filepath.Join(t.TempDir(), "none"))
	assert.Equal(t, 64, r.code)
}
