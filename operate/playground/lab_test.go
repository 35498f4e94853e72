package main

import (
	"context"
	"encoding/json"
	"flag"
	"go/ast"
	"go/format"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/integration/explore"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/retry"
)

var update = flag.Bool("update", false, "write testdata/history again")

// scenario has the settings that the page starts with, except for the strategy and the handler.
func scenario(strategy retry.Strategy, handler string) settings {
	for _, h := range handlers {
		if h.Name == handler {
			handler = h.Script
		}
	}
	return settings{Strategy: strategy, MaxRetries: 2, Delays: "10s 1m", Handler: handler}
}

// inLab runs a test in virtual time.
func inLab(t *testing.T, s settings, test func(t *testing.T, l *lab)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l, err := newLab(t.Context(), s)
		require.NoError(t, err)
		defer l.close()
		time.Sleep(time.Second) // the worker has seen its link open
		test(t, l)
	})
}

// settled waits until nothing is left to happen.
func settled(t *testing.T, l *lab) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
	defer cancel()
	for arrived := false; !arrived; { // or was refused
		time.Sleep(time.Second)
		require.NoError(t, ctx.Err())
		l.mu.Lock()
		l.catchUp()
		arrived = !slices.ContainsFunc(l.messages, func(m *message) bool { return m.State == "" })
		l.mu.Unlock()
	}
	require.NoError(t, l.broker.AwaitSettled(ctx))
	require.Empty(t, l.problem)
}

// A test in Chromium compares what the page shows with the same files: TestPlaygroundsHistoriesAreThoseOfAGoTest.
func TestHistories(t *testing.T) {
	t.Parallel()
	for _, strategy := range strategies {
		for _, handler := range handlers {
			if handler.Name == "crashes" {
				continue // the client reconnects after a random pause
			}
			name := string(strategy) + "-" + handler.Name
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				inLab(t, scenario(strategy, handler.Name), func(t *testing.T, l *lab) {
					require.NoError(t, l.send("first", 1))
					settled(t, l)
					file := filepath.Join("testdata", "history", name+".txt")
					if *update {
						require.NoError(t, os.WriteFile(file, []byte(l.history()), 0o644))
					}
					want, err := os.ReadFile(file)
					require.NoError(t, err, "run go test ./operate/playground -update")
					assert.Equal(t, string(want), l.history())
				})
			})
		}
	}
}

// The worker crashes until the queue's delivery limit ends that.
func TestACrashingWorker(t *testing.T) {
	t.Parallel()
	for _, strategy := range strategies {
		inLab(t, scenario(strategy, "crashes"), func(t *testing.T, l *lab) {
			require.NoError(t, l.send("poison", 1))
			settled(t, l)
			history := l.history()
			assert.Equal(t, limit+1, strings.Count(history, "crashed"), history)
			assert.Contains(t, history, "reason: delivery-limit")
			assert.Regexp(t, `(?s)delivered +orders\n[^\n]+crashed[^\n]+\n[^\n]+returned`, history)
			assert.NotContains(t, history, "delay_", "a crashed process publishes no copy")
		})
	}
}

// A connection that is lost while the handler works: the broker never gets its result, and the message is handled again.
func TestAResultAfterTheConnection(t *testing.T) {
	t.Parallel()
	inLab(t, scenario(retry.StrategyRepublish, "slow"), func(t *testing.T, l *lab) {
		require.NoError(t, l.send("first", 1))
		time.Sleep(2 * time.Second)
		l.cut()
		settled(t, l)
		l.history()
		var kinds []string
		for _, e := range l.messages[0].Entries {
			kinds = append(kinds, e.Kind)
		}
		assert.Equal(t, "published delivered returned delivered succeeded succeeded accepted", strings.Join(kinds, " "), l.history())
	})
}

