package docs

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/internal/printed"
)

// notRun are the pages whose first program is compiled and not run, and what runs it, or code
// like it, instead.
var notRun = map[string]string{
	"kubernetes.md": "it serves HTTP on a fixed port; the tests of its manifests are in cmd/hopback/internal/cli",
	"operations.md": "it serves HTTP on a fixed port and prints nothing; the tests of health run",
	"outbox.md":     "it needs PostgreSQL; the tests of postgres/outbox run",
	"security.md":   "it needs certificates; the tests in testdata make them, and run its functions",
	"streams.md":    "it needs streams, which the broker in memory doesn't have; TestFirstOfStreams in examples runs it on real brokers",
}

// withoutProgram are the pages that have no first program, and what is checked instead. The command
// lines of every page are parsed by TestCommandLinesInDocuments in cmd/hopback/internal/cli.
var withoutProgram = map[string]string{
	"messages.md":        "fragments that testdata tests, and tables; TestWhatBecomesOfAMQP091Properties and TestThePageDescribesEachAnnotation check them",
	"migrating.md":       "it compares fragments; the examples of the patterns run",
	"central-retrier.md": "it begins with YAML and commands; examples/central-retrier runs",
	"faults.md":          "a table that TestFaults writes",
	"comparison.md":      "a table; integration/tools/peers checks its versions",
	"doctor.md":          "commands; integration/doctor runs them, and TestEveryRuleIsInTheDocs compares the rules",
	"topology-file.md":   "a reference; the tests of topologyfile parse its examples",
	"troubleshooting.md": "a table; TestErrorsOfTheTroubleshootingPageExist checks its texts",
	"versions.md":        "facts and their tests",
}

// prepare brings a broker into the state that a page assumes.
var prepare = map[string]func(*testing.T, *hopbacktest.Broker){
	"dead-letters.md": twoDeadLetters,
}

// shown returns the output that a document shows, and the arguments of the command line. What the program prints has to be
// the next block; a block of sh with the command that runs it may come before.
func shown(rest string) (output string, arguments []string) {
	language, block, rest := nextBlock(rest)
	if language == "sh" {
		_, command, _ := strings.Cut("\n"+block, "\ngo run .")
		command, _, _ = strings.Cut(command, "\n")
		arguments = strings.Fields(command)
		language, block, _ = nextBlock(rest)
	}
	if language == "" {
		output = block
	}
	return output, arguments
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

func (p page) isTest() bool { return p.kind != ".go" }

// The code of each document is a package of a new module. It compiles, go vet has nothing to say, and its tests pass, as do
// those of testdata, which call what the document defines.
//
// The first program of each page of docs runs on a separate broker in memory. It prints what the page shows right below it,
// except for the time, message-ids, and ports.
//
// The program takes the broker's URL from the environment variable HOPBACK_URL, and the HTTP
// API's from HOPBACK_MANAGEMENT_URL. It stops by itself, or the page shows where it is
// interrupted: by a line "^C" in the output. Either way it exits with 0.
func TestCodeOfTheDocuments(t *testing.T) {
	t.Parallel()
	pages := withCode(t)
	dir, err := newModule(t, pages)
	require.NoError(t, err)
	tested := addTests(t, dir)
	pages = slices.DeleteFunc(pages, func(p page) bool { return p.program == "" || notRun[p.name()] != "" })
	build := []string{"build", "-ldflags=-s -w", "-o", "bin" + string(filepath.Separator)}
	for _, p := range pages {
		if !p.isTest() {
			build = append(build, "./"+p.folder())
		}
	}
	succeeds(t, goCommand(t, dir, build...))
	t.Run("vet", func(t *testing.T) {
		t.Parallel()
		succeeds(t, goCommand(t, dir, "vet", "./..."))
	})
	t.Run("tests", func(t *testing.T) {
		t.Parallel()
		succeeds(t, goCommand(t, dir, append([]string{"test", "-count=1", "-timeout=2m", "-vet=off", "-ldflags=-s -w"}, tested...)...))
	})
	for _, p := range pages[1:] { // TestFirst in examples runs README.md's
		t.Run(p.folder(), func(t *testing.T) {
			t.Parallel()
			p.run(t, dir)
		})
	}
	t.Run("one after the other on one broker", func(t *testing.T) {
		t.Parallel()
		inARow(t, dir, pages)
	})
}

// withCode returns the documents that have Go code, README.md first.
func withCode(t *testing.T) (pages []page) {
	t.Helper()
	names := map[string]bool{}
	for _, relative := range documents(t) {
		document, err := filepath.Abs(relative)
		require.NoError(t, err)
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		p, err := readPage(document, string(text))
		require.NoError(t, err)
		names[p.name()] = true
		_, without := withoutProgram[p.name()]
		switch {
		case p.program != "" && without:
			t.Errorf("%s has a first program: take it out of withoutProgram", p.name())
		case p.program == "" && !without && filepath.Dir(relative) == filepath.Join(root, "docs"):
			t.Errorf("%s has no first program: add one, or a reason to withoutProgram", p.name())
		}
		if p.program != "" || p.text != "" {
			pages = append(pages, p)
		}
	}
	for _, list := range []map[string]string{notRun, withoutProgram} {
		for name := range list {
			assert.True(t, names[name], "there is no %s", name)
		}
	}
	return pages
}

// addTests adds the tests of testdata to the packages of their pages, next to the page itself. It returns the packages that
// have tests.
func addTests(t *testing.T, dir string) (tested []string) {
	t.Helper()
	add := func(from, to string) (text string) {
		from, err := filepath.Abs(from)
		require.NoError(t, err)
		read, err := os.ReadFile(from)
		require.NoError(t, err)
		if text = string(read); filepath.Ext(to) == ".go" {
			text = at(from, 1) + text
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, to), []byte(text), 0o600))
		return text
	}
	tests, err := filepath.Glob("testdata/*_test.go")
	require.NoError(t, err)
	for _, test := range tests {
		folder := strings.TrimSuffix(filepath.Base(test), "_test.go")
		if folder == "kitchen" {
			continue
		}
		if strings.Contains(add(test, folder+"/page_test.go"), "cook(") {
			add("testdata/kitchen_test.go", folder+"/kitchen_test.go")
		}
		add(filepath.Join(root, "docs", folder+".md"), folder+"/page.md")
	}
	tests, err = filepath.Glob(dir + "/*/*_test.go")
	require.NoError(t, err)
	for _, test := range tests {
		tested = append(tested, "./"+filepath.Base(filepath.Dir(test)))
	}
	return slices.Compact(tested)
}

