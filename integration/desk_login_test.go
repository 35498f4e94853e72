package integration

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/desk"
)

// file writes a file of a test's own.
func file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path
}

// loggedIn runs commands that read and write with these flags, over AMQP, and over the HTTP
// API unless it isn't there.
func loggedIn(t *testing.T, h shell, flags ...string) {
	t.Helper()
	topology := yaml(t, shopFile)
	with := func(args ...string) []string { return append(args, flags...) }
	h.run(exitDone, with("apply", topology)...)
	h.run(exitDone, with("plan", topology)...)
	var s desk.Survey
	require.NoError(t, json.Unmarshal([]byte(h.dead(exitDone, with("survey", "orders.dead", "--json")...).stdout), &s))
	require.Len(t, s.Queues, 1)
	assert.Empty(t, s.Queues[0].Unread)
	unseen := slices.ContainsFunc(s.Queues[0].Caveats, func(c desk.Caveat) bool { return c.Code == desk.CaveatPolicies })
	assert.Equal(t, h.env["HOPBACK_MANAGEMENT_URL"] == "none", unseen, "the HTTP API shows policies")
	h.dead(exitDone, with("list", "orders.dead")...)
}

// --token-file and HOPBACK_TOKEN log in with an OAuth 2 token, over AMQP and over the HTTP
// API. One that isn't good is said to be refused, and isn't printed.
func TestCommandLogsInByToken(t *testing.T) {
	forEachOfOurs(t, func(t *testing.T, s *site) {
		useOAuth2(t, s)
		token := jwt(signingKey, time.Now().Add(time.Hour))
		api, err := url.Parse(s.ManagementURL)
		require.NoError(t, err)
		api.User = nil
		h := newShell(t, map[string]string{"HOPBACK_URL": s.withoutUser(), "HOPBACK_MANAGEMENT_URL": api.String()})
		h.never = token
		loggedIn(t, h, "--token-file", file(t, "token", []byte(token+"\n")))
		h.env["HOPBACK_TOKEN"] = token
		loggedIn(t, h)
		delete(h.env, "HOPBACK_TOKEN")

		forged := jwt([]byte("another key"), time.Now().Add(time.Hour))
		h.never = forged
		out := h.dead(exitUnknown, "survey", "orders.dead", "--token-file", file(t, "forged", []byte(forged)))
		assert.Contains(t, out.stderr, "refused")
		h.run(exitUnknown, "apply", yaml(t, shopFile), "--token-file", file(t, "forged", []byte(forged)))
	})
}

// --ca, --cert, --key and --external serve a broker with a private authority that knows its
// clients by their certificates.
func TestCommandLogsInByCertificate(t *testing.T) {
	forEachOfOursAlone(t, func(t *testing.T, s *site) {
		const user = "tls-command"
		ca := newAuthority(t)
		cert, key, _ := ca.leaf("broker.test", time.Time{})
		mine, mineKey, _ := ca.leaf(user, time.Time{})
		der, err := x509.MarshalPKCS8PrivateKey(mineKey)
		require.NoError(t, err)
		s.enable(t, "rabbitmq_auth_mechanism_ssl")
		s.eval(t, `application:set_env(rabbit, auth_mechanisms, ['PLAIN', 'EXTERNAL', 'ANONYMOUS']), application:set_env(rabbit, ssl_cert_login_from, common_name),
			application:set_env(rabbit, ssl_options, [{verify, verify_peer}]).`)
		s.http(t, http.MethodPut, "/users/"+user, map[string]string{"password_hash": "", "tags": ""}, nil)
		s.http(t, http.MethodPut, "/permissions/"+s.vhost+"/"+user, map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
		t.Cleanup(func() { s.http(t, http.MethodDelete, "/users/"+user, nil, nil) })
		defer s.serveTLS(t, ca, cert, key, true)()

		caFile, certFile := file(t, "ca.pem", certPEM(ca.cert)), file(t, "cert.pem", certPEM(mine))
		keyFile := file(t, "key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
		h := newShell(t, map[string]string{"HOPBACK_URL": s.urlOf(func(u *url.URL) { u.Scheme, u.User = "amqps", nil }), "HOPBACK_MANAGEMENT_URL": "none"})
		loggedIn(t, h, "--ca", caFile, "--server-name", "broker.test", "--cert", certFile, "--key", keyFile, "--external")
		// By the password of the URL, over TLS.
		h.env["HOPBACK_URL"] = s.urlOf(func(u *url.URL) { u.Scheme = "amqps" })
		loggedIn(t, h, "--ca", caFile, "--server-name", "broker.test", "--cert", certFile, "--key", keyFile)

		assert.Contains(t, h.dead(exitUnknown, "survey", "orders.dead", "--server-name", "broker.test", "--cert", certFile, "--key", keyFile).stderr, "TLS")
		assert.Contains(t, h.dead(exitUnknown, "survey", "orders.dead", "--ca", caFile, "--server-name", "broker.test").stderr, "TLS")
		assert.Contains(t, h.run(exitUnknown, "apply", yaml(t, shopFile), "--ca", caFile, "--cert", certFile, "--key", keyFile).stderr, "TLS", "another name")
	})
}
