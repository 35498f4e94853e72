package client_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
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
	"github.com/hopback/hopback/integration/internal/suite"
)

func withSecret(u *url.URL) { u.User = url.UserPassword("guest", suite.Secret) }

func TestWrongPasswordIsErrAuthentication(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		e := suite.Refused(t, s.AMQPURLWith(withSecret), client.ErrAuthentication, suite.RefusedIn)
		assert.Contains(t, e.Text, `"guest"`)
	})
}

func TestMissingVirtualHostIsErrVirtualHost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		e := suite.Refused(t, s.AMQPURLWith(func(u *url.URL) { u.Path = "/no-such-vhost" }), client.ErrVirtualHost, suite.RefusedIn)
		assert.Contains(t, e.Text, "no-such-vhost")
	})
}

func TestVirtualHostWithoutAccessIsErrVirtualHost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		user, err := url.Parse(s.User(t, ".*", ".*", ".*"))
		require.NoError(t, err)
		other := suite.NewSite(t, s.Broker)
		suite.Refused(t, other.AMQPURLWith(func(u *url.URL) { u.User = user.User }), client.ErrVirtualHost, suite.RefusedIn)
	})
}

func TestNobodyListensIsErrUnreachable(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	require.NoError(t, ln.Close())
	suite.Refused(t, fakeURL("amqp", addr), client.ErrUnreachable, suite.RefusedIn)
}

// If no endpoint accepts the connection, the error names each of them.
func TestEveryEndpointIsNamedWhenNoneTakesTheConnection(t *testing.T) {
	t.Parallel()
	first := suite.Listen(t, func(net.Conn) {})
	second := suite.Listen(t, func(net.Conn) {})
	e := refusedAll(t, fakeURL("amqp", first), fakeURL("amqp", second))
	assert.Contains(t, e.Error(), first)
	assert.Contains(t, e.Error(), second)
}

func refusedAll(t *testing.T, first, second string) error {
	t.Helper()
	_, err := client.Connect(t.Context(), first, client.Config{Endpoints: []string{second}})
	require.ErrorIs(t, err, client.ErrUnreachable)
	suite.AssertNoSecret(t, err)
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
			addr := suite.Listen(t, func(c net.Conn) {
				_, _ = io.ReadFull(c, make([]byte, 8))
				_, _ = io.WriteString(c, answer)
			})
			suite.Refused(t, fakeURL("amqp", addr), client.ErrUnreachable, suite.RefusedIn)
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
			addr := suite.Listen(t, func(c net.Conn) {
				_, _ = io.WriteString(c, answer)
				_, _ = io.Copy(io.Discard, c) // until the client gives up
			})
			for _, scheme := range []string{"amqp", "amqps"} {
				kind := client.ErrUnreachable
				if scheme == "amqps" {
					kind = client.ErrTLS
				}
				suite.Refused(t, fakeURL(scheme, addr), kind, suite.RefusedIn, func(c *client.Config) { c.ConnectTimeout = 500 * time.Millisecond })

				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				began := time.Now()
				_, err := client.Connect(ctx, fakeURL(scheme, addr), client.Config{})
				cancel()
				require.ErrorIs(t, err, kind)
				assert.Less(t, time.Since(began), suite.RefusedIn, "the caller's ctx counts, too")
				suite.AssertNoSecret(t, err)
			}
		})
	}
}

func TestListenerThatNeverAnswersIsAbandonedByDefault(t *testing.T) {
	t.Parallel()
	addr := suite.Listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	// Config.ConnectTimeout documents 15 s.
	suite.Refused(t, fakeURL("amqp", addr), client.ErrUnreachable, 16*time.Second)
}

func TestTLSAgainstAPlainPortIsErrTLS(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		u := s.AMQPURLWith(func(u *url.URL) { u.Scheme = "amqps"; withSecret(u) })
		e := suite.Refused(t, u, client.ErrTLS, suite.RefusedIn)
		var record tls.RecordHeaderError
		assert.True(t, errors.As(e, &record) || errors.Is(e, io.EOF) || strings.Contains(e.Error(), "reset"), "%v", e)
	})
}

