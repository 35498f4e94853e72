package hopbacktest_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
)

// certified is a certificate for a name, which is its own authority.
func certified(t *testing.T, name string) (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// With a listener of one's own there is TLS, and the login by certificate.
func TestLoginByCertificate(t *testing.T) {
	t.Parallel()
	b := hopbacktest.Start(t, hopbacktest.Config{})
	b.AddUser("worker", "")
	require.NoError(t, b.SetPermissions("worker", "/", ".*", ".*", ".*"))
	ours, ourPool := certified(t, "broker")
	theirs, theirPool := certified(t, "worker")
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{ours}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: theirPool})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- b.Serve(l) }()
	conn, err := client.Connect(t.Context(), "amqps://"+l.Addr().String()+"/", client.Config{
		SASL: client.External(), TLS: &tls.Config{RootCAs: ourPool, Certificates: []tls.Certificate{theirs}}, Logger: quiet,
	})
	require.NoError(t, err)
	var users []string
	for _, c := range b.Connections() {
		users = append(users, c.Info().User)
	}
	assert.Equal(t, "worker", strings.Join(users, " "))
	require.NoError(t, conn.Close(t.Context()))
	b.Close()
	require.Error(t, <-served)
}
