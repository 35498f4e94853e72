package cli

import (
	"bytes"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// commands are all that the command line has.
func commands(t *testing.T) (*command, []*cobra.Command) {
	t.Helper()
	var out bytes.Buffer
	c := &command{ctx: t.Context(), io: IO{Env: func(string) string { return "" }, Stdout: &out, Stderr: &out}}
	var all []*cobra.Command
	var add func(cmd *cobra.Command)
	add = func(cmd *cobra.Command) {
		all = append(all, cmd)
		for _, sub := range cmd.Commands() {
			add(sub)
		}
	}
	add(c.root())
	return c, all
}

// Two flags on one variable would share the default of the one that is registered last.
func TestEveryFlagHasTheDefaultThatItsHelpSays(t *testing.T) {
	t.Parallel()
	_, all := commands(t)
	for _, cmd := range all {
		check := func(f *pflag.Flag) {
			assert.Equal(t, f.DefValue, f.Value.String(), "%s --%s", cmd.CommandPath(), f.Name)
		}
		cmd.LocalFlags().VisitAll(check)
		cmd.InheritedFlags().VisitAll(check)
	}
}

// The commands of dead may take as long as they like, all others that have --timeout a
// minute, unless it is given. topology migrate sets its own.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	limits := func(args ...string) map[string]time.Duration {
		c, all := commands(t)
		found := map[string]time.Duration{}
		for _, cmd := range all {
			if cmd.InheritedFlags().Lookup("timeout") == nil {
				continue
			}
			require.NoError(t, cmd.ParseFlags(args))
			cmd.SetContext(t.Context())
			ctx, cancel, err := c.within(cmd)
			require.NoError(t, err)
			defer cancel()
			found[cmd.CommandPath()] = 0
			if deadline, ok := ctx.Deadline(); ok {
				found[cmd.CommandPath()] = time.Until(deadline).Round(time.Minute)
			}
		}
		return found
	}
	byDefault := limits()
	for path, limit := range map[string]time.Duration{
		"hopback dlq list": 0, "hopback dlq survey": 0, "hopback dlq replay": 0, "hopback dlq edit": 0, "hopback dlq import": 0,
		"hopback topology plan": time.Minute, "hopback outbox migrate": time.Minute, "hopback outbox relay": time.Minute, "hopback retry run": time.Minute,
	} {
		got, ok := byDefault[path]
		assert.True(t, ok, path)
		assert.Equal(t, limit, got, path)
	}
	for path, limit := range limits("--timeout", "3h") {
		assert.Equal(t, 3*time.Hour, limit, path)
	}
}
