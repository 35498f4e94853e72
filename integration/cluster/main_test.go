// Package cluster holds the tests of hopback on a RabbitMQ cluster of three nodes,
// whose nodes are killed, frozen and cut off. They need Docker.
package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// long says that the tests which take minutes run, too, and all of them with 4.0.
var long = os.Getenv("HOPBACK_LONG") != ""

func versions() []string {
	if long {
		return []string{"4.3", "4.0"}
	}
	return []string{"4.3"}
}

// clusters, by version, are started when the first test wants one, and shared: one
// test at a time, as each of them breaks something.
var clusters = map[string]func() (*rabbitmq.Cluster, error){
	"4.3": sync.OnceValues(func() (*rabbitmq.Cluster, error) { return start("4.3") }),
	"4.0": sync.OnceValues(func() (*rabbitmq.Cluster, error) { return start("4.0") }),
}

var started []*rabbitmq.Cluster

func start(version string) (*rabbitmq.Cluster, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	c, err := rabbitmq.OwnCluster(ctx, os.Stderr, version)
	if err == nil {
		started = append(started, c)
	}
	return c, err
}

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	for _, c := range started {
		if err := c.Release(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// forEachCluster runs test with a whole cluster of each version. Where there is no
// Docker it is skipped, which the summary of the tests counts.
func forEachCluster(t *testing.T, test func(t *testing.T, c *rabbitmq.Cluster)) {
	t.Helper()
	rabbitmq.NeedsStart(t)
	for _, version := range versions() {
		t.Run(version, func(t *testing.T) {
			c, err := clusters[version]()
			if errors.Is(err, rabbitmq.ErrNoCluster) || errors.Is(err, rabbitmq.ErrNotOurs) {
				t.Skip(err)
			}
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			require.NoError(t, c.AwaitAll(ctx), "what an earlier test left")
			test(t, c)
		})
	}
}
