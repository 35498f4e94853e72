// Package integration follows messages through real brokers, RabbitMQ 4.3 and 4.0. A
// missing broker is a failure.
package integration

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// patience is how long a test waits for what should come soon.
const patience = 45 * time.Second

var brokers []*rabbitmq.Broker

var quiet = slog.New(slog.DiscardHandler)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if brokers, err = rabbitmq.Need(ctx, os.Stderr, "4.3", "4.0"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	for _, b := range brokers {
		if err := b.Release(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

var siteCount atomic.Int64

// forEachBroker gives each test a separate virtual host.
func forEachBroker(t *testing.T, test func(t *testing.T, version, url string)) {
	t.Helper()
	t.Parallel()
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			t.Parallel()
			vhost := fmt.Sprintf("otel-%x-%d", time.Now().UnixMilli(), siteCount.Add(1))
			management(t, b, http.MethodPut, "/vhosts/"+vhost)
			t.Cleanup(func() { management(t, b, http.MethodDelete, "/vhosts/"+vhost) })
			u, err := url.Parse(b.URL)
			require.NoError(t, err)
			u.Path = "/" + vhost
			test(t, b.Version, u.String())
		})
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func management(t *testing.T, b *rabbitmq.Broker, method, path string) {
	t.Helper()
	base, err := url.Parse(b.ManagementURL)
	require.NoError(t, err)
	user := base.User
	base.User = nil
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(base.String(), "/")+"/api"+path, bytes.NewReader(nil))
	require.NoError(t, err)
	password, _ := user.Password()
	req.SetBasicAuth(user.Username(), password)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, 2, resp.StatusCode/100, "%s %s: %s", method, path, resp.Status)
}
