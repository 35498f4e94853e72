package integration

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
)

// secret is the password in every URL of these tests.
const secret = "s3cr3t-p%ss/w:rd"

// refusedIn is how long a wrong set-up may take to be told of.
const refusedIn = 5 * time.Second

func withSecret(u *url.URL) { u.User = url.UserPassword("guest", secret) }

// refused connects and wants an error of the kind, in time, without the password.
func refused(t *testing.T, url string, kind error, in time.Duration, edit ...func(*client.Config)) *client.Error {
	t.Helper()
	var cfg client.Config
	for _, e := range edit {
		e(&cfg)
	}
	began := time.Now()
	conn, err := client.Connect(t.Context(), url, cfg)
	took := time.Since(began)
	if err == nil {
		_ = conn.Close(context.Background())
	}
	require.Error(t, err)
	assert.ErrorIs(t, err, kind, "%v", err)
	assert.Less(t, took, in, "%v", err)
	assert.True(t, client.SafeToRetry(err))
	assertNoSecret(t, err)
	var e *client.Error
	require.ErrorAs(t, err, &e)
	t.Logf("after %v: %v", took.Round(time.Millisecond), err)
	return e
}

// assertNoSecret looks for the password in every error of the chain, in each form
// that it takes in a URL.
func assertNoSecret(t *testing.T, err error) {
	t.Helper()
	for _, form := range []string{secret, url.QueryEscape(secret), url.PathEscape(secret), url.UserPassword("", secret).String()[1:], "s3cr3t"} {
		var walk func(error)
		walk = func(err error) {
			if err == nil {
				return
			}
			assert.NotContains(t, err.Error(), form)
			switch u := err.(type) {
			case interface{ Unwrap() error }:
				walk(u.Unwrap())
			case interface{ Unwrap() []error }:
				for _, e := range u.Unwrap() {
					walk(e)
				}
			}
		}
		walk(err)
	}
}

func TestWrongPasswordIsErrAuthentication(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		e := refused(t, s.urlOf(withSecret), client.ErrAuthentication, refusedIn)
		assert.Contains(t, e.Text, `"guest"`)
	})
}

func TestMissingVirtualHostIsErrVirtualHost(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		e := refused(t, s.urlOf(func(u *url.URL) { u.Path = "/no-such-vhost" }), client.ErrVirtualHost, refusedIn)
		assert.Contains(t, e.Text, "no-such-vhost")
	})
}

func TestVirtualHostWithoutAccessIsErrVirtualHost(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		user, err := url.Parse(s.user(t, ".*", ".*", ".*"))
		require.NoError(t, err)
		other := newSite(t, s.Broker)
		refused(t, other.urlOf(func(u *url.URL) { u.User = user.User }), client.ErrVirtualHost, refusedIn)
	})
}

func TestNobodyListensIsErrUnreachable(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	require.NoError(t, ln.Close())
	refused(t, fakeURL("amqp", addr), client.ErrUnreachable, refusedIn)
}

// Each endpoint is told of when none takes the connection.
func TestEveryEndpointIsNamedWhenNoneTakesTheConnection(t *testing.T) {
	t.Parallel()
	first := listen(t, func(net.Conn) {})
	second := listen(t, func(net.Conn) {})
	e := refusedAll(t, fakeURL("amqp", first), fakeURL("amqp", second))
	assert.Contains(t, e.Error(), first)
	assert.Contains(t, e.Error(), second)
}

func refusedAll(t *testing.T, first, second string) error {
	t.Helper()
	_, err := client.Connect(t.Context(), first, client.Config{Endpoints: []string{second}})
	require.ErrorIs(t, err, client.ErrUnreachable)
	assertNoSecret(t, err)
	return err
}

// What listens on the port may not be a broker, or not one that speaks AMQP 1.0.
func TestWhatIsNoBrokerIsErrUnreachable(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"garbage":            strings.Repeat("\xde\xad\xbe\xef", 64),
		"HTTP":               "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
		"AMQP 0-9-1 only":    "AMQP\x00\x00\x09\x01",
		"a huge frame":       "AMQP\x03\x01\x00\x00\xff\xff\xff\xff\x02\x01\x00\x00",
		"a frame of nothing": "AMQP\x03\x01\x00\x00\x00\x00\x00\x00\x02\x01\x00\x00",
		"a header only":      "AMQP\x03\x01\x00\x00",
		"closing at once":    "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := listen(t, func(c net.Conn) {
				_, _ = io.ReadFull(c, make([]byte, 8))
				_, _ = io.WriteString(c, answer)
			})
			refused(t, fakeURL("amqp", addr), client.ErrUnreachable, refusedIn)
		})
	}
}

