package cli_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/operate/audit"
	"github.com/hopback/hopback/operate/topologyfile"
)

var update = flag.Bool("update", false, "redraw the picture in README.md")

const readmePath = "../../../../README.md"

// The picture in README.md is what hopback draws of the topology file in README.md.
func TestPictureInREADMEIsDrawnFromItsTopology(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(readmePath)
	require.NoError(t, err)
	readme := string(text)
	f, err := topologyfile.Parse("README.md", []byte(block(t, readme, "yaml")))
	require.NoError(t, err)
	want, have := audit.Mermaid(check.FromTopology(f.Topology)), block(t, readme, "mermaid")
	if *update && want != have {
		require.NoError(t, os.WriteFile(readmePath, []byte(strings.Replace(readme, have, want, 1)), 0o644))
		return
	}
	assert.Equal(t, want, have, "run: go test ./cmd/hopback/internal/cli -run README -update")
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
