package examples

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/rabbitmq"
)

// vary are the parts of a log line that differ from run to run.
var vary = regexp.MustCompile(`^[0-9/]+ [0-9:]+|message_id=[A-Z0-9]+`)

// block returns the first block of a language in README.md, and what follows it.
func block(t *testing.T, text, fence string) (block, rest string) {
	t.Helper()
	_, after, found := strings.Cut(text, "\n```"+fence+"\n")
	require.True(t, found, "README.md has a block of %q", fence)
	block, rest, found = strings.Cut(after, "\n```\n")
	require.True(t, found, "the block ends")
	return block + "\n", rest
}

// alike returns lines without the parts that vary.
func alike(text string) (same []string) {
	for line := range strings.Lines(text) {
		same = append(same, vary.ReplaceAllString(strings.TrimSuffix(line, "\n"), "…"))
	}
	return same
}

// newModule makes a module of a program, as a user would, but with this checkout in place of
// a released version.
func newModule(t *testing.T, program string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	engine := regexp.MustCompile(`github.com/Azure/go-amqp v\S+`).FindString(string(mod))
	require.NotEmpty(t, engine)
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	version := regexp.MustCompile(`(?m)^go \S+`).FindString(string(mod))
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("main.go", program)
	write("go.mod", "module first\n\n"+version+"\n\nrequire (\n\tgithub.com/hopback/hopback v0.1.0\n\t"+engine+" // indirect\n)\n\nreplace github.com/hopback/hopback => "+root+"\n")
	write("go.sum", string(sums))
	return dir
}

// built builds a program in a new module. It is "first" in the folder.
func built(t *testing.T, program string) (dir string) {
	t.Helper()
	dir = newModule(t, program)
	build := exec.CommandContext(t.Context(), "go", "build", "-o", "first", ".")
	build.Dir, build.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=-trimpath")
	text, err := build.CombinedOutput()
	require.NoError(t, err, "%s", text)
	return dir
}

// printed runs a program, interrupts it after the line that ends with last, and returns what it
// prints.
func printed(t *testing.T, cmd *exec.Cmd, last string) string {
	t.Helper()
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var printed strings.Builder
	for s := bufio.NewScanner(stderr); s.Scan(); {
		printed.WriteString(s.Text() + "\n")
		if strings.HasSuffix(s.Text(), last) {
			require.NoError(t, cmd.Process.Signal(os.Interrupt))
		}
	}
	assert.NoError(t, cmd.Wait())
	return printed.String()
}

// TestFirst builds the first program of README.md in an empty module, runs it until its
// message is charged, interrupts it, and compares what it prints with what README.md shows.
func TestFirst(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	program, rest := block(t, string(readme), "go")
	shown, _ := block(t, rest, "")
	source, err := os.ReadFile("first/main.go")
	require.NoError(t, err)
	require.Equal(t, string(source), program, "examples/first is the program of README.md")
	dir := built(t, program)
	run := func(t *testing.T, cmd *exec.Cmd) {
		assert.Equal(t, alike(shown), alike(printed(t, cmd, "charged o-1")), "README.md shows what the program prints")
	}
	t.Run("memory", func(t *testing.T) {
		b, err := hopbacktest.New(hopbacktest.Config{})
		require.NoError(t, err)
		defer b.Close()
		url, err := b.Listen("127.0.0.1:0")
		require.NoError(t, err)
		cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "first"))
		cmd.Env = append(os.Environ(), "HOPBACK_URL="+url)
		run(t, cmd)
	})
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			defer func() { assert.NoError(t, brokers[0].Release(t.Context())) }()
			v := newVHost(t, brokers[0])
			run(t, command(t, dir, "first", v))
			for _, queue := range []string{"orders", "orders.dead", "delay_1s", "delay_10s", "delay_60s", "parking_queue"} {
				assert.Contains(t, v.queues(t), `"`+queue+`"`)
			}
		})
	}
}

// TestFirstOfStreams does the same with docs/streams.md, on real brokers only: the one in memory has
// no streams.
func TestFirstOfStreams(t *testing.T) {
	page, err := os.ReadFile("../docs/streams.md")
	require.NoError(t, err)
	program, rest := block(t, string(page), "go")
	shown, _ := block(t, rest, "")
	dir := built(t, program)
	for _, version := range []string{"4.3", "4.0"} {
		t.Run(version, func(t *testing.T) {
			brokers, err := rabbitmq.Need(t.Context(), os.Stderr, version)
			require.NoError(t, err)
			defer func() { assert.NoError(t, brokers[0].Release(t.Context())) }()
			cmd := command(t, dir, "first", newVHost(t, brokers[0]))
			cmd.Dir = t.TempDir() // where it saves its offset
			assert.Equal(t, alike(strings.TrimSuffix(shown, "^C\n")), alike(printed(t, cmd, "billed o-1")))
		})
	}
}
