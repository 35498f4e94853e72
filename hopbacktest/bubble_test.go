package hopbacktest_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

func dial(ctx context.Context, b *hopbacktest.Broker) (*client.Conn, error) {
	return client.Connect(ctx, b.URL(), client.Config{Dial: b.Dial})
}

// A broker belongs to the bubble that it was made in. Elsewhere it is refused, before Go
// ends the process.
func TestABrokerOfAnotherBubble(t *testing.T) {
	outside := hopbacktest.Start(t, hopbacktest.Config{})
	conn, err := dial(t.Context(), outside)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.Background()) }()
	refused := func(err error, text string) {
		t.Helper()
		require.ErrorAs(t, err, new(*argument.Error))
		assert.ErrorContains(t, err, text)
	}
	var inside *hopbacktest.Broker
	synctest.Test(t, func(t *testing.T) {
		_, err := dial(t.Context(), outside)
		refused(err, "was made outside of the testing/synctest bubble")
		_, err = outside.Listen("127.0.0.1:0")
		refused(err, "was made outside of the testing/synctest bubble")
		inside = hopbacktest.Start(t, hopbacktest.Config{})
		conn, err := dial(t.Context(), inside)
		require.NoError(t, err)
		require.NoError(t, conn.Close(t.Context()))
	})
	_, err = dial(t.Context(), inside)
	refused(err, "was made in a testing/synctest bubble")
	inside.Close()
	synctest.Test(t, func(t *testing.T) {
		_, err := dial(t.Context(), inside)
		refused(err, "was made in a testing/synctest bubble")
		inside.Close()
	})
}

// misuse is set in a process that does what TestMisuseFailsTheTest names.
const misuse = "HOPBACKTEST_MISUSE"

func TestMisuseFailsTheTest(t *testing.T) {
	policy := retry.Policy{MaxRetries: 1, Backoff: retry.Delays(time.Second)}
	nothing := client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil })
	cases := map[string]struct {
		do       func()
		sentence string
	}{
		"nested": {func() {
			synctest.Test(t, func(t *testing.T) { hopbacktest.Run(t, policy, nothing, 1) })
		}, "Run makes its own testing/synctest bubble"},
		"in a handler": {func() {
			hopbacktest.Run(t, policy, client.HandlerFunc(func(context.Context, *client.Delivery) error {
				hopbacktest.Run(t, policy, nothing, 1)
				return nil
			}), 1)
		}, "Run makes its own testing/synctest bubble"},
		"still connected": {func() {
			synctest.Test(t, func(t *testing.T) {
				_, err := dial(context.Background(), hopbacktest.Start(t, hopbacktest.Config{}))
				require.NoError(t, err)
			})
		}, "a client is still connected"},
	}
	if name := os.Getenv(misuse); name != "" {
		cases[name].do()
		return
	}
	t.Parallel()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestMisuseFailsTheTest$")
			cmd.Env = append(os.Environ(), misuse+"="+name)
			out, err := cmd.CombinedOutput()
			require.Error(t, err)
			assert.Contains(t, string(out), c.sentence)
			assert.NotContains(t, string(out), "SIGSEGV")
			assert.NotContains(t, string(out), "fatal error")
		})
	}
}
