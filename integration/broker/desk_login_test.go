package broker_test

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

	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
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
func loggedIn(t *testing.T, h suite.Shell, flags ...string) {
	t.Helper()
	topology := suite.YAML(t, suite.ShopFile)
	with := func(args ...string) []string { return append(args, flags...) }
	h.Run(suite.ExitDone, with("apply", topology)...)
	h.Run(suite.ExitDone, with("plan", topology)...)
	var s desk.Survey
	require.NoError(t, json.Unmarshal([]byte(h.Dead(suite.ExitDone, with("survey", "orders.dead", "--json", "--accept", "waiting-messages")...).Stdout), &s))
	require.Len(t, s.Queues, 1)
	warns := func(code desk.WarningCode) bool {
		return slices.ContainsFunc(s.Queues[0].Warnings, func(c desk.Warning) bool { return c.Code == code })
	}
	assert.Empty(t, s.Queues[0].Unread)
	noHTTP := h.Env["HOPBACK_MANAGEMENT_URL"] == "none"
	assert.True(t, noHTTP || !warns(desk.WarningWaiting), "the HTTP API counts waiting messages")
	assert.Equal(t, noHTTP, warns(desk.WarningPolicies), "the HTTP API shows policies")
	h.Dead(suite.ExitDone, with("list", "orders.dead", "--accept", "waiting-messages")...)
}

// --token-file and HOPBACK_TOKEN log in with an OAuth 2 token, over AMQP and over the HTTP
// API. One that isn't good is said to be refused, and isn't printed.
func TestCommandLogsInByToken(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		useOAuth2(t, s)
		token := jwt(signingKey, time.Now().Add(time.Hour))
		api, err := url.Parse(s.ManagementURL)
		require.NoError(t, err)
		api.User = nil
		h := suite.NewShell(t, map[string]string{"HOPBACK_URL": withoutUser(s), "HOPBACK_MANAGEMENT_URL": api.String()})
		h.Never = token
		loggedIn(t, h, "--token-file", file(t, "token", []byte(token+"\n")))
		h.Env["HOPBACK_TOKEN"] = token
		loggedIn(t, h)
		delete(h.Env, "HOPBACK_TOKEN")

		forged := jwt([]byte("another key"), time.Now().Add(time.Hour))
		h.Never = forged
		out := h.Dead(suite.ExitUnknown, "survey", "orders.dead", "--token-file", file(t, "forged", []byte(forged)))
		assert.Contains(t, out.Stderr, "refused")
		h.Run(suite.ExitUnknown, "apply", suite.YAML(t, suite.ShopFile), "--token-file", file(t, "forged", []byte(forged)))
	})
}

// --ca, --cert, --key and --external serve a broker with a private authority that knows its
// clients by their certificates.
func TestCommandLogsInByCertificate(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		const user = "tls-command"
		ca := newAuthority(t)
		cert, key, _ := ca.leaf("broker.test", time.Time{})
		mine, mineKey, _ := ca.leaf(user, time.Time{})
		der, err := x509.MarshalPKCS8PrivateKey(mineKey)
		require.NoError(t, err)
		s.Enable(t, "rabbitmq_auth_mechanism_ssl")
		s.EvalOK(t, `application:set_env(rabbit, auth_mechanisms, ['PLAIN', 'EXTERNAL', 'ANONYMOUS']), application:set_env(rabbit, ssl_cert_login_from, common_name),
			application:set_env(rabbit, ssl_options, [{verify, verify_peer}]).`)
		s.HTTP(t, http.MethodPut, "/users/"+user, map[string]string{"password_hash": "", "tags": ""}, nil)
		s.HTTP(t, http.MethodPut, "/permissions/"+s.VHost+"/"+user, map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
		t.Cleanup(func() { s.HTTP(t, http.MethodDelete, "/users/"+user, nil, nil) })
		defer serveTLS(t, s, ca, cert, key, true)()

		caFile, certFile := file(t, "ca.pem", certPEM(ca.cert)), file(t, "cert.pem", certPEM(mine))
		keyFile := file(t, "key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
		h := suite.NewShell(t, map[string]string{"HOPBACK_URL": s.AMQPURLWith(func(u *url.URL) { u.Scheme, u.User = "amqps", nil }), "HOPBACK_MANAGEMENT_URL": "none"})
		loggedIn(t, h, "--ca", caFile, "--server-name", "broker.test", "--cert", certFile, "--key", keyFile, "--external")
		// By the password of the URL, over TLS.
		h.Env["HOPBACK_URL"] = s.AMQPURLWith(func(u *url.URL) { u.Scheme = "amqps" })
		loggedIn(t, h, "--ca", caFile, "--server-name", "broker.test", "--cert", certFile, "--key", keyFile)

		assert.Contains(t, h.Dead(suite.ExitUnknown, "survey", "orders.dead", "--server-name", "broker.test", "--cert", certFile, "--key", keyFile).Stderr, "TLS")
		assert.Contains(t, h.Dead(suite.ExitUnknown, "survey", "orders.dead", "--ca", caFile, "--server-name", "broker.test").Stderr, "TLS")
		assert.Contains(t, h.Run(suite.ExitUnknown, "apply", suite.YAML(t, suite.ShopFile), "--ca", caFile, "--cert", certFile, "--key", keyFile).Stderr, "TLS", "another name")
	})
}
