package integration

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// goModule is a module of go.work.
type goModule struct{ Path, Dir string }

// modules returns those of go.work.
func modules(t *testing.T) (all []goModule) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-json=Path,Dir")
	out, err := list.Output()
	require.NoError(t, err)
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var m goModule
		require.NoError(t, d.Decode(&m))
		all = append(all, m)
	}
	require.NotEmpty(t, all)
	return all
}

// A user has no go.work, in which a requirement of one module does for all others. So each
// go.mod names what its module needs, at the versions that it needs.
func TestEachModuleBuildsWithoutTheWorkspace(t *testing.T) {
	t.Parallel()
	all := modules(t)
	for _, m := range all {
		t.Run(m.Path, func(t *testing.T) {
			t.Parallel()
			run := func(args ...string) {
				t.Helper()
				c := exec.CommandContext(t.Context(), "go", args...)
				c.Dir, c.Env = m.Dir, append(os.Environ(), "GOWORK=off")
				out, err := c.CombinedOutput()
				require.NoError(t, err, "%s", out)
			}
			if !strings.HasSuffix(m.Path, "/cmd/hopback") {
				run("list", "-mod=readonly", "-deps", "-test", "./...")
				return
			}
			// The command's go.mod replaces no module, since go install refuses that.
			mod := filepath.Join(t.TempDir(), "go.mod")
			edit := []string{"mod", "edit"}
			for _, other := range all {
				if other.Path != m.Path {
					edit = append(edit, "-replace="+other.Path+"="+other.Dir)
				}
			}
			copyFile(t, filepath.Join(m.Dir, "go.mod"), mod)
			copyFile(t, filepath.Join(m.Dir, "go.sum"), strings.TrimSuffix(mod, "mod")+"sum")
			run(append(edit, mod)...)
			run("list", "-modfile="+mod, "-mod=readonly", "-deps", "-test", "./...")
		})
	}
}

// A user may have another version of the root's module than of the others. So these use its
// exported API only. Tests, and bench, are run in a checkout alone.
func TestModulesImportExportedAPIOnly(t *testing.T) {
	t.Parallel()
	const root = "github.com/hopback/hopback"
	for _, m := range modules(t) {
		if m.Path == root || m.Path == root+"/integration/bench" {
			continue
		}
		list := exec.CommandContext(t.Context(), "go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...")
		list.Dir = m.Dir
		out, err := list.Output()
		require.NoError(t, err)
		for line := range strings.Lines(string(out)) {
			paths := strings.Fields(line)
			if paths[0] == root+"/postgres/internal/pgtest" { // only tests import it
				continue
			}
			for _, path := range paths[1:] {
				if strings.HasPrefix(path, root+"/") && strings.Contains(path, "/internal/") {
					assert.True(t, strings.HasPrefix(path, m.Path+"/"), "%s imports %s", paths[0], path)
				}
			}
		}
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, text, 0o600))
}
