package client

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/inside"
)

// pipes dials pipes with a broker at the other end.
type pipes struct {
	peers  sync.WaitGroup
	server *tls.Config // nil: without TLS

	mu    sync.Mutex
	asked []string
	ends  []net.Conn // the client's
}

func (p *pipes) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked, p.ends = append(p.asked, network+" "+address), append(p.ends, ours)
	p.peers.Go(func() {
		defer func() { _ = theirs.Close() }()
		c := theirs
		if p.server != nil {
			c = tls.Server(theirs, p.server)
		}
		(&hostilePeer{Conn: c}).serve()
	})
	return ours, nil
}

func certificate(t *testing.T, host string) (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{host}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool
}

// Everything works over what Dial returns: TLS, publishing, consuming, the rebuilding
// of a connection that is lost, and the end.
func TestDialConnectsOverOtherTransports(t *testing.T) {
	cert, pool := certificate(t, "broker.test")
	for scheme, server := range map[string]*tls.Config{"amqp": nil, "amqps": {Certificates: []tls.Certificate{cert}}} {
		t.Run(scheme, func(t *testing.T) {
			p := &pipes{server: server}
			back := make(chan struct{}, 10)
			conn, err := Connect(t.Context(), scheme+"://u:p@broker.test:1", Config{
				Dial: p.dial, TLS: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, Logger: quiet, Reconnect: ReconnectBackoff(testBackoff),
				OnEvent: func(e Event) {
					if e.Kind == EventUp && e.Op == "connection" {
						back <- struct{}{}
					}
				},
			})
			require.NoError(t, err)
			<-back
			pub, err := NewPublisher[string](t.Context(), conn, address.Queue("q"), PublisherConfig{})
			require.NoError(t, err)
			require.NoError(t, pub.Publish(t.Context(), "m"))

			p.mu.Lock()
			_ = p.ends[0].Close()
			p.mu.Unlock()
			<-back
			require.NoError(t, pub.Publish(t.Context(), "m"))
			ctx, stop := context.WithCancel(t.Context())
			require.NoError(t, conn.Consume(ctx, "q", HandlerFunc(func(context.Context, *Delivery) error { stop(); return nil }), ConsumerConfig{}))
			require.NoError(t, conn.Close(t.Context()))
			p.peers.Wait()
			assert.Equal(t, []string{"tcp broker.test:1", "tcp broker.test:1"}, p.asked)
		})
	}
}

func TestHostileDialsNeitherPanicNorHang(t *testing.T) {
	late, closed := make(chan struct{}), make(chan struct{})
	why := errors.New("no tunnel")
	for name, c := range map[string]struct {
		dial func(context.Context, string, string) (net.Conn, error)
		is   error
		text string
	}{
		"fails":   {func(context.Context, string, string) (net.Conn, error) { return nil, why }, why, "no tunnel"},
		"nothing": {func(context.Context, string, string) (net.Conn, error) { return nil, nil }, failure.ErrUnreachable, "no connection"},
		"panics":  {func(context.Context, string, string) (net.Conn, error) { panic("odd") }, failure.ErrUnreachable, "panicked: odd"},
		"exits":   {func(context.Context, string, string) (net.Conn, error) { runtime.Goexit(); return nil, nil }, failure.ErrUnreachable, "no connection"},
		"hangs": {func(context.Context, string, string) (net.Conn, error) {
			<-late
			ours, theirs := net.Pipe()
			go func() {
				defer close(closed)
				_, _ = theirs.Read(make([]byte, 1))
			}()
			return ours, nil
		}, context.DeadlineExceeded, ""},
	} {
		_, err := Connect(t.Context(), "amqp://broker.test", Config{Dial: c.dial, ConnectTimeout: 50 * time.Millisecond, Logger: quiet})
		require.ErrorIs(t, err, failure.ErrUnreachable, name)
		require.ErrorIs(t, err, c.is, name)
		assert.ErrorContains(t, err, c.text, name)
	}
	close(late)
	<-closed // what came too late is closed
}

// What reads raw frames connects to where the Conn is, or to an endpoint behind it, and
// begins again at the first behind the last. One that can't be reached is passed over.
func TestRawConnectionsGoToTheEndpointsInTurn(t *testing.T) {
	p := &pipes{}
	t.Cleanup(p.peers.Wait)
	down := false
	c, err := Connect(t.Context(), "amqp://a.test", Config{
		Endpoints: []string{"amqp://b.test", "amqp://c.test"}, Logger: quiet, Reconnect: ReconnectBackoff(testBackoff),
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if down && address == "b.test:5672" {
				return nil, errors.New("it is down")
			}
			return p.dial(ctx, network, address)
		},
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close(t.Context())) }()
	to := func(behind int) string {
		t.Helper()
		d, err := inside.Of(c).Dial(t.Context(), behind)
		require.NoError(t, err)
		require.NoError(t, d.Net.Close())
		return d.Shown
	}
	for behind, host := range []string{"a", "b", "c", "a"} {
		assert.Contains(t, to(behind), "//"+host+".test", behind)
	}
	down = true
	assert.Contains(t, to(1), "//c.test")
}
