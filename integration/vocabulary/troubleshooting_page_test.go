package vocabulary

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// literals are the string literals of all Go files, also of tests, which the tests produce.
func literals(t *testing.T) []string {
	t.Helper()
	verb := regexp.MustCompile(`%[+#.0-9]*[a-z]`)
	var all []string
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_page_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				if text, err := strconv.Unquote(l.Value); err == nil {
					all = append(all, verb.ReplaceAllString(text, "\x00"))
				}
			}
			return true
		})
		return nil
	}))
	return all
}

// inSource reports whether a literal has the text. Each … of the text is something that varies.
func inSource(all []string, text string) bool {
	parts := strings.Split(text, "…")
	for i := range parts {
		parts[i] = regexp.QuoteMeta(strings.TrimSpace(parts[i]))
	}
	pattern := regexp.MustCompile(strings.Join(parts, `\W*\x00\W*`))
	for _, l := range all {
		if pattern.MatchString(l) {
			return true
		}
	}
	return false
}

// Every error that docs/troubleshooting.md quotes in a table's first column is in the source.
func TestErrorsOfTheTroubleshootingPageExist(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "troubleshooting.md"))
	require.NoError(t, err)
	all := literals(t)
	entries, quoted := 0, 0
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, " | ")
		if !strings.HasPrefix(line, "| ") || len(cells) != 3 || strings.HasPrefix(line, "| ---") || strings.Contains(cells[0], "error") && cells[1] == "cause" {
			continue
		}
		entries++
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[0], -1) {
			quoted++
			assert.True(t, inSource(all, m[1]), "docs/troubleshooting.md: no string in the source has %q", m[1])
		}
	}
	assert.Greater(t, entries, 30)
	assert.Greater(t, quoted, 30)
}
