package broker_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
)

// authority is a certificate authority of a test's own.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	a.cert, a.key, _ = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "hopback test CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	return a
}

// sign signs a certificate; the authority's own, while it has none.
func (a *authority) sign(c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, tls.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	c.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(a.t, err)
	if c.NotAfter.IsZero() {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	require.NoError(a.t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(a.t, err)
	return cert, key, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// leaf is a certificate for a server of these names, or a client.
func (a *authority) leaf(name string, until time.Time, ips ...net.IP) (*x509.Certificate, *ecdsa.PrivateKey, tls.Certificate) {
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IPAddresses: ips,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if !until.IsZero() {
		c.NotBefore, c.NotAfter = until.Add(-time.Hour), until
	}
	return a.sign(c)
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

func certPEM(c *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})
}

// serveTLS has the broker speak TLS where it has spoken plainly, until undo is called.
func serveTLS(t *testing.T, s *suite.Site, a *authority, cert *x509.Certificate, key *ecdsa.PrivateKey, mutual bool) (undo func()) {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	// Erlang remembers for two minutes what is in a file.
	dir := fmt.Sprintf("/tmp/tls-%s-%d", s.VHost, suite.SiteCount.Add(1))
	s.RunOK(t, "mkdir", "-p", dir)
	for name, text := range map[string][]byte{
		"ca.pem": certPEM(a.cert), "cert.pem": certPEM(cert), "key.pem": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
	} {
		s.RunOK(t, "sh", "-c", `printf %s "$1" | base64 -d >"$0"`, dir+"/"+name, base64.StdEncoding.EncodeToString(text))
	}
	verify := "{verify, verify_none}"
	if mutual {
		verify = "{verify, verify_peer}, {fail_if_no_peer_cert, true}"
	}
	// The port within a container is another than the one outside.
	const listener = `[{IP, P}] = [{I, N} || {listener, _, Kind, _, I, N, _} <- rabbit_networking:active_listeners(), (Kind =:= amqp) or (Kind =:= 'amqp/ssl')],
		At = case IP of {0,0,0,0,0,0,0,0} -> P; _ -> {inet:ntoa(IP), P} end,
		rabbit_networking:stop_tcp_listener(At), timer:sleep(200), `
	s.EvalOK(t, listener+fmt.Sprintf(
		`rabbit_networking:start_ssl_listener(At, [{cacertfile, "%[1]s/ca.pem"}, {certfile, "%[1]s/cert.pem"}, {keyfile, "%[1]s/key.pem"}, %[2]s], 10).`, dir, verify))
	return func() {
		s.EvalOK(t, listener+`rabbit_networking:start_tcp_listener(At, 10).`)
	}
}

// A problem with certificates is reported soon, with its cause; with the right ones
// hopback connects, comes back, and logs in by them.
func TestTLS(t *testing.T) {
	suite.ForEachOfOursAlone(t, func(t *testing.T, s *suite.Site) {
		const user = "tls-worker"
		ca, other := newAuthority(t), newAuthority(t)
		host := "broker.test"
		cert, key, _ := ca.leaf(host, time.Time{})
		_, _, mine := ca.leaf(user, time.Time{})
		_, _, foreign := other.leaf(user, time.Time{})
		s.Enable(t, "rabbitmq_auth_mechanism_ssl")
		s.EvalOK(t, `application:set_env(rabbit, auth_mechanisms, ['PLAIN', 'EXTERNAL', 'ANONYMOUS']), application:set_env(rabbit, ssl_cert_login_from, common_name),
			application:set_env(rabbit, ssl_options, [{verify, verify_peer}]).`) // which EXTERNAL wants to know of

		s.HTTP(t, http.MethodPut, "/users/"+user, map[string]string{"password_hash": "", "tags": ""}, nil)
		s.HTTP(t, http.MethodPut, "/permissions/"+s.VHost+"/"+user, map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
		t.Cleanup(func() { s.HTTP(t, http.MethodDelete, "/users/"+user, nil, nil) })

		undo := serveTLS(t, s, ca, cert, key, false)
		defer func() { undo() }()
		secure := s.AMQPURLWith(func(u *url.URL) { u.Scheme = "amqps" })
		with := func(edit func(*tls.Config)) func(*client.Config) {
			return func(c *client.Config) {
				c.TLS = &tls.Config{RootCAs: ca.pool(), ServerName: host, MinVersion: tls.VersionTLS12}
				edit(c.TLS)
			}
		}
		right := with(func(*tls.Config) {})
		e := suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn)
		assert.ErrorAs(t, e, new(*tls.CertificateVerificationError), "the system's authorities")
		e = suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, with(func(c *tls.Config) { c.RootCAs = other.pool() }))
		assert.ErrorAs(t, e, new(x509.UnknownAuthorityError))
		e = suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, with(func(c *tls.Config) { c.ServerName = "another.test" }))
		assert.ErrorAs(t, e, new(x509.HostnameError))
		e = suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, with(func(c *tls.Config) { c.ServerName = "" }))
		assert.ErrorAs(t, e, new(x509.HostnameError), "the URL's host is the name by default")
		e = suite.Refused(t, s.AMQPURL(), client.ErrUnreachable, suite.RefusedIn) // plainly
		assert.Contains(t, e.Error(), "amqps")

		// It works, and comes back over TLS.
		wire, through := s.Through(t)
		through = "amqps" + strings.TrimPrefix(through, "amqp")
		conn, _ := suite.ConnectTo(t, through, suite.Soon, right)
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "orders", DeliveryLimit: declare.Unlimited}))
		got := make(chan int, 100)
		suite.Consume(t, conn, "orders", client.JSON(func(_ context.Context, o suite.Order) error { got <- o.ID; return nil }), client.ConsumerConfig{})
		p := suite.Publisher[suite.Order](t, conn, address.Queue("orders"))
		for i := range 5 {
			suite.Eventually(t, p, suite.Order{ID: i})
			for suite.Await(t, got, "a message over TLS") != i {
			}
			require.Positive(t, wire.Cut())
		}

		// Expired.
		undo()
		was, wasKey, _ := ca.leaf(host, time.Now().Add(-time.Minute))
		undo = serveTLS(t, s, ca, was, wasKey, false)
		e = suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, right)
		var invalid x509.CertificateInvalidError
		if assert.ErrorAs(t, e, &invalid) {
			assert.Equal(t, x509.Expired, invalid.Reason)
		}
		// Mutual: the client's certificate is wanted, and may be its login.
		undo()
		undo = serveTLS(t, s, ca, cert, key, true)
		suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, right)
		suite.Refused(t, secure, client.ErrTLS, suite.RefusedIn, with(func(c *tls.Config) { c.Certificates = []tls.Certificate{foreign} }))
		certified := with(func(c *tls.Config) { c.Certificates = []tls.Certificate{mine} })
		plain, _ := suite.ConnectTo(t, secure, certified) // with guest's password
		suite.Publish(t, suite.Publisher[suite.Order](t, plain, address.Queue("orders")), suite.Order{ID: 100})
		external, _ := suite.ConnectTo(t, s.AMQPURLWith(func(u *url.URL) { u.Scheme, u.User = "amqps", nil }), certified, func(c *client.Config) { c.SASL = client.External() })
		suite.Publish(t, suite.Publisher[suite.Order](t, external, address.Queue("orders")), suite.Order{ID: 101})
		// The first connection had no certificate: it keeps trying, and says why.
		undo()
		undo = serveTLS(t, s, ca, cert, key, false)
		suite.Eventually(t, p, suite.Order{ID: 200})
		for left := map[int]bool{100: true, 101: true, 200: true}; len(left) > 0; { // also what the others sent in between
			delete(left, suite.Await(t, got, "what was sent by all"))
		}
	})
}
