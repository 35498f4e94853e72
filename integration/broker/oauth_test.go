package broker_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/url"
	"strings"
	"sync/atomic"
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

var signingKey = []byte("a key that only the tests and their broker know")

func base64URL(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// jwt is a token as an authorization server would give it, for everything in every
// virtual host, and for the HTTP API.
func jwt(key []byte, expires time.Time) string {
	part := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return base64URL(b)
	}
	text := part(map[string]any{"alg": "HS256", "typ": "JWT", "kid": "test"}) + "." + part(map[string]any{
		"aud": []string{"hopback"}, "sub": "worker", "client_id": "worker", "exp": expires.Unix(),
		"scope": []string{"hopback.configure:*/*", "hopback.read:*/*/*", "hopback.write:*/*/*", "hopback.tag:management"},
	})
	sum := hmac.New(sha256.New, key)
	sum.Write([]byte(text))
	return text + "." + base64URL(sum.Sum(nil))
}

// useOAuth2 makes the broker accept our tokens, in addition to its users.
func useOAuth2(t *testing.T, s *suite.Site) {
	t.Helper()
	s.Enable(t, "rabbitmq_auth_backend_oauth2")
	key := base64URL(signingKey)
	s.EvalOK(t, strings.Join([]string{
		`ok = application:set_env(rabbitmq_auth_backend_oauth2, resource_server_id, <<"hopback">>),`,
		`ok = application:set_env(rabbitmq_auth_backend_oauth2, key_config, [{default_key, <<"test">>}, {algorithms, [<<"HS256">>]},`,
		`{signing_keys, #{<<"test">> => {map, #{<<"kty">> => <<"oct">>, <<"alg">> => <<"HS256">>, <<"k">> => <<"` + key + `">>}}}}]),`,
		`ok = application:set_env(rabbit, auth_backends, [rabbit_auth_backend_internal, rabbit_auth_backend_oauth2]).`,
	}, " "))
}

func withoutUser(s *suite.Site) string { return s.AMQPURLWith(func(u *url.URL) { u.User = nil }) }

func TestOAuth2TokensAreRenewedAheadOfTime(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		useOAuth2(t, s)
		// The client renews a token in the last fifth of its life. A busy machine needs seconds then.
		const life = 15 * time.Second
		var asked, failing atomic.Int32
		source := func(context.Context) (client.Token, error) {
			n := asked.Add(1)
			if n == 3 { // once, during the renewals
				failing.Add(1)
				return client.Token{}, errors.New("the authorization server is away")
			}
			expires := time.Now().Add(life).Truncate(time.Second)
			return client.Token{Value: jwt(signingKey, expires), Expires: expires}, nil
		}
		seen := &suite.Events{}
		conn, _ := suite.ConnectTo(t, withoutUser(s), suite.Soon, func(c *client.Config) {
			c.SASL = client.OAuth2(source)
			c.OnEvent = seen.Observe
		})
		suite.Apply(t, conn, suite.QueueOf(declare.QuorumQueue{Name: "q", DeadLetter: declare.Drop()}))
		got := make(chan int, 10_000)
		suite.Consume(t, conn, "q", client.JSON(func(_ context.Context, n int) error {
			got <- n
			return nil
		}), client.ConsumerConfig{})

		// For longer than three tokens live, messages go to and fro.
		p := suite.Publisher[int](t, conn, address.Queue("q"))
		sent := map[int]bool{}
		until := time.Now().Add(3*life + time.Second)
		for n := 0; time.Now().Before(until); n++ {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			err := p.Publish(ctx, n)
			cancel()
			switch {
			case err == nil:
				sent[n] = true
			case !s.AtLeast("4.1") && errors.Is(err, client.ErrUnauthorized):
				// RabbitMQ 4.0 refuses this one just before it ends the connection.
				require.ErrorContains(t, err, "token has expired")
			default:
				require.ErrorIs(t, err, client.ErrOutcomeUnknown, "while a connection is lost")
			}
			time.Sleep(20 * time.Millisecond) // paces the messages
		}
		for len(sent) > 0 {
			delete(sent, suite.Await(t, got, "every message that was accepted"))
		}
		renewed, lost := seen.Of("connection", client.EventTokenRenewed), seen.Of("connection", client.EventLost)
		suite.Report(t, s, "%d tokens asked for, %d renewed, connection lost %d times", asked.Load(), len(renewed), len(lost))
		if s.AtLeast("4.1") {
			assert.Empty(t, lost, "RabbitMQ accepts the new token on the existing connection")
			assert.GreaterOrEqual(t, len(renewed), 3)
			assert.NotEmpty(t, seen.Of("connection", client.EventTokenRefused), "the failure of the source is reported")
			assert.Equal(t, uint64(1), conn.State().Generation)
		} else {
			assert.Empty(t, renewed, "RabbitMQ 4.0 can't")
			assert.GreaterOrEqual(t, len(lost), 2, "it ends the connection when the token expires")
			assert.NotEmpty(t, seen.Of("consume", client.EventUp))
		}
		require.Eventually(t, func() bool { return conn.State().Connected }, suite.Patience, 20*time.Millisecond, "RabbitMQ 4.0 may have ended it just now")
	})
}

func TestOAuth2TokensThatDoNotServe(t *testing.T) {
	suite.ForEachOfOurs(t, func(t *testing.T, s *suite.Site) {
		useOAuth2(t, s)
		in := time.Now().Add(time.Hour)
		for name, source := range map[string]client.TokenSource{
			"signed by somebody else": func(context.Context) (client.Token, error) {
				return client.Token{Value: jwt([]byte("another key, which the broker doesn't know"), in)}, nil
			},
			"expired, and says so": func(context.Context) (client.Token, error) {
				then := time.Now().Add(-time.Hour)
				return client.Token{Value: jwt(signingKey, then), Expires: then}, nil
			},
			"expired, unsaid": func(context.Context) (client.Token, error) {
				return client.Token{Value: jwt(signingKey, time.Now().Add(-time.Hour))}, nil
			},
			"no token at all": func(context.Context) (client.Token, error) { return client.Token{}, nil },
			"not a token":     func(context.Context) (client.Token, error) { return client.Token{Value: "secret"}, nil },
			"with a NUL":      func(context.Context) (client.Token, error) { return client.Token{Value: "secret\x00"}, nil },
			"huge": func(context.Context) (client.Token, error) {
				return client.Token{Value: strings.Repeat("secret", 1<<20)}, nil
			},
			"a panic":           func(context.Context) (client.Token, error) { panic("source") },
			"an error":          func(context.Context) (client.Token, error) { return client.Token{}, errors.New("away") },
			"no answer in time": func(ctx context.Context) (client.Token, error) { <-ctx.Done(); return client.Token{}, ctx.Err() },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				_, err := client.Connect(t.Context(), withoutUser(s), client.Config{SASL: client.OAuth2(source), ConnectTimeout: 8 * time.Second})
				require.ErrorIs(t, err, client.ErrAuthentication)
				assert.NotContains(t, err.Error(), "secret")
				assert.NotContains(t, err.Error(), base64URL(signingKey))
			})
		}
		_, err := client.Connect(t.Context(), withoutUser(s), client.Config{SASL: client.OAuth2(nil)})
		require.ErrorAs(t, err, new(*argument.Error))
	})
}
