package topologyfile_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/topologyfile"
)

// node is what the test reads of the schema.
type node struct {
	Properties           map[string]*node
	AdditionalProperties json.RawMessage
	Items                *node
	AnyOf, OneOf         []*node
	Const                any
}

func (n *node) each(t *testing.T) *node {
	t.Helper()
	var of node
	require.NoError(t, json.Unmarshal(n.AdditionalProperties, &of))
	return &of
}

// pageSections are the sections of docs/topology-file.md with a table of keys, and where the
// schema has those keys.
func pageSections(t *testing.T) map[string]*node {
	t.Helper()
	var root node
	require.NoError(t, json.Unmarshal(topologyfile.Schema(), &root))
	at := root.Properties
	sections := map[string]*node{
		"At the top": &root, "`retry`": at["retry"], "`central`": at["central"],
		"`work-queues`": at["work-queues"].each(t), "`fair-queues`": at["fair-queues"].each(t), "`exchanges`": at["exchanges"].each(t), "`bindings`": at["bindings"].Items,
		"`retry.rules`": at["retry"].Properties["rules"].Items,
	}
	for _, name := range []string{"exponential", "any-delay", "names"} {
		sections["`retry."+name+"`"] = at["retry"].Properties[name]
	}
	for _, kind := range at["queues"].each(t).OneOf {
		name := kind.Properties["type"].Const.(string)
		sections["`queues`, `type: "+name+"`"] = kind
	}
	for _, either := range sections["`work-queues`"].Properties["dead-letter"].AnyOf {
		if len(either.Properties) > 0 {
			sections["`dead-letter`"] = either
		}
	}
	return sections
}

// The page has every key of the parser, in its section, and no other. The parser goes by the
// same list of keys as the schema.
func TestThePageHasEveryKey(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/topology-file.md")
	require.NoError(t, err)
	heading, row := regexp.MustCompile(`^##+ (.*)$`), regexp.MustCompile("^\\| (`[a-z-]+`(?:, `[a-z-]+`)*) \\| (?:.* )?\\| (.*) \\|$")
	found := map[string][]string{}
	section := ""
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if m := heading.FindStringSubmatch(line); m != nil {
			section = m[1]
		} else if m := row.FindStringSubmatch(line); m != nil {
			found[section] = append(found[section], strings.Split(strings.Trim(m[1], "`"), "`, `")...)
			assert.NotEmpty(t, m[2], line)
		} else if strings.HasPrefix(line, "| all other keys of [`work-queues`]") {
			for _, key := range found["`work-queues`"] {
				if !strings.Contains(line, "without `"+key+"`") {
					found[section] = append(found[section], key)
				}
			}
		}
	}
	sections := pageSections(t)
	require.Len(t, sections, 16)
	for name, n := range sections {
		var want []string
		for key := range n.Properties {
			want = append(want, key)
		}
		got := slices.Compact(slices.Sorted(slices.Values(found[name])))
		slices.Sort(want)
		assert.Equal(t, want, got, name)
	}
	for name := range found {
		assert.Contains(t, sections, name, "a table of keys in a section that the file doesn't have")
	}
}

// Every example of the page is a file that parses, and fits the schema.
func TestTheExamplesOfThePageParse(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/topology-file.md")
	require.NoError(t, err)
	n := 0
	for _, after := range strings.Split(string(page), "\n```yaml\n")[1:] {
		text, _, _ := strings.Cut(after, "```")
		n++
		_, err := topologyfile.Parse("example", []byte(text))
		require.NoError(t, err, text)
		assert.Empty(t, newSchema(t).check(decode(t, text)), text)
	}
	assert.Equal(t, strings.Count(string(page), "\n```yaml"), n)
	assert.Greater(t, n, 7)
}