// What the page draws and counts agrees with the broker, also when it is disturbed.
func TestState(t *testing.T) {
	t.Parallel()
	inLab(t, scenario(retry.StrategyRepublish, "fails"), func(t *testing.T, l *lab) {
		var s state
		show := func() {
			time.Sleep(time.Second)
			s = l.state("1", shownMessages)
		}
		l.stopWorker()
		show()
		assert.False(t, s.Worker)
		require.NoError(t, l.send("a", 1))
		show()
		assert.Equal(t, map[string]int{workQueue: 1}, s.Counts)
		l.act("alarm", "")
		show()
		require.NoError(t, l.send("b", 1))
		show()
		assert.True(t, s.Alarm)
		assert.Equal(t, map[string]int{workQueue: 1}, s.Counts, "an alarm keeps the second message out")
		l.act("no alarm", "")
		l.startWorker()
		show()
		assert.Equal(t, map[string]int{"delay_10s": 2}, s.Counts)
		l.cut()
		settled(t, l)
		show()
		assert.Empty(t, s.Counts)
		assert.Equal(t, 2, s.States["handled"])
		for range 20 {
			require.NoError(t, l.send("more", 1))
		}
		settled(t, l)
		show()
		assert.Equal(t, 22, s.States["handled"])
		assert.Equal(t, 22, s.Total)
		assert.Len(t, s.Shown, shownMessages+1, "the newest, and the selected one")
		assert.Equal(t, "1", s.Shown[0].ID)
	})
}

// With 10,000 messages, what the page gets ten times a second stays small, and a run of it stays complete.
func TestTenThousandMessages(t *testing.T) {
	if explore.UnderRace {
		t.Skip("the other tests do the same with fewer messages")
	}
	t.Parallel()
	inLab(t, scenario(retry.StrategyDeadLetter, "always"), func(t *testing.T, l *lab) {
		require.NoError(t, l.send("x", maxMessages))
		largest := 0
		for end, s := time.Now().Add(time.Hour), (state{}); s.States["dead"] < maxMessages; time.Sleep(time.Second) {
			require.True(t, time.Now().Before(end), "%v", s.States)
			s = l.state("1", shownMessages)
			require.Empty(t, s.Error)
			largest = max(largest, len(mustJSON(t, s)))
		}
		t.Logf("a state has at most %d bytes", largest)
		assert.Less(t, largest, 32<<10)
		attempts := 0
		for _, m := range l.messages {
			for _, e := range m.Entries {
				if e.Kind == "failed" {
					attempts++
				}
			}
		}
		assert.Equal(t, 3*maxMessages, attempts)
	})
}

// Each strategy alone and next to the others has the same history.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		all := scenario(sideBySide, "always").each()
		var labs []*lab
		for _, s := range all {
			l, err := newLab(t.Context(), s)
			require.NoError(t, err)
			defer l.close()
			labs = append(labs, l)
		}
		for _, l := range labs {
			require.NoError(t, l.send("first", 1))
		}
		for i, l := range labs {
			settled(t, l)
			assert.Equal(t, strategies[i], l.policy.Strategy)
			want, err := os.ReadFile(filepath.Join("testdata", "history", string(strategies[i])+"-always.txt"))
			require.NoError(t, err)
			assert.Equal(t, string(want), l.history())
		}
	})
	code, err := scenario(sideBySide, "always").code()
	require.NoError(t, err)
	alone, err := scenario(retry.StrategyRepublish, "always").code()
	require.NoError(t, err)
	assert.Equal(t, alone, code)
}

// Each queue and exchange of the drawing is in the topology, and each arrow has two ends.
func TestDrawing(t *testing.T) {
	t.Parallel()
	for _, strategy := range strategies {
		inLab(t, scenario(strategy, "fails"), func(t *testing.T, l *lab) {
			names := map[string]bool{}
			for _, e := range l.topology.Exchanges {
				names[e.Name] = true
			}
			for _, s := range l.topology.Bindings {
				names[s.Queue] = true
			}
			names[workQueue] = true
			l.mu.Lock()
			d := l.draw()
			l.mu.Unlock()
			boxes := map[string]bool{}
			for _, n := range d.Nodes {
				assert.True(t, names[n.ID], n.ID)
				assert.False(t, boxes[n.ID], "%s is drawn twice", n.ID)
				boxes[n.ID] = true
			}
			for _, e := range d.Edges {
				assert.True(t, boxes[e.From] && boxes[e.To], "%v", e)
			}
			assert.Equal(t, strategy != retry.StrategyNative, strings.Contains(string(mustJSON(t, d)), "10s"))
		})
	}
}

func TestBounds(t *testing.T) {
	t.Parallel()
	inLab(t, scenario(retry.StrategyRepublish, "succeeds"), func(t *testing.T, l *lab) {
		l.stopWorker() // the bounds are the publisher's
		require.ErrorAs(t, l.send(strings.Repeat("x", maxBody+1), 1), new(*argument.Error))
		require.ErrorAs(t, l.send("x", 0), new(*argument.Error))
		require.ErrorAs(t, l.send("x", maxMessages+1), new(*argument.Error))
		require.NoError(t, l.send("x", maxMessages))
		require.ErrorAs(t, l.send("x", 1), new(*argument.Error))
		settled(t, l)
	})
	_, err := diagnose(t.Context(), make([]byte, maxDefinitions+1))
	require.ErrorAs(t, err, new(*argument.Error))
}

