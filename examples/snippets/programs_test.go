package snippets

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbacktest"
)

// builtOnly are the pages whose first program is built and not run, and what runs it, or code
// like it, instead.
var builtOnly = map[string]string{
	"kubernetes.md":    "it serves HTTP on a fixed port; the tests of its manifests are in cmd/hopback/internal/cli",
	"operations.md":    "it serves HTTP on a fixed port and prints nothing; the tests of health run",
	"outbox.md":        "it needs PostgreSQL; the tests of postgres/outbox run",
	"tls-and-oauth.md": "it needs certificates; the tests of its folder make them, and run it",
	"streams.md":       "it needs streams, which the broker in memory doesn't have; TestFirstOfStreams in examples runs it on real brokers",
}

// withoutProgram are the pages that have no first program, and what is checked instead. The Go
// code of every page is compiled by TestEveryBlockOfGoIsCompiled, and its command lines are
// parsed by TestCommandLinesInDocuments in cmd/hopback/internal/cli.
var withoutProgram = map[string]string{
	"annotations.md":                        "a reference",
	"central-retrier.md":                    "it begins with YAML and commands; examples/central-retrier runs",
	"doctor.md":                             "commands; integration/doctor runs them, and TestEveryRuleIsInTheDocs compares the rules",
	"doctor-frameworks.md":                  "a table; TestFrameworksHaveTheirKnownFaultsAndNoOtherErrors examines the definitions",
	"faq.md":                                "questions; each answer links to a page that is tested",
	"features.md":                           "a table; TestEveryFeatureHasItsTest checks its tests",
	"migrating-from-amqp091-go.md":          "it compares fragments",
	"migrating-from-retry-patterns.md":      "it compares fragments",
	"migrating-from-the-official-client.md": "it compares fragments",
	"permissions.md":                        "commands; TestPermissionsOfThePageAreEnoughAndNeeded runs them",
	"topology-file.md":                      "a reference; the tests of topologyfile parse its examples",
	"troubleshooting.md":                    "a table; TestErrorsOfTheTroubleshootingPageExist checks its texts",
	"rabbitmq-notes.md":                     "a table of facts and their tests",
	"stability.md":                          "a promise",
	"versions.md":                           "a table of facts and their tests",
}

// prepare brings a broker into the state that a page assumes.
var prepare = map[string]func(*testing.T, *hopbacktest.Broker){
	"dead-letters.md": twoDeadLetters,
}

// versions are the pages whose program needs another RabbitMQ than hopbacktest's default.
var versions = map[string]string{"waiting.md": "4.4.0"}

// page is the first program of a document, the arguments it's run with, and what the document
// shows as its output.
type page struct {
	name, program, output string
	arguments             []string
}

// firstProgram returns the first program of a document: the first block of Go that has a package
// clause. The next block has to be its output; a block of sh with the command that runs it may
// come before.
func firstProgram(t *testing.T, document string) (p page, found bool) {
	t.Helper()
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "\n```go\npackage ")
	if !found {
		return page{}, false
	}
	program, rest, found := strings.Cut("package "+rest, "\n```\n")
	require.True(t, found, "%s: its first program has no end", document)
	p = page{name: filepath.Base(document), program: program + "\n"}
	language, block, rest := nextBlock(rest)
	if language == "sh" {
		_, command, _ := strings.Cut("\n"+block, "\ngo run .")
		command, _, _ = strings.Cut(command, "\n")
		p.arguments = strings.Fields(command)
		language, block, _ = nextBlock(rest)
	}
	if language == "" {
		p.output = block
	}
	return p, true
}

// nextBlock returns the first block of text, unless a heading comes before it.
func nextBlock(text string) (language, block, rest string) {
	before, text, found := strings.Cut("\n"+text, "\n```")
	if !found || strings.Contains(before, "\n## ") {
		return "none", "", ""
	}
	language, text, _ = strings.Cut(text, "\n")
	block, rest, _ = strings.Cut(text, "```\n")
	return language, block, rest
}

func (p page) folder() string { return strings.TrimSuffix(p.name, ".md") }

