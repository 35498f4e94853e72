package snippets

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
