package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/retry"
)

var update = flag.Bool("update", false, "write testdata/history*.txt")

// scenario is what each test and the page start with.
func scenario(strategy retry.Strategy, handler string) settings {
	return settings{Strategy: strategy, MaxRetries: 2, Delays: "10s 1m", Handler: handler, Failures: 2}
}

// play publishes messages in virtual time, and returns what happened to them.
func play(t *testing.T, s settings, bodies ...string) (history string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l, err := newLab(t.Context(), s)
		require.NoError(t, err)
		defer l.close()
		synctest.Wait()
		for _, body := range bodies {
			require.NoError(t, l.send(body))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		require.NoError(t, l.broker.AwaitSettled(ctx))
		require.NoError(t, l.err)
		history = l.history()
	})
	return history
}

// The browser's test compares what the page shows with the same files.
func TestHistories(t *testing.T) {
	t.Parallel()
	for _, strategy := range []retry.Strategy{retry.StrategyRepublish, retry.StrategyDeadLetter, retry.StrategyNative} {
		for _, handler := range handlers() {
			name := string(strategy) + "-" + handler.Name
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				got := play(t, scenario(strategy, handler.Name), "first")
				file := filepath.Join("testdata", "history", name+".txt")
				if *update {
					require.NoError(t, os.WriteFile(file, []byte(got), 0o644))
				}
				want, err := os.ReadFile(file)
				require.NoError(t, err, "run go test ./operate/playground -update")
				assert.Equal(t, string(want), got)
			})
		}
	}
}

var _ = argument.Error{}
