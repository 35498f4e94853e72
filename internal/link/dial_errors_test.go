package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	engine "github.com/hopback/hopback/internal/amqp"
	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/frames"
)

// scripted is a peer that says this, and then, after a while, closes its socket.
func scripted(says []byte, after time.Duration) net.Conn {
	near, far := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, far) }()
	go func() {
		_, _ = far.Write(says)
		time.Sleep(max(after, time.Millisecond)) // until the other end waits
		_ = far.Close()
	}()
	return near
}

func wireBytes(t *testing.T, parts ...any) (b []byte) {
	for _, part := range parts {
		switch p := part.(type) {
		case frames.Protocol:
			b = append(b, p.Header()...)
		case frames.Frame:
			var err error
			b, err = frames.Append(b, p)
			require.NoError(t, err)
		}
	}
	return b
}

func sasl(body frames.Performative) frames.Frame {
	return frames.Frame{Type: frames.TypeSASL, Body: body}
}

func dialing(conn net.Conn) DialConfig {
	return DialConfig{
		ConnectTimeout: time.Minute, IdleTimeout: time.Minute, Log: slog.New(slog.DiscardHandler),
		Dial: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}
}

func loggedIn(rest ...any) []any {
	return append([]any{
		frames.ProtocolSASL, sasl(&frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}), sasl(&frames.Outcome{}), frames.ProtocolAMQP,
	}, rest...)
}

func closing(condition frames.Symbol, text string, info ...frames.Entry) frames.Frame {
	return frames.Frame{Body: &frames.Close{Error: &frames.Error{Condition: condition, Description: text, Info: info}}}
}

// What a connection fails with has a kind that fits, keeps the cause, and says what to do.
func TestWhyAConnectionIsNotOpened(t *testing.T) {
	for name, c := range map[string]struct {
		says  []any
		after time.Duration
		login Credentials
		kind  error
		worth bool
		text  []string
	}{
		"a virtual host": {loggedIn(), 3 * time.Second, Credentials{}, failure.ErrVirtualHost, false,
			[]string{`virtual host "shop" as user "ada"`, "(EOF)", "limit of connections", "create the virtual host"}},
		"a refusal with a reason": {loggedIn(closing("amqp:not-allowed", "vhost shop is down")), 0, Credentials{}, failure.ErrVirtualHost, false,
			[]string{"vhost shop is down", `virtual host "shop"`}},
		"a reset": {loggedIn(), 0, Credentials{}, failure.ErrUnreachable, true,
			[]string{"ended while it was being opened", "(EOF)", "try again"}},
		"a malformed open": {loggedIn(frames.Frame{Body: &frames.Begin{}}), 0, Credentials{}, failure.ErrUnreachable, false,
			[]string{"isn't one of AMQP 1.0", "Begin in place of an open"}},
		"frame_max 0": {loggedIn(frames.Frame{Body: &frames.Open{MaxFrameSize: frames.Some(uint32(0))}}), 0, Credentials{}, failure.ErrUnreachable, false,
			[]string{"at most 0 bytes", "frame_max"}},
		"a redirect": {loggedIn(closing("amqp:connection:redirect", "go away", frames.Entry{Key: frames.Symbol("network-host"), Value: "b.example"}, frames.Entry{Key: frames.Symbol("port"), Value: uint16(5672)})), 0, Credentials{}, failure.ErrUnreachable, false,
			[]string{`connect to "b.example:5672"`, "doesn't follow redirects"}},
		"a redirect to nowhere": {loggedIn(closing("amqp:connection:redirect", "")), 0, Credentials{}, failure.ErrUnreachable, false, []string{"another host"}},
		"another refusal": {loggedIn(closing("amqp:invalid-field", "max-frame-size is too small")), 0, Credentials{}, failure.ErrUnreachable, true,
			[]string{"didn't open the connection", "max-frame-size is too small", "log"}},
		"no common mechanism": {[]any{frames.ProtocolSASL, sasl(&frames.Mechanisms{Mechanisms: []frames.Symbol{"EXTERNAL", "ANONYMOUS"}})}, 0, Credentials{}, failure.ErrAuthentication, false,
			[]string{"offers EXTERNAL, ANONYMOUS and not PLAIN", "auth_mechanisms"}},
		"EXTERNAL isn't offered": {[]any{frames.ProtocolSASL, sasl(&frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}})}, 0, Credentials{Mechanism: "EXTERNAL"}, failure.ErrAuthentication, false,
			[]string{"offers PLAIN and not EXTERNAL", "rabbitmq_auth_mechanism_ssl"}},
		"EXTERNAL is refused": {[]any{frames.ProtocolSASL, sasl(&frames.Mechanisms{Mechanisms: []frames.Symbol{"EXTERNAL"}}), sasl(&frames.Outcome{Code: 1})}, 0, Credentials{Mechanism: "EXTERNAL"}, failure.ErrAuthentication, false,
			[]string{"client certificate", "ssl_cert_login_from"}},
		"a wrong password": {[]any{frames.ProtocolSASL, sasl(&frames.Mechanisms{Mechanisms: []frames.Symbol{"PLAIN"}}), sasl(&frames.Outcome{Code: 1})}, 0, Credentials{}, failure.ErrAuthentication, false,
			[]string{`PLAIN for user "ada"`, "check the user and the password"}},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if c.login.Mechanism == "" {
					c.login = PlainLogin("ada", "secret")
				}
				ep := Endpoint{address: "h:5672", host: "h", vhost: "shop", Shown: "amqp://ada:xxxxx@h/shop", sasl: c.login}
				conn := scripted(wireBytes(t, c.says...), c.after)
				_, err := Dial(t.Context(), ep, dialing(conn))
				time.Sleep(time.Minute) // the peer ends
				var e *failure.Error
				require.ErrorAs(t, err, &e)
				assert.Equal(t, c.kind, e.Kind, "%v", err)
				assert.Equal(t, c.worth, failure.WorthRetrying(err), "%v", err)
				for _, text := range c.text {
					assert.ErrorContains(t, err, text)
				}
				assert.NotContains(t, err.Error(), "secret")
				if c.kind != failure.ErrAuthentication || c.login.Mechanism == "EXTERNAL" || len(c.says) < 3 {
					assert.NotContains(t, err.Error(), "check the user and the password")
				}
			})
		})
	}
}

