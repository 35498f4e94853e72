package integration

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
	"github.com/hopback/hopback/desk"
	"github.com/hopback/hopback/retry"
)

// The night shift at a command line: survey, list, show, dry run, replay, edit, export,
// discard and import, in text and in JSON.
func TestCommandDead(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 40
		conn, _ := s.connect(t)
		morgue(t, conn, retry.Policy{}, n)
		load(t, conn, "orders.dead", 1, func(_ int, m *client.Message) {
			m.Data = [][]byte{[]byte("\x1b]0;owned\a\u202etext")}
			m.Annotations = map[any]any{client.AnnotationError: "\x1b[31mhostile", "x-last-death-reason": "rejected"}
		})
		hopback := s.shell(t)
		survey := hopback.dead(exitDone, "survey").stdout
		assert.Contains(t, survey, "gateway # refused order #")
		assert.NotContains(t, survey, "\x1b")
		group := regexp.MustCompile(`(?m)^([0-9a-f]{12}) +10 .*gateway`).FindStringSubmatch(survey)
		require.NotNil(t, group, survey)
		var surveyed desk.Survey
		require.NoError(t, json.Unmarshal([]byte(hopback.dead(exitDone, "survey", "--json").stdout), &surveyed))
		assert.Len(t, surveyed.Groups, 5)

		list := hopback.dead(exitDone, "list", "orders.dead", "--reason", "fraud", "--limit", "3", "--count").stdout
		assert.Contains(t, list, "3 messages shown; 10 of 41 selected; for more: --skip 3.")
		shown := hopback.dead(exitDone, "show", "orders.dead", "order-0").stdout
		assert.Contains(t, shown, "HISTORY")
		assert.Contains(t, shown, "gateway 10.0.0.0:443 refused order 0")
		hopback.dead(exitNo, "show", "orders.dead", "none")
		hopback.dead(exitNo, "list", "none")
		assert.Contains(t, hopback.dead(exitNo, "list", "orders.dead", "--group", "0123456789ab").stderr, "none of the 41 messages")
		hopback.dead(exitNo, "list", "orders.dead", "--id", "nobody", "--json")
		hopback.dead(exitDone, "list", "orders.dead", "--text", "nobody says this")
		hopback.dead(exitUsage, "list")
		hopback.dead(exitUsage, "replay", "orders.dead")
		hopback.dead(exitUsage, "discard", "orders.dead", "--all")
		hopback.dead(exitUsage, "list", "orders.dead", "--match", "(")

		assert.Contains(t, hopback.dead(exitDone, "replay", "orders.dead", "--group", group[1], "--dry-run").stdout, "10 of 41 messages would be replayed; nothing was sent.")
		assert.Contains(t, hopback.dead(exitDone, "replay", "orders.dead", "--group", group[1], "--max", "4", "--rate", "100", "--replay-id", "r1", "--by", "ada").stdout, "4 messages replayed")
		var report desk.ReplayReport
		require.NoError(t, json.Unmarshal([]byte(hopback.dead(exitDone, "replay", "orders.dead", "--group", group[1], "--replay-id", "r1", "--json").stdout), &report))
		assert.EqualValues(t, 6, report.Replayed)
		poll(t, "ten are back", func() bool { return ready(t, conn, "orders") == 10 })

		body := filepath.Join(t.TempDir(), "mended.json")
		require.NoError(t, os.WriteFile(body, []byte(`{"mended":true}`), 0o600))
		hopback.dead(exitUsage, "edit", "orders.dead", "order-1")
		hopback.dead(exitDone, "edit", "orders.dead", "order-1", "--body", body, "--set", "shop=s9")
		hopback.dead(exitNo, "edit", "orders.dead", "order-1", "--body", body)
		poll(t, "it is back", func() bool { return ready(t, conn, "orders") == 11 })

		file := filepath.Join(t.TempDir(), "dead.jsonl")
		assert.Contains(t, hopback.dead(exitDone, "export", "orders.dead", file).stdout, "30 messages written")
		hopback.dead(exitUsage, "export", "orders.dead", file)
		assert.Contains(t, hopback.dead(exitDone, "export", "orders.dead", file, "--resume").stdout, "0 messages written")
		discarded := hopback.dead(exitDone, "discard", "orders.dead", "--all", "--to", file).stdout
		assert.Contains(t, discarded, "30 messages discarded")
		assert.Contains(t, discarded, "30 messages were already in the file before")
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		lines := slices.Collect(strings.Lines(string(text)))
		require.Len(t, lines, 60)
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines[30:], "")), 0o600))
		assert.Zero(t, ready(t, conn, "orders.dead"))
		assert.Contains(t, hopback.dead(exitDone, "import", file, "--dry-run").stdout, "30 lines can be imported")
		assert.Contains(t, hopback.dead(exitDone, "import", file).stdout, "30 messages imported")
		text, err = os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, append([]byte("rubbish\n"), text...), 0o600))
		assert.Contains(t, hopback.dead(exitNo, "import", file).stderr, "line 1")
		poll(t, "all are back", func() bool { return ready(t, conn, "orders.dead") == 30 })

		bad := s.shell(t)
		bad.env["HOPBACK_URL"] = "amqp://guest:guest@127.0.0.1:1/"
		bad.dead(exitUnknown, "list", "orders.dead")
	})
}

// ^C stops a replay. It says how far it came, and with which replay-id to go on.
func TestCommandReplayIsInterrupted(t *testing.T) {
	forEachBroker(t, func(t *testing.T, s *site) {
		const n = 400
		conn, _ := s.connect(t)
		morgue(t, conn, retry.Policy{}, n)
		hopback := s.shell(t)
		hopback.group = "dead"
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		done := hopback.start(ctx, exitInterrupted, "replay", "orders.dead", "--all", "--rate", "40", "--replay-id", "r1")
		poll(t, "it has begun", func() bool { return ready(t, conn, "orders") > 10 })
		stop()
		out := await(t, done, "the command")
		assert.Contains(t, out.stdout, "messages replayed")
		assert.Contains(t, out.stderr, "to continue: the same command with --replay-id r1")
		poll(t, "dead + replayed = all", func() bool { return ready(t, conn, "orders")+ready(t, conn, "orders.dead") == n })
		assert.Contains(t, hopback.run(exitDone, "replay", "orders.dead", "--all", "--replay-id", "r1").stdout, "messages replayed")
		poll(t, "all are back", func() bool { return ready(t, conn, "orders") == n })
	})
}
