package httpapi_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/operate/httpapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const password = "s3cret/%?"

// serve answers every request with h, and returns a Reader with a password.
func serve(t *testing.T, h http.HandlerFunc, cfg httpapi.Config) *httpapi.Reader {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	r, err := httpapi.New("http://user:s3cret%2F%25%3F@"+strings.TrimPrefix(server.URL, "http://")+"/prefix/", "a/b", cfg)
	require.NoError(t, err)
	return r
}

func TestGet(t *testing.T) {
	t.Parallel()
	r := serve(t, func(w http.ResponseWriter, req *http.Request) {
		user, got, _ := req.BasicAuth()
		_, _ = fmt.Fprintf(w, "%s %s %s %s", req.Method, req.URL.EscapedPath(), user, got)
	}, httpapi.Config{})
	body, err := r.Get(t.Context(), "/queues/a%2Fb")
	require.NoError(t, err)
	assert.Equal(t, "GET /prefix/api/queues/a%2Fb user "+password, string(body))
	assert.Equal(t, "a/b", r.VHost())
}

func TestRefusalsAreClearAndTellNoPassword(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]struct {
		reason error
		says   string
	}{
		401: {declare.ErrForbidden, `user "user" lacks the required tag`},
		403: {declare.ErrForbidden, "monitoring for nodes"},
		404: {declare.ErrNotFound, `the virtual host "a/b" doesn't exist`},
		301: {declare.ErrBadReply, "status 301"},
		500: {declare.ErrUnavailable, "status 500"},
	} {
		r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(status)
		}, httpapi.Config{})
		_, err := r.Get(t.Context(), "/overview")
		require.ErrorIs(t, err, want.reason)
		assert.ErrorContains(t, err, want.says)
		var e *httpapi.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, status, e.Status)
		assert.True(t, e.SafeToRetry())
		for _, text := range []string{err.Error(), fmt.Sprint(r), fmt.Sprintf("%+v", r), fmt.Sprintf("%#v", r), fmt.Sprintf("%#v", e)} {
			assert.NotContains(t, text, "s3cret")
		}
	}
}

func TestNoAnswer(t *testing.T) {
	t.Parallel()
	r, err := httpapi.New("http://u:s3cret@127.0.0.1:1", "/", httpapi.Config{})
	require.NoError(t, err)
	_, err = r.Get(t.Context(), "/overview")
	require.ErrorIs(t, err, declare.ErrUnavailable)
	assert.ErrorContains(t, err, "check that the management plugin is enabled")
	assert.NotContains(t, err.Error(), "s3cret")

	release := make(chan struct{})
	slow := serve(t, func(http.ResponseWriter, *http.Request) { <-release }, httpapi.Config{Timeout: 20 * time.Millisecond})
	_, err = slow.Get(t.Context(), "/overview")
	require.ErrorIs(t, err, declare.ErrUnavailable)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = slow.Get(ctx, "/overview")
	require.ErrorIs(t, err, context.Canceled)
	close(release)

	big := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 11)) }, httpapi.Config{MaxBody: 10})
	_, err = big.Get(t.Context(), "/overview")
	require.ErrorContains(t, err, "more than 10 bytes")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		url, vhost string
		cfg        httpapi.Config
		says       string
	}{
		{"http://u:s3cret%zz@h", "/", httpapi.Config{}, "isn't a URL"},
		{"amqp://u:s3cret@h", "/", httpapi.Config{}, "http or https"},
		{"http://", "/", httpapi.Config{}, "with a host"},
		{"http://h", "/", httpapi.Config{}, "has no user"},
		{"http://u:s3cret@h", "", httpapi.Config{}, "vhost"},
		{"http://u:s3cret@h", "/", httpapi.Config{Timeout: -1}, "Timeout"},
		{"http://u:s3cret@h", "/", httpapi.Config{MaxBody: -1}, "MaxBody"},
	} {
		_, err := httpapi.New(tt.url, tt.vhost, tt.cfg)
		var e *argument.Error
		require.ErrorAs(t, err, &e)
		assert.ErrorContains(t, err, tt.says)
		assert.NotContains(t, err.Error(), "s3cret")
	}
}

// A token is asked for before each request, and takes the place of a password.
func TestToken(t *testing.T) {
	t.Parallel()
	var got []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, password, _ := r.BasicAuth()
		got = append(got, password)
		_, _ = w.Write([]byte("{}"))
	}))
	t.Cleanup(server.Close)
	n := 0
	failed := errors.New("the login page is down")
	r, err := httpapi.New(server.URL, "/", httpapi.Config{Token: func(context.Context) (string, error) {
		if n++; n == 3 {
			return "", failed
		}
		return fmt.Sprint("t", n), nil
	}})
	require.NoError(t, err)
	for range 2 {
		_, err := r.Get(t.Context(), "/overview")
		require.NoError(t, err)
	}
	_, err = r.Get(t.Context(), "/overview")
	require.ErrorIs(t, err, failed)
	require.ErrorIs(t, err, declare.ErrForbidden)
	assert.Equal(t, []string{"t1", "t2"}, got)
}

// A reserved character in the password that isn't percent-encoded makes a part of the password the
// host, the port, or the path. No error, and no text of the Reader, shows it.
func TestAMistypedURLShowsNoPartOfThePassword(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"hun@ter/x", "hun/ter", "1?hunter", "1#hunter", "1/hunter", "hun@ter", "hun@ter@x"} {
		r, err := httpapi.New("http://shop:"+password+"@127.0.0.1:1/", "/", httpapi.Config{})
		require.Error(t, err, "%v", r)
		assert.NotContains(t, err.Error(), "hun")
		assert.NotContains(t, err.Error(), "/ter")
	}
}