// The operation that needs a missing permission reports it as such, and the connection
// stays open.
func TestMissingPermissionIsErrUnauthorized(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		admin, _ := s.Connect(t)
		suite.Apply(t, admin, suite.QueueOf(declare.QuorumQueue{Name: "orders"}))
		const all, none = ".*", "^$"
		nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
		open := func(configure, write, read string) *client.Conn {
			conn, log := suite.ConnectTo(t, s.User(t, configure, write, read))
			t.Cleanup(func() { assert.Empty(t, log.With("connection lost")) })
			return conn
		}
		within := func(what string, f func(ctx context.Context) error) error {
			ctx, cancel := context.WithTimeout(t.Context(), suite.Patience)
			defer cancel()
			began := time.Now()
			err := f(ctx)
			assert.Less(t, time.Since(began), suite.RefusedIn, what)
			return err
		}

		configure := open(none, all, all)
		err := within("declare", func(ctx context.Context) error {
			_, err := declare.Apply(ctx, configure.Management(), suite.QueueOf(declare.QuorumQueue{Name: "new"}))
			return err
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		assert.ErrorContains(t, err, `"new"`)
		suite.Publish(t, suite.Publisher[suite.Order](t, configure, address.Queue("orders")), suite.Order{ID: 1})

		write := open(all, none, all)
		err = within("publish", func(ctx context.Context) error {
			_, err := client.NewPublisher[suite.Order](ctx, write, address.Queue("orders"), client.PublisherConfig{})
			return err
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		suite.Apply(t, write, suite.QueueOf(declare.QuorumQueue{Name: "other"}))

		read := open(all, all, none)
		err = within("consume", func(ctx context.Context) error {
			return read.Consume(ctx, "orders", nothing, client.ConsumerConfig{})
		})
		assert.ErrorIs(t, err, client.ErrUnauthorized)
		suite.Publish(t, suite.Publisher[suite.Order](t, read, address.Queue("orders")), suite.Order{ID: 2})
	})
}

// A bad URL is refused before anything is sent, and not repeated with its password.
func TestBadURLIsRefusedWithoutRepeatingThePassword(t *testing.T) {
	t.Parallel()
	userinfo := url.UserPassword("guest", suite.Secret).String()
	for _, u := range []string{
		"http://" + userinfo + "@localhost/", "amqp://" + userinfo + "@/", "amqp://" + userinfo + "@localhost:port/",
		"amqp://" + userinfo + "@localhost/a/b", "amqp://" + userinfo + "@localhost/%zz", "amqp://" + userinfo + "@localhost/?x=1",
		"amqp://guest:" + suite.Secret + "@localhost/", "amqp://guest:" + suite.Secret, "://" + userinfo, "\x7f" + userinfo,
	} {
		_, err := client.Connect(t.Context(), u, client.Config{})
		var bad *argument.Error
		if assert.ErrorAs(t, err, &bad) {
			suite.AssertNoSecret(t, err)
		}
	}
}

func fakeURL(scheme, addr string) string {
	return (&url.URL{Scheme: scheme, Host: addr, User: url.UserPassword("guest", suite.Secret), Path: "/"}).String()
}

// RabbitMQ refuses a virtual host by closing the socket, without a reason and after 3 s. Only the time
// tells this from a connection that the network ends. It does the same at a limit of connections.
func TestABrokerTakesItsTimeToRefuseAVirtualHost(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		refused := func(u string) {
			began := time.Now()
			e := suite.Refused(t, u, client.ErrVirtualHost, suite.RefusedIn)
			assert.Greater(t, time.Since(began), 2*time.Second, "silentClose of internal/link")
			assert.False(t, client.WorthRetrying(e))
			assert.Regexp(t, `\(.*(EOF|connection reset by peer)\)`, e.Text, "it keeps the cause")
		}
		refused(s.AMQPURLWith(func(u *url.URL) { u.Path = "/no-such-vhost" }))
		s.HTTP(t, http.MethodPut, "/vhost-limits/"+s.VHost+"/max-connections", map[string]int{"value": 0}, nil)
		refused(s.AMQPURL())
	})
}
