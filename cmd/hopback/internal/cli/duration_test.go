package cli

import (
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDurationsHaveDaysAndWeeks(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"7d": 7 * day, "2w": 14 * day, "1w2d3h": 9*day + 3*time.Hour, "1.5d": 36 * time.Hour, ".5d": 12 * time.Hour, "-1d": -day,
		"1h30m": 90 * time.Minute, "0": 0, "1d0.5h": day + 30*time.Minute, "10ms": 10 * time.Millisecond,
	} {
		got, err := parseDuration(text)
		require.NoError(t, err, text)
		assert.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "7", "7days", "d", "7 d", "1dd", "1y", "99999999w", "soon"} {
		_, err := parseDuration(text)
		assert.ErrorContains(t, err, "7d", text)
	}
}

// Every flag for a duration has the same units.
func TestAllFlagsForDurationsHaveDays(t *testing.T) {
	t.Parallel()
	c := &command{io: IO{Env: func(string) string { return "" }}}
	seen := 0
	var visit func(*cobra.Command)
	visit = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Value.Type() != "duration" {
				return
			}
			seen++
			require.NoError(t, f.Value.Set("2w1d"), "%s --%s", cmd.CommandPath(), f.Name)
			assert.Equal(t, "360h0m0s", f.Value.String())
		})
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(c.root())
	assert.Greater(t, seen, 8)
}
