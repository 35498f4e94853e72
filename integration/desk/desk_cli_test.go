package desk_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

// The night shift at a command line: survey, list, show, dry run, replay, edit, export,
// discard and import, in text and in JSON.
func TestCommandDead(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 40
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, n)
		suite.Load(t, conn, "orders.dead", 1, func(_ int, m *client.Message) {
			m.Data = [][]byte{[]byte("\x1b]0;owned\a\u202etext")}
			m.Annotations = map[any]any{client.AnnotationError: "\x1b[31mhostile", "x-last-death-reason": "rejected"}
		})
		hopback := s.Shell(t)
		survey := hopback.Dead(suite.ExitDone, "survey").Stdout
		assert.Contains(t, survey, "gateway # refused order #")
		assert.NotContains(t, survey, "\x1b")
		group := regexp.MustCompile(`(?m)^([0-9a-f]{12}) +10 .*gateway`).FindStringSubmatch(survey)
		require.NotNil(t, group, survey)
		var surveyed desk.Survey
		require.NoError(t, json.Unmarshal([]byte(hopback.Dead(suite.ExitDone, "survey", "--json").Stdout), &surveyed))
		assert.Len(t, surveyed.Groups, 5)

		shell := s.Shell(t)
		shell.Group = "__complete"
		suite.Poll(t, "the broker answers a tab in time", func() bool {
			return strings.Contains(shell.Run(suite.ExitDone, "dlq", "replay", "orders.dead", "--group", group[1][:4]).Stdout, group[1]+"\tpermanent ")
		})
		assert.EqualValues(t, n+1, suite.Ready(t, conn, "orders.dead"))

		list := hopback.Dead(suite.ExitDone, "list", "orders.dead", "--reason", "fraud", "--limit", "3", "--count").Stdout
		assert.Contains(t, list, "3 messages shown; 10 of 41 selected; for more: --skip 3.")
		shown := hopback.Dead(suite.ExitDone, "show", "orders.dead", "order-0").Stdout
		assert.Contains(t, shown, "HISTORY")
		assert.Contains(t, shown, "gateway 10.0.0.0:443 refused order 0")
		hopback.Dead(suite.ExitNo, "show", "orders.dead", "none")
		hopback.Dead(suite.ExitNo, "list", "none")
		assert.Contains(t, hopback.Dead(suite.ExitNo, "list", "orders.dead", "--group", "0123456789ab").Stderr, "none of the 41 messages")
		hopback.Dead(suite.ExitNo, "list", "orders.dead", "--id", "nobody", "--json")
		hopback.Dead(suite.ExitDone, "list", "orders.dead", "--text", "nobody says this")
		hopback.Dead(suite.ExitUsage, "list")
		hopback.Dead(suite.ExitUsage, "replay", "orders.dead")
		hopback.Dead(suite.ExitUsage, "discard", "orders.dead", "--all")
		hopback.Dead(suite.ExitUsage, "list", "orders.dead", "--match", "(")

		assert.Contains(t, hopback.Dead(suite.ExitDone, "replay", "orders.dead", "--group", group[1], "--dry-run").Stdout, "10 of 41 messages would be replayed; nothing was sent.")
		assert.Contains(t, hopback.Dead(suite.ExitDone, "replay", "orders.dead", "--group", group[1], "--max", "4", "--rate", "100", "--replay-id", "r1", "--by", "ada").Stdout, "4 messages replayed")
		var report desk.ReplayReport
		require.NoError(t, json.Unmarshal([]byte(hopback.Dead(suite.ExitDone, "replay", "orders.dead", "--group", group[1], "--replay-id", "r1", "--json").Stdout), &report))
		assert.EqualValues(t, 6, report.Replayed)
		suite.Poll(t, "ten are back", func() bool { return suite.Ready(t, conn, "orders") == 10 })

		body := filepath.Join(t.TempDir(), "edited.json")
		require.NoError(t, os.WriteFile(body, []byte(`{"edited":true}`), 0o600))
		hopback.Dead(suite.ExitUsage, "edit", "orders.dead", "order-1")
		hopback.Dead(suite.ExitDone, "edit", "orders.dead", "order-1", "--body", body, "--set", "shop=s9")
		hopback.Dead(suite.ExitNo, "edit", "orders.dead", "order-1", "--body", body)
		suite.Poll(t, "it is back", func() bool { return suite.Ready(t, conn, "orders") == 11 })

		file := filepath.Join(t.TempDir(), "dead.jsonl")
		assert.Contains(t, hopback.Dead(suite.ExitDone, "export", "orders.dead", file).Stdout, "30 messages written")
		hopback.Dead(suite.ExitUsage, "export", "orders.dead", file)
		assert.Contains(t, hopback.Dead(suite.ExitDone, "export", "orders.dead", file, "--resume").Stdout, "0 messages written")
		discarded := hopback.Dead(suite.ExitDone, "discard", "orders.dead", "--all", "--to", file).Stdout
		assert.Contains(t, discarded, "30 messages discarded")
		assert.Contains(t, discarded, "30 messages were already in the file before")
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		lines := slices.Collect(strings.Lines(string(text)))
		require.Len(t, lines, 60)
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines[30:], "")), 0o600))
		assert.Zero(t, suite.Ready(t, conn, "orders.dead"))
		assert.Contains(t, hopback.Dead(suite.ExitDone, "import", file, "--dry-run").Stdout, "30 lines can be imported")
		assert.Contains(t, hopback.Dead(suite.ExitDone, "import", file).Stdout, "30 messages imported")
		text, err = os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, append([]byte("rubbish\n"), text...), 0o600))
		assert.Contains(t, hopback.Dead(suite.ExitNo, "import", file).Stderr, "line 1")
		suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "orders.dead") == 30 })

		bad := s.Shell(t)
		bad.Env["HOPBACK_URL"] = "amqp://guest:guest@127.0.0.1:1/"
		bad.Dead(suite.ExitUnknown, "list", "orders.dead")
	})
}

// ^C stops a replay. It says how far it came, and with which replay-id to go on.
func TestCommandReplayIsInterrupted(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		const n = 400
		conn, _ := s.Connect(t)
		deadLetterQueue(t, conn, retry.Policy{}, n)
		hopback := s.Shell(t)
		hopback.Group = "dead"
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		done := hopback.Start(ctx, suite.ExitInterrupted, "replay", "orders.dead", "--all", "--rate", "40", "--replay-id", "r1")
		suite.Poll(t, "it has begun", func() bool { return suite.Ready(t, conn, "orders") > 10 })
		stop()
		out := suite.Await(t, done, "the command")
		assert.Contains(t, out.Stdout, "messages replayed")
		assert.Contains(t, out.Stderr, "to continue: the same command with --replay-id r1")
		suite.Poll(t, "dead + replayed = all", func() bool { return suite.Ready(t, conn, "orders")+suite.Ready(t, conn, "orders.dead") == n })
		assert.Contains(t, hopback.Run(suite.ExitDone, "replay", "orders.dead", "--all", "--replay-id", "r1").Stdout, "messages replayed")
		suite.Poll(t, "all are back", func() bool { return suite.Ready(t, conn, "orders") == n })
	})
}
