// Package snippets holds the code that the documents show, so that it is compiled.
package snippets

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const root = "../.."

// Every block of Go in a document stands in a Go file of the repository, line for
// line, but for its indentation. So it compiles.
func TestEveryBlockOfGoIsCompiled(t *testing.T) {
	t.Parallel()
	code := goFiles(t)
	for _, document := range documents(t) {
		for _, block := range blocks(t, document, "go") {
			block = trimmed(block)
			found := false
			for _, file := range code {
				found = found || strings.Contains(file, block)
			}
			assert.True(t, found, "%s: this block is in no Go file:\n%s", document, block)
		}
	}
}

var (
	makeTarget  = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	makeCommand = regexp.MustCompile("(?m)(?:^|`)make ([a-z][a-z-]*)")
	aPath       = regexp.MustCompile("`((?:examples|integration|docs|bench|internal|tools|declare|retry|client|middleware|adapter)/[A-Za-z0-9_./-]+)`")
	fenced      = regexp.MustCompile("(?ms)^```.*?^```$")
	inline      = regexp.MustCompile("`[^`\n]*`")
	aLink       = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
)

// Every "make target" that a document names exists.
func TestEveryMakeTargetExists(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	require.NoError(t, err)
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllStringSubmatch(string(makefile), -1) {
		targets[m[1]] = true
	}
	require.True(t, targets["demo"], "the Makefile was read")
	for _, document := range documents(t) {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, m := range makeCommand.FindAllStringSubmatch(string(text), -1) {
			assert.True(t, targets[m[1]], "%s: make %s", document, m[1])
		}
	}
}

// Every path and every link in a document leads somewhere.
func TestEveryPathExists(t *testing.T) {
	t.Parallel()
	for _, document := range documents(t) {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, m := range aPath.FindAllStringSubmatch(string(text), -1) {
			_, err := os.Stat(filepath.Join(root, m[1]))
			if err != nil { // next to the document
				_, err = os.Stat(filepath.Join(filepath.Dir(document), m[1]))
			}
			assert.NoError(t, err, document)
		}
		prose := fenced.ReplaceAllString(string(text), "")
		prose = inline.ReplaceAllString(prose, "")
		for _, m := range aLink.FindAllStringSubmatch(prose, -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(document), m[1]))
			assert.NoError(t, err, document)
		}
	}
}

func documents(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	require.NotEmpty(t, all)
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"} {
		all = append(all, filepath.Join(root, name))
	}
	return all
}

// blocks returns the fenced blocks of a language.
func blocks(t *testing.T, document, language string) (found []string) {
	t.Helper()
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	rest := string(text)
	for {
		_, after, ok := strings.Cut(rest, "\n```"+language+"\n")
		if !ok {
			return found
		}
		block, behind, ok := strings.Cut(after, "\n```")
		require.True(t, ok, "%s: a block has no end", document)
		found, rest = append(found, block), behind
	}
}

func goFiles(t *testing.T) (texts []string) {
	t.Helper()
	folders := []string{filepath.Join(root, "docs"), filepath.Join(root, "examples")}
	// The examples of packages are compiled, too.
	packages, err := filepath.Glob(filepath.Join(root, "*", "example*_test.go"))
	require.NoError(t, err)
	modules, err := filepath.Glob(filepath.Join(root, "*", "*", "example*_test.go"))
	require.NoError(t, err)
	for _, folder := range slices.Concat(folders, packages, modules) {
		require.NoError(t, filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") {
				return err
			}
			text, err := os.ReadFile(path)
			texts = append(texts, trimmed(string(text)))
			return err
		}))
	}
	require.NotEmpty(t, texts)
	return texts
}

// trimmed is text without its indentation.
func trimmed(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

var (
	testName   = regexp.MustCompile("`((?:Test|Example)[A-Za-z0-9_]+)`")
	testOfFile = regexp.MustCompile(`(?m)^func ((?:Test|Example)[A-Za-z0-9_]+)\(`)
)

// Each feature of the table names a test that exists.
func TestEveryFeatureHasItsTest(t *testing.T) {
	t.Parallel()
	table, err := os.ReadFile(filepath.Join(root, "docs", "features.md"))
	require.NoError(t, err)
	exists := map[string]bool{}
	for _, folder := range []string{"integration", "integration/*", "bench/interop", "declare", "hopbacktest/internal/engine"} {
		files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, m := range testOfFile.FindAllStringSubmatch(string(text), -1) {
				exists[m[1]] = true
			}
		}
	}
	names := testName.FindAllStringSubmatch(string(table), -1)
	require.Greater(t, len(names), 20)
	for _, m := range names {
		assert.True(t, exists[m[1]], "docs/features.md: there is no %s", m[1])
	}
}

// Every test that a document names exists, in any module of the repository.
func TestEveryTestExists(t *testing.T) {
	t.Parallel()
	exists := map[string]bool{}
	require.NoError(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range testOfFile.FindAllStringSubmatch(string(text), -1) {
			exists[m[1]] = true
		}
		return err
	}))
	for _, document := range documents(t) {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, m := range testName.FindAllStringSubmatch(string(text), -1) {
			assert.True(t, exists[m[1]], "%s: there is no %s", document, m[1])
		}
	}
}
