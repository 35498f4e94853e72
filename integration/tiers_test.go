package integration

import (
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What a package's comment says about its tier.
var tierSentences = map[string]string{
	"stable":  "This package is stable: see docs/versions.md#stability.",
	"preview": "This package is a preview: a minor version may change its names. See docs/versions.md#stability.",
}

// The table of docs/versions.md, the first page, and each package agree on what is stable.
func TestTiersAgree(t *testing.T) {
	t.Parallel()
	table := map[string][]string{} // tier → packages
	for _, row := range regexp.MustCompile(`(?m)^\| (stable|preview) \| ([^|]*)\|`).FindAllStringSubmatch(read(t, "docs/versions.md"), -1) {
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1) {
			table[row[1]] = append(table[row[1]], name[1])
		}
	}
	require.Len(t, table, 2, "docs/versions.md has a row for each tier")

	status := regexp.MustCompile(`(?s)\*\*Status:\*\*(.*?)are stable`).FindStringSubmatch(read(t, "README.md"))
	require.NotNil(t, status, "README.md has a status")
	for _, name := range table["stable"] {
		assert.Contains(t, status[1], "`"+name+"`", "README.md")
	}
	for _, name := range table["preview"] {
		assert.NotContains(t, status[1], "`"+name+"`", "README.md")
	}

	seen, wrong := map[string]bool{}, []string(nil)
	for _, p := range publicPackages(t) {
		var tiers []string
		for tier, names := range table {
			for _, name := range names {
				if base, all := strings.CutSuffix(name, "/*"); name == p.name || all && strings.HasPrefix(p.name, base+"/") {
					tiers, seen[name] = append(tiers, tier), true
				}
			}
		}
		if !assert.Len(t, tiers, 1, "docs/versions.md names %s once", p.name) || p.name == "cmd/hopback" {
			continue
		}
		for tier, sentence := range tierSentences {
			if strings.Contains(p.comment, sentence) != (tier == tiers[0]) {
				wrong = append(wrong, p.name+" is "+tiers[0])
			}
		}
	}
	slices.Sort(wrong)
	assert.Empty(t, slices.Compact(wrong), "the comment of each package says its tier, in the words of tierSentences")
	for _, names := range table {
		for _, name := range names {
			assert.True(t, seen[name], "docs/versions.md names %s, which isn't a package", name)
		}
	}
}

// publicPackage is one that users import, or the command.
type publicPackage struct {
	name    string // within the repository; "hopback" for the root
	comment string // with spaces for line breaks
}

func publicPackages(t *testing.T) (all []publicPackage) {
	t.Helper()
	const root = "github.com/hopback/hopback"
	private := regexp.MustCompile(`/(internal|integration|examples)(/|$)`)
	for _, m := range modules(t) {
		list := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.ImportPath}}\t{{.Dir}}", "./...")
		list.Dir = m.Dir
		out, err := list.Output()
		require.NoError(t, err)
		for line := range strings.Lines(string(out)) {
			path, dir, _ := strings.Cut(strings.TrimSpace(line), "\t")
			if private.MatchString(strings.TrimPrefix(path, root)) {
				continue
			}
			name := strings.TrimPrefix(path, root+"/")
			if path == root {
				name = "hopback"
			}
			all = append(all, publicPackage{name, strings.Join(strings.Fields(packageComment(t, dir)), " ")})
		}
	}
	require.Greater(t, len(all), 30)
	return all
}

// packageComment is what the files in a folder say about their package.
func packageComment(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var text strings.Builder
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
		require.NoError(t, err)
		text.WriteString(f.Doc.Text())
	}
	return text.String()
}