// A listener that accepts and never says a word: only ConnectTimeout, or the
// caller's ctx, can end that.
func TestListenerThatNeverAnswersIsErrUnreachable(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"nothing":         "",
		"the header only": "AMQP\x03\x01\x00\x00",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := listen(t, func(c net.Conn) {
				_, _ = io.WriteString(c, answer)
				_, _ = io.Copy(io.Discard, c) // until the client gives up
			})
			for _, scheme := range []string{"amqp", "amqps"} {
				kind := client.ErrUnreachable
				if scheme == "amqps" {
					kind = client.ErrTLS
				}
				refused(t, fakeURL(scheme, addr), kind, refusedIn, func(c *client.Config) { c.ConnectTimeout = 500 * time.Millisecond })

				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				began := time.Now()
				_, err := client.Connect(ctx, fakeURL(scheme, addr), client.Config{})
				cancel()
				require.ErrorIs(t, err, kind)
				assert.Less(t, time.Since(began), refusedIn, "the caller's ctx counts, too")
				assertNoSecret(t, err)
			}
		})
	}
}

func TestListenerThatNeverAnswersIsGivenUpByDefault(t *testing.T) {
	t.Parallel()
	addr := listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	// Config.ConnectTimeout documents 15 s.
	refused(t, fakeURL("amqp", addr), client.ErrUnreachable, 16*time.Second)
}

func TestTLSAgainstAPlainPortIsErrTLS(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		u := s.urlOf(func(u *url.URL) { u.Scheme = "amqps"; withSecret(u) })
		e := refused(t, u, client.ErrTLS, refusedIn)
		var record tls.RecordHeaderError
		assert.True(t, errors.As(e, &record) || errors.Is(e, io.EOF) || strings.Contains(e.Error(), "reset"), "%v", e)
	})
}

// Each missing permission is told of as such, by the operation that needs it, and
// the connection lives on.
func TestMissingPermissionIsErrUnauthorized(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		admin, _ := s.connect(t)
		apply(t, admin, queueOf(declare.QuorumQueue{Name: "orders"}))
		const all, none = ".*", "^$"
		nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		open := func(configure, write, read string) *client.Conn {
			conn, log := connectTo(t, s.user(t, configure, write, read))
			t.Cleanup(func() { assert.Empty(t, log.with("connection lost")) })
			return conn
		}
		within := func(what string, f func(ctx context.Context) error) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			began := time.Now()
			err := f(ctx)
			assert.Less(t, time.Since(began), refusedIn, what)
			return err
		}

		configure := open(none, all, all)
		err := within("declare", func(ctx context.Context) error {
			_, err := declare.Apply(ctx, configure.Management(), queueOf(declare.QuorumQueue{Name: "new"}))
			return err
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		assert.ErrorContains(t, err, `"new"`)
		publish(t, publisher[order](t, configure, address.Queue("orders")), order{ID: 1})

		write := open(all, none, all)
		err = within("publish", func(ctx context.Context) error {
			_, err := client.NewPublisher[order](ctx, write, address.Queue("orders"), client.PublisherConfig{})
			return err
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		apply(t, write, queueOf(declare.QuorumQueue{Name: "other"}))

		read := open(all, all, none)
		err = within("consume", func(ctx context.Context) error {
			return read.Consume(ctx, "orders", nothing, client.ConsumerConfig{})
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		publish(t, publisher[order](t, read, address.Queue("orders")), order{ID: 2})
	})
}

// A bad URL is refused before anything is sent, and not repeated with its password.
func TestBadURLIsRefusedWithoutRepeatingThePassword(t *testing.T) {
	t.Parallel()
	userinfo := url.UserPassword("guest", secret).String()
	for _, u := range []string{
		"http://" + userinfo + "@localhost/", "amqp://" + userinfo + "@/", "amqp://" + userinfo + "@localhost:port/",
		"amqp://" + userinfo + "@localhost/a/b", "amqp://" + userinfo + "@localhost/%zz", "amqp://" + userinfo + "@localhost/?x=1",
		"amqp://guest:" + secret + "@localhost/", "amqp://guest:" + secret, "://" + userinfo, "\x7f" + userinfo,
	} {
		_, err := client.Connect(t.Context(), u, client.Config{})
		var bad *argument.Error
		if assert.ErrorAs(t, err, &bad) {
			assertNoSecret(t, err)
		}
	}
}

func fakeURL(scheme, addr string) string {
	return (&url.URL{Scheme: scheme, Host: addr, User: url.UserPassword("guest", secret), Path: "/"}).String()
}

// listen starts a server that does one thing with each connection, and closes it.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				serve(c)
			}()
		}
	}()
	return ln.Addr().String()
}
