package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	makeTarget  = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	makeCommand = regexp.MustCompile("(?m)(?:^|`)make ([a-z][a-z-]*)")
	aPath       = regexp.MustCompile("`((?:examples|integration|docs|internal|operate|declare|retry|client|middleware|adapter)/[A-Za-z0-9_./-]+)`")
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

// documents returns README.md first.
func documents(t *testing.T) (all []string) {
	t.Helper()
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"} {
		all = append(all, filepath.Join(root, name))
	}
	return append(all, pages...)
}

var (
	testName   = regexp.MustCompile("`((?:Test|Example)[A-Za-z0-9_]+)`")
	testOfFile = regexp.MustCompile(`(?m)^func ((?:Test|Example)[A-Za-z0-9_]+)\(`)
)

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

var (
	heading      = regexp.MustCompile(`(?m)^#+ (.*)$`)
	linked       = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	notInAnchors = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	anchored     = regexp.MustCompile(`\]\(([^)#:\s]*)#([^)\s]+)\)`)
	definition   = regexp.MustCompile(`^\[[^\]]+\]: `)
)

// anchors are those of a document's headings, as GitHub makes them.
func anchors(t *testing.T, document string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	found := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
		words := notInAnchors.ReplaceAllString(strings.ToLower(linked.ReplaceAllString(m[1], "$1")), "")
		found[strings.ReplaceAll(strings.TrimSpace(words), " ", "-")] = true
	}
	return found
}

// Every link to a section of a document leads to a section.
func TestEverySectionExists(t *testing.T) {
	t.Parallel()
	seen := 0
	for _, document := range append(documents(t), filepath.Join(root, "CHANGELOG.md")) {
		text, err := os.ReadFile(document)
		require.NoError(t, err)
		for _, m := range anchored.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
			target := document
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(document), m[1])
			}
			if filepath.Ext(target) != ".md" {
				continue
			}
			seen++
			assert.True(t, anchors(t, target)[m[2]], "%s links to %s#%s", document, m[1], m[2])
		}
	}
	assert.Greater(t, seen, 50, "links were found")
}

// README.md has few sections, and a longer one belongs into a page of docs.
func TestREADMEHasFewSections(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	require.NoError(t, err)
	sections := strings.Split(string(text), "\n## ")[1:]
	assert.LessOrEqual(t, len(sections), 10)
	for _, section := range sections {
		title, body, _ := strings.Cut(section, "\n")
		lines := 0
		for line := range strings.Lines(body) {
			if !definition.MatchString(line) {
				lines++
			}
		}
		assert.LessOrEqual(t, lines, 80, "lines of %q", title)
	}
}