func succeeds(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", text)
}

// inARow runs the programs as somebody does who reads page after page: README's first, on a broker that
// keeps what the programs before have left. What is left changes what they print, but none may
// refuse what another has declared, hang, or lose a message.
func inARow(t *testing.T, dir string, pages []page) {
	b, env := started(t)
	for _, p := range pages {
		if p.isTest() {
			continue
		}
		if set := prepare[p.name()]; set != nil {
			set(t, b)
		}
		if p.name() == "README.md" && !strings.Contains(p.output, "^C") {
			p.output = strings.TrimSuffix(p.output, "\n") + "\n^C\n" // README shows what it prints, and not its end
		}
		text := p.printed(t, p.command(t, dir, env))
		for _, sign := range []string{"hopback: declare", "conflict", "panic: ", "exit status"} {
			assert.NotContains(t, text, sign, p.name())
		}
	}
}

func (p page) run(t *testing.T, dir string) {
	require.NotEmpty(t, p.output, "a block with what the program prints stands right below it")
	if p.isTest() {
		var names []string // those that the page shows first
		for _, m := range testOfFile.FindAllStringSubmatch(p.program, -1) {
			names = append(names, m[1])
		}
		only := "-run=^(" + strings.Join(names, "|") + ")$"
		text, err := goCommand(t, dir, "test", "-v", "-count=1", "-timeout=2m", only, "-vet=off", "-ldflags=-s -w", "./"+p.folder()).Output()
		require.NoError(t, err, "%s", text)
		assert.Equal(t, printed.Alike(p.output), printed.Alike(string(text)))
		return
	}
	require.True(t, strings.Contains(p.program, `os.Getenv("HOPBACK_URL")`) || !strings.Contains(p.program, "amqp"), "the program takes the broker's URL from the environment")
	b, env := started(t)
	if set := prepare[p.name()]; set != nil {
		set(t, b)
	}
	assert.Equal(t, printed.Alike(p.output), printed.Alike(p.printed(t, p.command(t, dir, env))), "the page shows what the program prints")
}

// started returns a broker, and the environment that names it.
func started(t *testing.T) (b *hopbacktest.Broker, env []string) {
	b, err := hopbacktest.New(hopbacktest.Config{})
	require.NoError(t, err)
	t.Cleanup(b.Close)
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	api := httptest.NewServer(b.HTTPHandler())
	t.Cleanup(api.Close)
	return b, append(os.Environ(), "HOPBACK_URL="+url,
		"HOPBACK_MANAGEMENT_URL="+strings.Replace(api.URL, "http://", "http://guest:guest@", 1))
}

func (p page) command(t *testing.T, dir string, env []string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "bin", p.folder()), p.arguments...)
	cmd.Dir, cmd.Env = t.TempDir(), env
	return cmd
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