func (p page) isTest() bool { return !strings.HasPrefix(p.program, "package main\n") }

// The first program of each page of docs, byte for byte, is built in a new module, and runs on
// a separate broker in memory. It prints what the page shows right below it, except for the time,
// message-ids, and ports.
//
// The program takes the broker's URL from the environment variable HOPBACK_URL, and the HTTP
// API's from HOPBACK_MANAGEMENT_URL. It stops by itself, or the page shows where it is
// interrupted: by a line "^C" in the output. Either way it exits with 0.
func TestFirstProgramOfEachPage(t *testing.T) {
	t.Parallel()
	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	var pages []page
	names := map[string]bool{}
	for _, document := range documents {
		name := filepath.Base(document)
		names[name] = true
		p, found := firstProgram(t, document)
		_, without := withoutProgram[name]
		switch {
		case found && without:
			t.Errorf("%s has a first program: take it out of withoutProgram", name)
		case !found && !without:
			t.Errorf("%s has no first program: add one, or a reason to withoutProgram", name)
		case found:
			pages = append(pages, p)
		}
	}
	for _, list := range []map[string]string{builtOnly, withoutProgram} {
		for name := range list {
			assert.True(t, names[name], "there is no %s", name)
		}
	}
	dir := newModule(t, pages)
	build := goCommand(t, dir, "build", "-ldflags=-s -w", "-o", "bin"+string(filepath.Separator), "./...")
	text, err := build.CombinedOutput()
	require.NoError(t, err, "%s", text)
	for _, p := range pages {
		if builtOnly[p.name] == "" {
			t.Run(p.folder(), func(t *testing.T) {
				t.Parallel()
				p.run(t, dir)
			})
		}
	}
}

func (p page) run(t *testing.T, dir string) {
	require.NotEmpty(t, p.output, "a block with what the program prints stands right below it")
	if p.isTest() {
		text, err := goCommand(t, dir, "test", "-v", "-count=1", "-ldflags=-s -w", "./"+p.folder()).Output()
		require.NoError(t, err, "%s", text)
		assert.Equal(t, alike(p.output), alike(string(text)))
		return
	}
	require.True(t, strings.Contains(p.program, `os.Getenv("HOPBACK_URL")`) || !strings.Contains(p.program, "amqp"), "the program takes the broker's URL from the environment")
	b, err := hopbacktest.New(hopbacktest.Config{Version: versions[p.name]})
	require.NoError(t, err)
	defer b.Close()
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	if set := prepare[p.name]; set != nil {
		set(t, b)
	}
	api := httptest.NewServer(b.HTTPHandler())
	defer api.Close()
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "bin", p.folder()), p.arguments...)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), "HOPBACK_URL="+url,
		"HOPBACK_MANAGEMENT_URL="+strings.Replace(api.URL, "http://", "http://guest:guest@", 1))
	assert.Equal(t, alike(p.output), alike(p.printed(t, cmd)), "the page shows what the program prints")
}

// printed runs a program until it stops, and returns what it prints. It interrupts the program
// where the page shows "^C".
func (p page) printed(t *testing.T, cmd *exec.Cmd) string {
	shown := strings.Split(p.output, "\n")
	read, write, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdout, cmd.Stderr = write, write // in the order in which they are written
	require.NoError(t, cmd.Start())
	require.NoError(t, write.Close())
	stuck := time.AfterFunc(time.Minute, func() {
		t.Error(`the program hasn't stopped: if it runs until it is interrupted, show that by a line "^C"`)
		_ = cmd.Process.Kill()
	})
	defer stuck.Stop()
	var lines []string
	for s := bufio.NewScanner(read); ; {
		if len(lines) < len(shown) && shown[len(lines)] == "^C" {
			require.NoError(t, cmd.Process.Signal(os.Interrupt))
			lines = append(lines, "^C")
		}
		if !s.Scan() {
			break
		}
		lines = append(lines, s.Text())
	}
	text := strings.Join(lines, "\n") + "\n"
	assert.NoError(t, cmd.Wait(), "%s", text)
	return text
}

