package link_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/link/linktest"
)

// resolver resolves every name to these IPv4 addresses, in order.
func resolver(ips ...string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer func() { _ = far.Close() }()
			for { // with the framing of DNS over TCP
				size := make([]byte, 2)
				if _, err := io.ReadFull(far, size); err != nil {
					return
				}
				query := make([]byte, binary.BigEndian.Uint16(size))
				if _, err := io.ReadFull(far, query); err != nil {
					return
				}
				reply := dnsReply(query, ips)
				if _, err := far.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
					return
				}
			}
		}()
		return near, nil
	}}
}

func dnsReply(query []byte, ips []string) []byte {
	end := 12
	for query[end] != 0 {
		end += 1 + int(query[end])
	}
	end += 5
	if binary.BigEndian.Uint16(query[end-4:]) != 1 { // not an A
		ips = nil
	}
	reply := append(query[:2:2], 0x81, 0x80, 0, 1, 0, byte(len(ips)), 0, 0, 0, 0)
	reply = append(reply, query[12:end]...)
	for _, ip := range ips {
		reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
		reply = append(reply, net.ParseIP(ip).To4()...)
	}
	return reply
}

// accepting accepts connections, and has answer answer each, which is closed with the test.
type accepting struct {
	accepted atomic.Int32
	l        net.Listener
}

func accept(t *testing.T, address string, answer func(net.Conn)) (*accepting, error) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	a := &accepting{l: l}
	var mu sync.Mutex
	var all []net.Conn
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			a.accepted.Add(1)
			mu.Lock()
			all = append(all, c)
			mu.Unlock()
			if answer != nil {
				running.Go(func() { answer(c) })
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range all {
			_ = c.Close()
		}
		mu.Unlock()
		running.Wait()
	})
	return a, nil
}

// A hostWithThree is a name with three addresses, at one port: the first is silent, the second closes
// connections at once, and the third is for a broker.
type hostWithThree struct {
	silent, closing *accepting
	third           string
	port            string
}

func threeAddresses(t *testing.T) *hostWithThree {
	t.Helper()
	for range 100 {
		h := &hostWithThree{}
		var err error
		h.silent, err = accept(t, "127.0.0.2:0", nil)
		require.NoError(t, err)
		_, h.port, _ = net.SplitHostPort(h.silent.l.Addr().String())
		h.third = net.JoinHostPort("127.0.0.4", h.port)
		if h.closing, err = accept(t, net.JoinHostPort("127.0.0.3", h.port), func(c net.Conn) { _ = c.Close() }); err != nil {
			continue // the port is in use there
		}
		free, err := net.Listen("tcp", h.third)
		if err != nil {
			continue
		}
		_ = free.Close()
		return h
	}
	require.Fail(t, "no port is free at three addresses")
	return nil
}

func pool(t *testing.T, url string, dial link.DialConfig) *link.Pool {
	t.Helper()
	ep, err := link.ParseEndpoint("url", url, link.Credentials{})
	require.NoError(t, err)
	dial.Name, dial.IdleTimeout, dial.Log = "test", time.Minute, slog.New(slog.DiscardHandler)
	p := link.NewPool(link.PoolConfig{
		Dial: dial, MaxConnections: 1, Backoff: backoff.Exponential{Min: time.Millisecond, Max: 10 * time.Millisecond},
		Observer: linktest.Ignore{}, Requests: linktest.Ignore{},
	}, []link.Endpoint{ep})
	return p
}

func end(t *testing.T, p *link.Pool) {
	t.Helper()
	p.BeginClose()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p.Close(ctx)
}

// remote is the address of the pool's connection, "" while there is none.
func remote(p *link.Pool) string {
	w := p.Up()
	if w == nil {
		return ""
	}
	return w.Net.RemoteAddr().String()
}

// A name has several addresses. Those that accept connections and don't answer are passed over, by the
// first connection as by those that replace it.
func TestAnAddressThatDoesNotAnswerIsPassedOver(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	_, err := broker.Listen(h.third)
	require.NoError(t, err)
	p := pool(t, "amqp://guest:guest@broker.test:"+h.port, link.DialConfig{ConnectTimeout: 4 * time.Second, Resolver: resolver("127.0.0.2", "127.0.0.3", "127.0.0.4")})
	require.NoError(t, p.Open(t.Context()))
	defer end(t, p)
	require.Equal(t, h.third, remote(p))
	assert.Equal(t, int32(1), h.silent.accepted.Load())
	assert.Equal(t, int32(1), h.closing.accepted.Load())
	for range 3 {
		before := p.Up()
		_ = before.Net.Close()
		require.Eventually(t, func() bool { return p.Up() != nil && p.Up() != before }, 2*time.Minute, time.Millisecond)
		require.Equal(t, h.third, remote(p))
	}
	assert.Equal(t, int32(1), h.silent.accepted.Load(), "it isn't asked again while another answers")
	assert.Equal(t, int32(1), h.closing.accepted.Load())
}

