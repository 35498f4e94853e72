package integration

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/faults.md")

const (
	faultsPage = "../docs/faults.md"
	// maxFaultsWords is what a person reads in a quarter of an hour.
	maxFaultsWords = 3000
	fixedBy        = "fixed by"
)

var commit = regexp.MustCompile(`^[0-9a-f]{7,40}$`)

// Every fault has tests that exist, every commit is in the history, and docs/faults.md is what
// the list says.
func TestFaults(t *testing.T) {
	t.Parallel()
	files := testFiles(t)
	for _, c := range faults {
		for _, f := range c.faults {
			assert.NotEmpty(t, f.tests, "%s", f.what)
			assert.NotContains(t, f.what+f.where, "|", "a row of a table")
			for name := range strings.FieldsSeq(f.tests) {
				assert.Len(t, files[name], 1, "%s: %s: write folder.%s if several folders have it", f.what, name, name)
			}
		}
	}
	if t.Failed() {
		return
	}
	page := writeFaults(files)
	assert.LessOrEqual(t, len(strings.Fields(page)), maxFaultsWords, "words of docs/faults.md")
	if *update {
		require.NoError(t, os.WriteFile(faultsPage, []byte(page), 0o644))
	}
	now, err := os.ReadFile(faultsPage)
	require.NoError(t, err)
	assert.Equal(t, page, string(now), "docs/faults.md is out of date: go test ./integration -run TestFaults -update")
}

// The commits that fixed a fault are in the history.
func TestFixesOfFaultsAreCommits(t *testing.T) {
	t.Parallel()
	if out, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--is-shallow-repository").Output(); err != nil || string(bytes.TrimSpace(out)) != "false" {
		t.Skip("this isn't a clone with its history")
	}
	out, err := exec.CommandContext(t.Context(), "git", "log", "--format=%H%n%s", "HEAD").Output()
	require.NoError(t, err)
	history := "\n" + string(out)
	commits := 0
	for _, c := range faults {
		for _, f := range c.faults {
			if c.where != fixedBy {
				assert.NotRegexp(t, commit, f.where, "%s", f.what)
				continue
			}
			commits++
			subject, cut := strings.CutSuffix(f.where, "…")
			start := "\n" + subject
			if !cut && !commit.MatchString(f.where) {
				start += "\n"
			}
			assert.Contains(t, history, start, "%s: git log has no such commit", f.what)
		}
	}
	assert.Positive(t, commits)
}

// testFiles returns the files that declare each test of all modules, by the test's name and by
// folder.name.
func testFiles(t *testing.T) map[string][]string {
	t.Helper()
	files := map[string][]string{}
	require.NoError(t, filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && e.Name() != ".." && strings.HasPrefix(e.Name(), "."):
			return fs.SkipDir
		case e.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		file := strings.TrimPrefix(filepath.ToSlash(path), "../")
		folder := file[:max(strings.LastIndexByte(file, '/'), 0)]
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				for _, name := range []string{f.Name.Name, folder + "." + f.Name.Name} {
					files[name] = append(files[name], file)
				}
			}
		}
		return nil
	}))
	return files
}

func writeFaults(files map[string][]string) string {
	var b strings.Builder
	b.WriteString("# Faults\n\n" +
		"What went wrong in hopback, RabbitMQ, and other clients, what it cost, and which test pins it.\n" +
		"It is written from the list in `integration/faults_test.go`: add a fault there, then run `go test ./integration -run TestFaults -update`.\n\n" +
		"To run a test, take its folder from the link: `go test ./integration/retry -run '^TestX$' -brokers=4.3`. `git show` shows a commit. Most tests of the\n" +
		"first table were seen failing on the code before it.\n")
	for _, c := range faults {
		fmt.Fprintf(&b, "\n## %s\n", c.title)
		if c.intro != "" {
			fmt.Fprintf(&b, "\n%s\n", c.intro)
		}
		fmt.Fprintf(&b, "\n| fault | %s | test |\n| --- | --- | --- |\n", c.where)
		for _, f := range c.faults {
			where := f.where
			if commit.MatchString(where) {
				where = "`" + where + "`"
			}
			var tests []string
			for name := range strings.FieldsSeq(f.tests) {
				file := files[name][0]
				tests = append(tests, fmt.Sprintf("[%s](../%s)", name[strings.LastIndexByte(name, '.')+1:], file))
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", f.what, where, strings.Join(tests, ", "))
		}
	}
	return b.String()
}