func TestBadSettingsAreRefused(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(s *settings){
		"delays = \"x\" isn't a duration":    func(s *settings) { s.Delays = "x" },
		"delays has 0 of them":               func(s *settings) { s.Delays = " , " },
		"delays has 9 of them":               func(s *settings) { s.Delays = strings.Repeat("1s ", 9) },
		"delays = \"1ms\" isn't a duration":  func(s *settings) { s.Delays = "1ms" },
		"delays = \"721h\" isn't a duration": func(s *settings) { s.Delays = "721h" },
		"delays has more than 200 bytes":     func(s *settings) { s.Delays = strings.Repeat("1", 201) },
		"retries = 21 isn't between":         func(s *settings) { s.MaxRetries = 21 },
		"retries = -1 isn't between":         func(s *settings) { s.MaxRetries = -1 },
		"handler = \"x\" isn't a step":       func(s *settings) { s.Handler = "x" },
		"Strategy":                           func(s *settings) { s.Strategy = "x" },
	} {
		s := scenario(retry.StrategyRepublish, "fails")
		edit(&s)
		_, err := newLab(t.Context(), s)
		require.ErrorAs(t, err, new(*argument.Error), name)
		assert.Contains(t, err.Error(), name)
		_, err = s.code()
		require.Error(t, err)
	}
}

// The programs that the page shows are formatted, and compile.
func TestCode(t *testing.T) {
	t.Parallel()
	// What they import has been compiled for this test.
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{if .Export}}{{.ImportPath}} {{.Export}}{{end}}", "github.com/hopback/hopback/retry", "errors", "log", "os/signal")
	out, err := list.Output()
	require.NoError(t, err)
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	files := token.NewFileSet()
	check := types.Config{Importer: importer.ForCompiler(files, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	names := []string{"fail 2, slow 5s, panic, succeed", "slow 1m30s fail, slow 1ms panic, after 3s, slow 1h crash, permanent", "crash, panic", "slow 2s permanent, slow 3s after 4s, fail 100"}
	for _, h := range handlers {
		names = append(names, h.Name)
	}
	for i, name := range names {
		s := scenario(strategies[i%len(strategies)], name)
		s.Delays = "1s, 90s 1h 1m30.5s"
		s.MaxRetries = i % 3
		text, err := s.code()
		require.NoError(t, err)
		formatted, err := format.Source([]byte(text))
		require.NoError(t, err, text)
		assert.Equal(t, string(formatted), text)
		file, err := parser.ParseFile(files, name+".go", text, 0)
		require.NoError(t, err)
		_, err = check.Check("main", files, []*ast.File{file}, nil)
		require.NoError(t, err, text)
	}
}

// The page's doctor is the doctor's, and its file of fixes is a script whose comments a name can't leave.
func TestDiagnose(t *testing.T) {
	t.Parallel()
	hostile := `{"vhosts": [{"name": "/"}], "queues": [{"name": "a\nrm -rf ~", "vhost": "/", "durable": true, "auto_delete": false, "arguments": {"x-dead-letter-exchange": "b\nrm -rf ~"}}], "exchanges": [], "bindings": [], "policies": []}`
	d, err := diagnose(t.Context(), []byte(hostile))
	require.NoError(t, err)
	want, err := doctor.FromDefinitions(t.Context(), strings.NewReader(hostile), doctor.Options{})
	require.NoError(t, err)
	want.Time = d.Report.Time
	assert.Equal(t, want, d.Report)
	require.NotEmpty(t, d.Report.Groups)
	assert.NotRegexp(t, regexp.MustCompile(`(?m)^rm`), d.Fixes)
	assert.Contains(t, d.Fixes, "rm -rf")
	for _, g := range d.Report.Groups {
		assert.Contains(t, d.Fixes, g.Rule.ID)
	}
	_, err = diagnose(t.Context(), []byte("{"))
	require.ErrorAs(t, err, new(*argument.Error))
}

func TestBuildRefusesAFolderItCannotWrite(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.Error(t, build(file, io.Discard))
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return text
}