// vary are the parts of a line that differ from run to run, and what stands for each. Any
// other difference fails the test.
var vary = []struct {
	part *regexp.Regexp
	same string
}{
	{regexp.MustCompile(`^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d `), "<time> "},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?( ?(Z|[+-]\d\d:?\d\d|UTC))*( m=[+-][\d.]+)?`), "<time>"},
	{regexp.MustCompile(`\b[A-Z2-7]{26}\b`), "<message-id>"},
	{regexp.MustCompile(`\b(localhost|127\.0\.0\.1):\d+`), "<host>"},
	{regexp.MustCompile(`\(\d+\.\d\ds\)$`), "(<duration>)"},
	{regexp.MustCompile(`^(ok  \t)\S+\t\d+\.\d+s$`), "$1<package>\t<duration>"},
}

// alike returns lines without the parts that vary.
func alike(text string) (same []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		for _, v := range vary {
			line = v.part.ReplaceAllString(line, v.same)
		}
		same = append(same, line)
	}
	return same
}

func goCommand(t *testing.T, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=-trimpath")
	return cmd
}

var required = regexp.MustCompile(`(?m)^(?:require )?\t?([a-z][^\s/]*\.[a-z]+/\S+) (v\S+)`)

// newModule makes a module that has nothing but the programs, each in a folder. It requires the modules
// of this checkout, and what those require.
func newModule(t *testing.T, pages []page) (dir string) {
	t.Helper()
	dir = t.TempDir()
	checkout, err := filepath.Abs(root)
	require.NoError(t, err)
	versions := map[string]string{}
	var mod, sums bytes.Buffer
	for _, folder := range []string{".", "postgres", "hopbackotel", "topologyfile", "middleware/dedupe/redisstore"} {
		text, err := os.ReadFile(filepath.Join(checkout, folder, "go.mod"))
		require.NoError(t, err)
		for _, m := range required.FindAllStringSubmatch(string(text), -1) {
			if newer(m[2], versions[m[1]]) {
				versions[m[1]] = m[2]
			}
		}
		name := filepath.ToSlash(filepath.Join("github.com/hopback/hopback", folder))
		versions[name] = "v0.1.0"
		fmt.Fprintf(&mod, "replace %s => %s\n", name, filepath.Join(checkout, folder))
		text, err = os.ReadFile(filepath.Join(checkout, folder, "go.sum"))
		require.NoError(t, err)
		sums.Write(text)
	}
	for name, version := range versions {
		fmt.Fprintf(&mod, "require %s %s\n", name, version)
	}
	write := func(name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("go.mod", "module first\n\ngo 1.26.0\n\n"+mod.String())
	write("go.sum", sums.String())
	for _, p := range pages {
		file := "main.go"
		if p.isTest() {
			file = "first_test.go"
		}
		write(filepath.Join(p.folder(), file), p.program)
	}
	return dir
}

// newer compares versions.
func newer(a, b string) bool {
	number := regexp.MustCompile(`\d+`)
	x, y := number.FindAllString(a, -1), number.FindAllString(b, -1)
	return slices.CompareFunc(x, y, func(x, y string) int {
		if len(x) != len(y) {
			return len(x) - len(y)
		}
		return strings.Compare(x, y)
	}) > 0
}

// twoDeadLetters leaves two orders in orders.dead.
func twoDeadLetters(t *testing.T, b *hopbacktest.Broker) {
	ctx, stop := context.WithCancel(t.Context())
	conn, err := hopback.Connect(ctx, b.URL(), hopback.Config{Dial: b.Dial, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	type order struct{ ID string }
	orders := hopback.Queue[order]{Conn: conn, Name: "orders"}
	require.NoError(t, orders.Declare(ctx))
	require.NoError(t, orders.Publish(ctx, order{"o-1"}))
	require.NoError(t, orders.Publish(ctx, order{"o-2"}))
	left := 2
	require.NoError(t, orders.Consume(ctx, func(context.Context, order) error {
		if left--; left == 0 {
			stop()
		}
		return hopback.Permanent(errors.New("no such customer"))
	}, hopback.ConsumerConfig{}))
	require.Equal(t, 2, b.Queue("orders.dead").Counts().Ready)
}
