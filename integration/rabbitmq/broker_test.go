package rabbitmq_test

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

	"github.com/hopback/hopback/integration/rabbitmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNeedReturnsBrokersThatServe(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Parallel()
	brokers, err := rabbitmq.Need(t.Context(), os.Stderr, "4.3", "4.0")
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, b := range brokers {
			assert.NoError(t, b.Release(context.Background()))
		}
	})
	require.Len(t, brokers, 2)
	for _, b := range brokers {
		t.Run(b.Version, func(t *testing.T) {
			list, err := rabbitmq.List(t.Context())
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
			if b.How == rabbitmq.HowEnvironment {
				_, err := b.Exec(t.Context(), "rabbitmqctl", "status")
				require.ErrorIs(t, err, rabbitmq.ErrNotOurs)
				_, err = b.Eval(t.Context(), "node().")
				require.ErrorIs(t, err, rabbitmq.ErrNotOurs)
				return
			}
			evaluates(t, b)
		})
	}
}

// withoutErlCall runs a command with a PATH that lacks erl_call, as the official image's may.
const withoutErlCall = `dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT
ln -s /usr/bin/* "$dir" && rm -f "$dir/erl_call" && PATH=$(dirname "$(command -v rabbitmqctl)"):$dir && "$@"`

func evaluates(t *testing.T, b *rabbitmq.Broker) {
	t.Helper()
	by := func(command ...string) func(string) ([]byte, error) {
		return func(expressions string) ([]byte, error) {
			return b.Exec(t.Context(), append(command, rabbitmq.EvalCommand(expressions)...)...)
		}
	}
	direct := func(expressions string) ([]byte, error) { return b.Eval(t.Context(), expressions) }
	fallback := by("sh", "-c", withoutErlCall, "without") // dear, as it starts an Erlang VM
	for _, c := range []struct {
		eval        func(string) ([]byte, error)
		expressions string
		value       string // without the end of the line
		failure     string // or a part of the error
	}{
		{direct, "rabbit:product_version().", `"` + b.FullVersion + `"`, ""},
		{direct, "X = <<\"a'b\">>, % a remark\n{X, 'q r', \"λ\",\n\"$HOME\"}.\n", `{<<"a'b">>,'q r',"λ","$HOME"}`, ""},
		{direct, `{error, "*** x"}.`, `{error,"*** x"}`, ""},
		{direct, `io:format("{error, no} "), {ok, ok}.`, "{error, no} {ok,ok}", ""},
		{direct, `io:format("{ok, ok}"), throw(late).`, "", "late"},
		{direct, "1 + 1", "", "syntax error"}, // no full stop
		{direct, "1 + .", "", "syntax error"},
		{direct, `"open.`, "", "unterminated"},
		{direct, "throw(up).", "", "up"},
		{direct, "exit(down).", "", "down"},
		{direct, "true = 1 > 2.", "", "false"},
		{by("env", "RABBITMQ_NODENAME=nobody@localhost"), "node().", "", "failed to connect"},
		{fallback, `{"a", rabbit:product_version()}.`, `{"a","` + b.FullVersion + `"}`, ""},
		{fallback, "1 + .", "", "eval 1 + ."},
	} {
		out, err := c.eval(c.expressions)
		if c.failure != "" {
			assert.ErrorContains(t, err, c.failure, c.expressions)
		} else if assert.NoError(t, err, c.expressions) {
			assert.Equal(t, c.value, strings.TrimSuffix(string(out), "\n"), c.expressions)
		}
	}
	long, err := b.Eval(t.Context(), "lists:duplicate(100000, $a).")
	require.NoError(t, err)
	assert.Len(t, strings.Join(strings.Fields(string(long)), ""), 100_000+len(`""`))
}

// Each version suffers one fault, as a start costs its machine ten seconds.
func TestOwnBrokerSurvivesItsFaults(t *testing.T) {
	rabbitmq.NeedsStart(t)
	t.Parallel()
	for version, fault := range map[string]func(*rabbitmq.Broker, context.Context) error{
		"4.3": func(b *rabbitmq.Broker, ctx context.Context) error {
			if err := b.Kill(ctx); err != nil {
				return err
			}
			_, err := b.Eval(ctx, "node().")
			assert.Error(t, err, "a dead broker answers nothing")
			return b.Start(ctx)
		},
		"4.0": (*rabbitmq.Broker).Restart,
	} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			b, err := rabbitmq.Own(t.Context(), os.Stderr, version)
			var none *rabbitmq.NoWayError
			if os.Getenv("HOPBACK_URL_"+strings.Replace(version, ".", "_", 1)) != "" && (errors.Is(err, rabbitmq.ErrNotOurs) || errors.As(err, &none)) {
				t.Skip("only a broker of the environment can be had here:", err)
			}
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, b.Release(context.Background())) })
			started := time.Since(began)

			_, err = b.Eval(t.Context(), `ok = rabbit_vhost:add(<<"kept">>, <<"guest">>).`)
			require.NoError(t, err)
			out, err := b.Exec(t.Context(), "sh", "-c", "echo $HOME")
			require.NoError(t, err)
			assert.Equal(t, "/var/lib/rabbitmq\n", string(out))
			_, err = b.Exec(t.Context(), "sh", "-c", "echo a reason >&2; exit 3")
			require.ErrorContains(t, err, "a reason")

			began = time.Now()
			require.NoError(t, fault(b, t.Context()))
			t.Logf("REPORT broker %s: started in %.1f s, back after its fault in %.1f s", b.FullVersion, started.Seconds(), time.Since(began).Seconds())

			out, err = b.Eval(t.Context(), "rabbit_vhost:list_names().")
			require.NoError(t, err)
			assert.Contains(t, string(out), "kept", "its data stay")
		})
	}
}