// A TLS alert says nothing about host and port.
func TestWhatToDoAboutATLSAlert(t *testing.T) {
	t.Parallel()
	for text, remedy := range map[string]string{
		"tls: bad certificate":                   "client certificate",
		"tls: certificate required":              "client certificate",
		"tls: unknown certificate authority":     "client certificate",
		"tls: expired certificate":               "client certificate",
		"tls: protocol version not supported":    "TLS version",
		"tls: handshake failure":                 "cipher suite",
		"tls: unrecognized name":                 "server name",
		"tls: internal error":                    "its log",
		"tls: insufficient security level":       "cipher suite",
		"tls: no application protocol":           "its log",
		"tls: user canceled, certificate or not": "client certificate",
	} {
		err := &net.OpError{Op: "remote error", Err: errors.New(text)}
		got := withRemedy(Endpoint{}, err)
		assert.Contains(t, got, text)
		assert.Contains(t, got, remedy, text)
		assert.NotContains(t, got, "host and the port", text)
	}
	assert.Contains(t, withRemedy(Endpoint{}, tls.RecordHeaderError{}), "without TLS")
}

// An endpoint that has worked has the right host and port. What the broker or TLS says stays.
func TestAnEndpointThatHasWorkedIsNotDoubted(t *testing.T) {
	t.Parallel()
	worked := Endpoint{worked: &atomic.Bool{}, vhost: "shop"}
	worked.worked.Store(true)
	for _, err := range []error{
		syscall.ECONNREFUSED, syscall.ECONNRESET, io.EOF, context.DeadlineExceeded, &net.DNSError{Err: "no such host"},
		&engine.HandshakeError{Phase: engine.PhaseOpen, Err: io.EOF, Waited: time.Minute}, &engine.HandshakeError{Phase: engine.PhaseSASL, Err: io.EOF},
		&engine.HandshakeError{Phase: engine.PhaseSASL, Err: context.DeadlineExceeded},
	} {
		for _, text := range []string{withRemedy(worked, err), connectError(worked, err).Error()} {
			assert.NotContains(t, text, "URL")
			assert.NotContains(t, text, "not be an AMQP")
		}
		assert.Contains(t, connectError(Endpoint{worked: &atomic.Bool{}}, err).Error(), "URL", "%v, before it has worked", err)
	}
	assert.Contains(t, withRemedy(worked, tls.RecordHeaderError{}), "without TLS")
	assert.Contains(t, withRemedy(worked, x509.HostnameError{Certificate: &x509.Certificate{}}), "server name")
}
