package rabbitmq_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/integration/rabbitmq"
)

// needsCluster skips where no cluster can be had.
func needsCluster(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, rabbitmq.ErrNoCluster) || errors.Is(err, rabbitmq.ErrNotOurs) {
		t.Skip(err)
	}
	require.NoError(t, err)
}

func TestOwnClusterSurvivesItsFaults(t *testing.T) {
	if os.Getenv("HOPBACK_LONG") == "" {
		t.Skip("set HOPBACK_LONG=1; package integration/cluster uses what is tested here anyway")
	}
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	c, err := rabbitmq.OwnCluster(ctx, os.Stderr, "4.3")
	needsCluster(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Release(context.Background())) })
	require.Len(t, c.Nodes, 3)

	first, second, third := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	sees := func(n *rabbitmq.Node, want int) {
		t.Helper()
		var running []string
		require.Eventually(t, func() bool {
			running, err = n.Running(ctx)
			return err == nil && len(running) == want
		}, time.Minute, 200*time.Millisecond, "%s sees %v: %v", n.Name, running, err)
	}
	for _, fault := range []struct {
		name     string
		do, undo func(context.Context) error
		node     *rabbitmq.Node
	}{
		{"kill", second.Kill, second.Start, second},
		{"isolate", third.Isolate, third.Rejoin, third},
		{"pause", second.Pause, second.Unpause, second},
	} {
		require.NoError(t, fault.do(ctx), fault.name)
		_, err := fault.node.Running(ctx)
		require.Error(t, err, "%s: its clients don't reach it", fault.name)
		if fault.name == "kill" { // of the others its peers hear after a minute or so
			sees(first, 2)
		}
		require.NoError(t, fault.undo(ctx), fault.name)
		began := time.Now()
		require.NoError(t, c.AwaitAll(ctx), fault.name)
		t.Logf("REPORT cluster %s: whole %.1f s after the end of %q", c.Version, time.Since(began).Seconds(), fault.name)
	}
	out, err := second.Eval(ctx, "node().")
	require.NoError(t, err)
	assert.Equal(t, second.Name+"\n", string(out))
	require.NoError(t, c.Release(ctx))
	require.NoError(t, c.Release(ctx), "twice does nothing")
	require.Error(t, second.Kill(ctx), "it is gone")
}
