package cli_test

import (
	"flag"
	"html"
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

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
	"github.com/hopback/hopback/retry"
)

var update = flag.Bool("update", false, "write docs/drawings, with Graphviz, and testdata/kubernetes.yaml again")

const (
	readmePath = "../../../../README.md"
	drawings   = "../../../../docs/drawings"
)

// The drawing in README.md is what hopback draws of the topology file in README.md.
func TestDrawingInREADME(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile(readmePath)
	require.NoError(t, err)
	f, err := topologyfile.Parse("README.md", []byte(block(t, string(readme), "yaml")))
	require.NoError(t, err)
	// README.md is narrow.
	isDrawing(t, "topology", strings.Replace(audit.DOT(check.FromTopology(f.Topology)), "rankdir=LR", "rankdir=TB", 1))
}

// The drawing in docs/concepts.md has the names of a real topology.
func TestDrawingInConcepts(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(drawings, "path.dot"))
	require.NoError(t, err)
	topology, err := retry.Topology(retry.Policy{Backoff: retry.Delays(10 * time.Second)}, declare.QuorumQueue{Name: "orders"})
	require.NoError(t, err)
	declared := audit.DOT(check.FromTopology(topology))
	names := regexp.MustCompile(`shape=(?:cylinder|hexagon), label="(?:.*\\n)?(.*?)"`).FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(names), 5)
	for _, m := range names {
		assert.Regexp(t, `label="`+regexp.QuoteMeta(m[1])+`["\\]`, declared)
	}
	isDrawing(t, "path", string(text))
}

// isDrawing checks that the pictures of a name, light and dark, have the texts, the nodes, and the edges of a graph.
func isDrawing(t *testing.T, name, dot string) {
	t.Helper()
	for scheme, colors := range map[string][3]string{"light": {"#ffffff", "#1f2328", "#59636e"}, "dark": {"#0d1117", "#f0f6fc", "#9198a1"}} {
		file := filepath.Join(drawings, name+"-"+scheme+".svg")
		if *update {
			paper, ink, line := colors[0], colors[1], colors[2]
			c := exec.CommandContext(t.Context(), "dot", "-Tsvg", "-Gbgcolor="+paper, "-Gcolor="+line, "-Gfontcolor="+line, "-Gfontname=sans-serif", "-Gnodesep=0.2", "-Granksep=0.35",
				"-Ncolor="+line, "-Nfontcolor="+ink, "-Nfontname=sans-serif", "-Nheight=0.4", "-Nmargin=0.08,0.04", "-Ecolor="+line, "-Efontcolor="+ink, "-Efontname=sans-serif", "-Efontsize=11")
			c.Stdin, c.Stderr = strings.NewReader(dot), os.Stderr
			drawn, err := c.Output()
			require.NoError(t, err, "-update needs Graphviz")
			require.NoError(t, os.WriteFile(file, drawn, 0o644))
		}
		svg, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.Equal(t, described(dot), shown(string(svg)), "%s; run: go test ./cmd/hopback/internal/cli -run Drawing -update", file)
	}
}

var (
	dotNode  = regexp.MustCompile(`(?m)^ +(\w+) \[shape=`)
	dotEdge  = regexp.MustCompile(`(?m)^ +(\w+) -> (\w+)\b`)
	dotLabel = regexp.MustCompile(`\blabel="([^"]*)"`)
	svgTitle = regexp.MustCompile(`class="(?:node|edge)">\n<title>(.*)</title>`)
	svgText  = regexp.MustCompile(`(?s)<text [^>]*>(.*?)</text>`)
)

// described lists what a graph has: nodes, edges, and the lines of its labels.
func described(dot string) (all []string) {
	for _, m := range dotNode.FindAllStringSubmatch(dot, -1) {
		all = append(all, "node "+m[1])
	}
	for _, m := range dotEdge.FindAllStringSubmatch(dot, -1) {
		all = append(all, "node "+m[1]+"->"+m[2])
	}
	for _, m := range dotLabel.FindAllStringSubmatch(dot, -1) {
		if m[1] != "" {
			all = append(all, strings.Split(m[1], `\n`)...)
		}
	}
	slices.Sort(all)
	return all
}

// shown lists what a picture of a graph has.
func shown(svg string) (all []string) {
	for _, m := range svgTitle.FindAllStringSubmatch(svg, -1) {
		all = append(all, "node "+html.UnescapeString(m[1]))
	}
	for _, m := range svgText.FindAllStringSubmatch(svg, -1) {
		all = append(all, strings.ReplaceAll(html.UnescapeString(m[1]), "\u00a0", " "))
	}
	slices.Sort(all)
	return all
}

// block is the first block of a language in Markdown.
func block(t *testing.T, markdown, language string) string {
	t.Helper()
	_, rest, found := strings.Cut(markdown, "\n```"+language+"\n")
	require.True(t, found, "no block of %s", language)
	text, _, found := strings.Cut(rest, "```")
	require.True(t, found)
	return text
}