// The same with TLS: the certificate is for the name, not for an address.
func TestAnAddressThatDoesNotAnswerInTLSIsPassedOver(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	cert, trusted := certificateFor(t, "broker.test")
	l, err := tls.Listen("tcp", h.third, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12})
	require.NoError(t, err)
	serving := make(chan struct{})
	go func() {
		defer close(serving)
		_ = broker.Serve(l)
	}()
	defer func() {
		_ = l.Close()
		<-serving
	}()
	p := pool(t, "amqps://guest:guest@broker.test:"+h.port, link.DialConfig{
		ConnectTimeout: 4 * time.Second, Resolver: resolver("127.0.0.2", "127.0.0.3", "127.0.0.4"), TLS: &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12},
	})
	require.NoError(t, p.Open(t.Context()))
	defer end(t, p)
	require.Equal(t, h.third, remote(p))
}

func certificateFor(t *testing.T, name string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	require.NoError(t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	trusted := x509.NewCertPool()
	trusted.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, trusted
}

// A broker whose process has stopped still has its connections accepted. The connection that is given
// up is replaced by one to another address.
func TestAConnectionThatIsGivenUpIsReplacedAtAnotherAddress(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	_, err := broker.Listen(h.third)
	require.NoError(t, err)
	_, err = broker.Listen(net.JoinHostPort("127.0.0.5", h.port))
	require.NoError(t, err)
	p := pool(t, "amqp://guest:guest@broker.test:"+h.port, link.DialConfig{ConnectTimeout: time.Minute, Resolver: resolver("127.0.0.4", "127.0.0.5")})
	require.NoError(t, p.Open(t.Context()))
	defer end(t, p)
	first := p.Up()
	why := errors.New("no sign of life")
	first.GivenUp.Store(&why)
	_ = first.Net.Close()
	require.Eventually(t, func() bool { return p.Up() != nil && p.Up() != first }, 2*time.Minute, time.Millisecond)
	assert.NotEqual(t, first.Net.RemoteAddr().String(), remote(p))
}

// If no address answers, the error is that of one, and each was tried once.
func TestNoAddressAnswers(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	p := pool(t, "amqp://guest:guest@broker.test:"+h.port, link.DialConfig{ConnectTimeout: 4 * time.Second, Resolver: resolver("127.0.0.2", "127.0.0.3")})
	err := p.Open(t.Context())
	require.ErrorIs(t, err, failure.ErrUnreachable)
	assert.Equal(t, int32(1), h.silent.accepted.Load())
	assert.Equal(t, int32(1), h.closing.accepted.Load())
}

// An address that refuses connections doesn't have those asked again that stayed silent.
func TestNoAddressAnswersAndOneIsClosed(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	p := pool(t, "amqp://guest:guest@broker.test:"+h.port, link.DialConfig{ConnectTimeout: 4 * time.Second, Resolver: resolver("127.0.0.2", "127.0.0.4")})
	require.ErrorIs(t, p.Open(t.Context()), failure.ErrUnreachable)
	assert.Equal(t, int32(1), h.silent.accepted.Load())
}

// A wrong password is wrong at all addresses, and is asked about at one.
func TestARefusedLoginIsNotTriedAtEachAddress(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	_, err := broker.Listen(h.third)
	require.NoError(t, err)
	p := pool(t, "amqp://guest:wrong@broker.test:"+h.port, link.DialConfig{ConnectTimeout: time.Minute, Resolver: resolver("127.0.0.4", "127.0.0.3")})
	require.ErrorIs(t, p.Open(t.Context()), failure.ErrAuthentication)
	assert.Zero(t, h.closing.accepted.Load())
}

// A Config.Dial gets the name, and chooses among its addresses itself.
func TestADialOfTheUserGetsTheName(t *testing.T) {
	t.Parallel()
	h := threeAddresses(t)
	broker := hopbacktest.Start(t, hopbacktest.Config{})
	_, err := broker.Listen(h.third)
	require.NoError(t, err)
	var calls atomic.Int32
	p := pool(t, "amqp://guest:guest@broker.test:"+h.port, link.DialConfig{
		ConnectTimeout: time.Minute, Resolver: resolver("127.0.0.3", "127.0.0.4"),
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			assert.Equal(t, "broker.test:"+h.port, address)
			to := h.third
			if calls.Add(1) == 1 {
				to = net.JoinHostPort("127.0.0.3", h.port)
			}
			return (&net.Dialer{}).DialContext(ctx, network, to)
		},
	})
	require.ErrorIs(t, p.Open(t.Context()), failure.ErrUnreachable)
	assert.Equal(t, int32(1), calls.Load())
}
