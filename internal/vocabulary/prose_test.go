package vocabulary

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

// phrases are what no page says, since it reads as translated, and what to say instead.
var phrases = map[string]string{
	`of its own`: "separate, or nothing", `(is|are) told`: "gets, is notified", `tells of`: "reports",
	`anew`: "again, new", `amid`: "during", `beside`: "next to, besides", `for ever`: "permanently, never ends",
	`under way`: "in flight, running", `meanwhile`: "at the same time", `whoever`: "anyone who, if you",
	`bears`: "has, carries", `thrice`: "three times", `it is so that`: "", `comes to nothing`: "fails",
	`of which`: "a second sentence", `by way of`: "through", `holds up`: "blocks, delays", `goes on`: "continues",
	`given up on`: "abandoned, dead-lettered", `as it (is|was)`: "unchanged", `the like`: "and so on",
}

// spans are code and the targets of links: they aren't prose.
var spans = regexp.MustCompile("`[^`]*`|\\]\\([^)]*\\)|\"[^\"]*\"")

func TestPagesReadAsSpoken(t *testing.T) {
	t.Parallel()
	words := map[*regexp.Regexp]string{}
	for phrase, instead := range phrases {
		words[regexp.MustCompile(`(?i)\b`+phrase+`\b`)] = instead
	}
	root, pages := filepath.Join("..", ".."), 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		pages++
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		code := false
		for i, line := range strings.Split(string(text), "\n") {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				code = !code
			}
			if code {
				continue
			}
			prose := spans.ReplaceAllString(line, "")
			for word, instead := range words {
				if found := word.FindString(prose); found != "" {
					assert.Fail(t, "a phrase that reads as translated", "%s:%d: %q; write: %s", path, i+1, found, instead)
				}
			}
		}
		return nil
	}))
	require.Greater(t, pages, 20)
}
