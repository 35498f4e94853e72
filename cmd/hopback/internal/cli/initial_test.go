package cli_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/cmd/hopback/internal/cli"
)

// What init writes builds and passes its test, and isn't written over anything.
func TestInit(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../../../..")
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "worker")
	r := world{}.run("init", dir, "--queue", `or"ders`)
	require.Equal(t, cli.Done, r.code, r.stderr)
	assert.Contains(t, r.stdout, "go test ./...")
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(string(mod), "module example.com/worker\n"), string(mod))

	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sums, 0o600))
	for _, args := range [][]string{
		{"mod", "edit", "-replace", "github.com/hopback/hopback=" + root, "-require", "github.com/hopback/hopback@v0.1.0"},
		{"mod", "tidy"}, {"vet", "./..."}, {"build", "-o", filepath.Join(dir, "worker"), "."}, {"test", "./..."},
	} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=-trimpath -mod=mod")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %s\n%s", strings.Join(args, " "), out)
	}
	again := world{}.run("init", dir)
	assert.Equal(t, cli.No, again.code)
	assert.Contains(t, again.stderr, "exists already; nothing was written")

	for _, args := range [][]string{{"init"}, {"init", dir + "x", "--module", "a b"}, {"init", dir + "x", "--queue", ""}} {
		assert.Equal(t, cli.Usage, world{}.run(args...).code, args)
	}
	assert.NoDirExists(t, dir+"x")
}
