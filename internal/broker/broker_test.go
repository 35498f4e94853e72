package broker_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/internal/broker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNeedReturnsBrokersThatServe(t *testing.T) {
	t.Parallel()
	brokers, err := broker.Need(t.Context(), os.Stderr, "4.3", "4.0")
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, b := range brokers {
			assert.NoError(t, b.Release(context.Background()))
		}
	})
	require.Len(t, brokers, 2)
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			list, err := broker.List(t.Context())
			require.NoError(t, err)
			found := false
			for _, s := range list {
				if s.URL == b.URL {
					found = true
					assert.NoError(t, s.Err)
					assert.Equal(t, b.FullVersion, s.FullVersion)
					assert.Equal(t, b.Version, s.Version)
					assert.Equal(t, b.How, s.How)
				}
			}
			assert.True(t, found, "%s is in no list", b.URL)
			assert.True(t, strings.HasPrefix(b.FullVersion, b.Version+"."))
			out, err := b.Exec(t.Context(), "rabbitmqctl", "-q", "eval", "rabbit:product_version().")
			if b.How == broker.Environment {
				require.ErrorIs(t, err, broker.ErrNotOurs)
				return
			}
			require.NoError(t, err)
			assert.Contains(t, string(out), b.FullVersion)
		})
	}
}

// Each version suffers one fault, as a start costs its machine ten seconds.
func TestOwnBrokerSurvivesItsFaults(t *testing.T) {
	t.Parallel()
	for version, fault := range map[string]func(*broker.Broker, context.Context) error{
		"4.3": func(b *broker.Broker, ctx context.Context) error {
			if err := b.Kill(ctx); err != nil {
				return err
			}
			_, err := b.Exec(ctx, "rabbitmqctl", "-q", "list_vhosts")
			assert.Error(t, err, "a dead broker answers nothing")
			return b.Start(ctx)
		},
		"4.0": (*broker.Broker).Restart,
	} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			b, err := broker.Own(t.Context(), os.Stderr, version)
			var none *broker.NoWayError
			if os.Getenv("HOPBACK_URL_"+strings.Replace(version, ".", "_", 1)) != "" && (errors.Is(err, broker.ErrNotOurs) || errors.As(err, &none)) {
				t.Skip("only a broker of the environment can be had here:", err)
			}
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })
			started := time.Since(began)

			_, err = b.Exec(t.Context(), "rabbitmqctl", "-q", "add_vhost", "kept")
			require.NoError(t, err)
			_, err = b.Exec(t.Context(), "rabbitmqctl", "no_such_command")
			require.Error(t, err)

			began = time.Now()
			require.NoError(t, fault(b, t.Context()))
			t.Logf("REPORT broker %s: started in %.1f s, back after its fault in %.1f s", b.FullVersion, started.Seconds(), time.Since(began).Seconds())

			out, err := b.Exec(t.Context(), "rabbitmqctl", "-q", "list_vhosts")
			require.NoError(t, err)
			assert.Contains(t, string(out), "kept", "its data stay")
		})
	}
}
