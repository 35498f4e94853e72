package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/topologyfile"
)

// Every command line in a block of sh in the documents has a command and flags that there
// are, and the topology of dead-letters.md is one.
func TestCommandLinesInDocuments(t *testing.T) {
	t.Parallel()
	const docs = "../../../../docs"
	files, err := filepath.Glob(filepath.Join(docs, "*.md"))
	require.NoError(t, err)
	seen := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		in := false
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			if strings.HasPrefix(line, "```") {
				in = line == "```sh"
				continue
			}
			args, ok := strings.CutPrefix(line, "hopback ")
			if !in || !ok {
				continue
			}
			args, _, _ = strings.Cut(args, " # ")
			seen++
			r := world{}.run(append(strings.Fields(args), "--help")...)
			assert.Zero(t, r.code, "%s: %s\n%s", file, line, r.stderr)
		}
	}
	assert.Greater(t, seen, 8)
	text, err := os.ReadFile(filepath.Join(docs, "dead-letters.md"))
	require.NoError(t, err)
	f, err := topologyfile.Parse("dead-letters.md", []byte(block(t, string(text), "yaml")))
	require.NoError(t, err)
	assert.True(t, f.Policy.ReplayByMove)
}
