package cli_test

import (
	"encoding/json"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/hopback/hopback/operate/topologyfile"
)

// topologies are all topology files of the repository: those in files, and the blocks of YAML in its
// pages that are some.
func topologies(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	names, err := filepath.Glob(root + "/operate/topologyfile/testdata/*.yaml")
	require.NoError(t, err)
	for _, name := range names {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		all[name] = string(text)
	}
	pages, err := filepath.Glob(root + "/docs/*.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)\n```yaml\n(.*?)\n```\n")
	for _, name := range append(pages, root+"/README.md") {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, m := range blocks.FindAllStringSubmatch(string(text), -1) {
			if _, err := topologyfile.Parse("block", []byte(m[1])); err == nil {
				all[name+": "+m[1]] = m[1]
			}
		}
	}
	text, err := os.ReadFile(root + "/examples/kubernetes/topology.yaml")
	require.NoError(t, err)
	for d := yaml.NewDecoder(strings.NewReader(string(text))); ; {
		var object struct{ Data map[string]string }
		if d.Decode(&object) != nil {
			break
		}
		if topology, ok := object.Data["topology.yaml"]; ok {
			all["examples/kubernetes/topology.yaml"] = topology
		}
	}
	require.Contains(t, all, "examples/kubernetes/topology.yaml")
	require.Greater(t, len(all), 20)
	return all
}

// The schema is one of draft-07 that an editor's validator accepts. It accepts every topology file in the
// repository, and refuses each with an unknown key in any place.
func TestSchemaAcceptsAllTopologies(t *testing.T) {
	t.Parallel()
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(string(topologyfile.Schema())))
	require.NoError(t, err)
	assert.Equal(t, "http://json-schema.org/draft-07/schema#", document.(map[string]any)["$schema"])
	id := document.(map[string]any)["$id"].(string)
	for _, member := range []string{"title", "description"} {
		assert.NotEmpty(t, document.(map[string]any)[member])
	}
	compiler := jsonschema.NewCompiler()
	require.NoError(t, compiler.AddResource(id, document))
	schema, err := compiler.Compile(id) // also checks it against draft-07's own schema
	require.NoError(t, err)
	for name, text := range topologies(t) {
		parsed := func() any {
			var v any
			require.NoError(t, yaml.Unmarshal([]byte(text), &v), name)
			inJSON, err := json.Marshal(v)
			require.NoError(t, err, name)
			v, err = jsonschema.UnmarshalJSON(strings.NewReader(string(inJSON)))
			require.NoError(t, err, name)
			return v
		}
		assert.NoError(t, schema.Validate(parsed()), name)
		for i := range len(strictMappings(parsed())) {
			broken := parsed()
			strictMappings(broken)[i]["no-such-key"] = []any{map[string]any{}}
			assert.Error(t, schema.Validate(broken), "%s: mapping %d", name, i)
		}
	}
}

// strictMappings are the mappings of a topology file in one order, without those whose keys are the
// user's.
func strictMappings(v any) (all []map[string]any) {
	free := []string{"work-queues", "queues", "exchanges"}
	var visit func(v any, name string)
	visit = func(v any, name string) {
		switch v := v.(type) {
		case map[string]any:
			if !slices.Contains(free, name) {
				all = append(all, v)
			}
			var keys []string
			for k := range v {
				if k != "arguments" && k != "headers" {
					keys = append(keys, k)
				}
			}
			slices.Sort(keys)
			for _, k := range keys {
				visit(v[k], k)
			}
		case []any:
			for _, one := range v {
				visit(one, "")
			}
		}
	}
	visit(v, "")
	return all
}

// The entry for SchemaStore's catalog has the schema's own URL, which is that of its file, and patterns
// that don't match what others call theirs.
func TestSchemaStoreEntry(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(root + "/integration/tools/release/README.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?s)\n```json\n(.*?)\n```\n").FindSubmatch(page)
	require.NotNil(t, block)
	var entry struct {
		Name, Description, URL string
		FileMatch              []string
	}
	require.NoError(t, json.Unmarshal(block[1], &entry))
	var schema map[string]any
	require.NoError(t, json.Unmarshal(topologyfile.Schema(), &schema))
	assert.Equal(t, schema["$id"], entry.URL)
	assert.Equal(t, schema["title"], entry.Name)
	assert.NotEmpty(t, entry.Description)
	u, err := url.Parse(entry.URL)
	require.NoError(t, err)
	file, ok := strings.CutPrefix(u.Path, "/hopback/hopback/main/")
	require.True(t, ok)
	assert.FileExists(t, filepath.Join(root, file))
	for name, want := range map[string]bool{"hopback.yaml": true, "orders.hopback.yml": true, "topology.yaml": false, "compose.yaml": false} {
		matched := slices.ContainsFunc(entry.FileMatch, func(pattern string) bool {
			ok, err := path.Match(pattern, name)
			require.NoError(t, err)
			return ok
		})
		assert.Equal(t, want, matched, name)
	}
}
