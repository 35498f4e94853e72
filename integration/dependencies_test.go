package integration

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A program that uses the SDK has the standard library and go-amqp, and nothing else. Only
// tests use testify and goleak: a build downloads neither.
func TestSDKDependsOnGoAMQPAlone(t *testing.T) {
	t.Parallel()
	sdk := []string{"list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}"}
	out, err := exec.CommandContext(t.Context(), "go", "list", "../...").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for path := range strings.FieldsSeq(string(out)) {
		if !strings.Contains(path, "/integration/") { // only tests import it
			sdk = append(sdk, path)
		}
	}
	out, err = exec.CommandContext(t.Context(), "go", sdk...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for path := range strings.FieldsSeq(string(out)) {
		assert.True(t, strings.HasPrefix(path, "github.com/hopback/hopback/") || path == "github.com/hopback/hopback" || strings.HasPrefix(path, "github.com/Azure/go-amqp"), path)
	}
}

// The layers know of each other what the architecture says, and no more.
func TestPackagesImportOnlyWhatTheyMay(t *testing.T) {
	t.Parallel()
	const module = "github.com/hopback/hopback/"
	for pkg, may := range map[string][]string{
		"": {"argument", "client", "declare", "retry"}, "argument": {}, "adapter": {"client"}, "address": {"argument"}, "declare": {"address", "argument"}, "client": {"address", "argument", "client/instrument"}, "client/instrument": {"address"},
		"declare/check": {"declare"}, "internal/rules": {"address", "argument", "declare"}, "internal/frames": {},
		"retry": {"address", "argument", "client", "client/instrument", "declare", "declare/check"}, "operate/desk": {"address", "argument", "client", "declare", "declare/check", "middleware/pause", "operate/audit", "partition", "retry"},
		"fair":                 {"address", "argument", "client", "declare", "retry"},
		"schedule":             {"address", "argument", "client", "declare", "middleware/dedupe"},
		"operate/topologyfile": {"argument", "client", "declare", "fair", "retry"},
		"rpc":                  {"address", "argument", "client", "client/instrument", "declare"},
		"stream":               {"adapter", "address", "argument", "client", "client/instrument", "declare", "retry"},
	} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-f", `{{join .Imports "\n"}}`, "../"+pkg).CombinedOutput()
		require.NoError(t, err, "%s", out)
		for path := range strings.FieldsSeq(string(out)) {
			if name, ours := strings.CutPrefix(path, module); ours && !strings.Contains("/"+name, "/internal/") {
				assert.Contains(t, may, name, pkg)
			}
		}
	}
}

// operate is for people who run brokers. A service that uses the SDK compiles nothing of it, and nothing of what
// only we run.
func TestTheSDKImportsNothingOfOperate(t *testing.T) {
	t.Parallel()
	const root = "github.com/hopback/hopback/"
	others := func(path string) bool {
		return slices.ContainsFunc([]string{"operate", "integration", "hopbacktest"}, func(folder string) bool { return strings.HasPrefix(path, root+folder) })
	}
	out, err := exec.CommandContext(t.Context(), "go", "list", "../...").CombinedOutput()
	require.NoError(t, err, "%s", out)
	sdk := append([]string{"list", "-deps"}, slices.DeleteFunc(strings.Fields(string(out)), others)...)
	require.Greater(t, len(sdk), 40)
	out, err = exec.CommandContext(t.Context(), "go", sdk...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for path := range strings.FieldsSeq(string(out)) {
		assert.False(t, others(path), "the SDK imports %s", path)
	}
}

// What client hides is in packages that stand on each other in this order: see DESIGN.md.
func TestPackagesBelowClientKeepTheirOrder(t *testing.T) {
	t.Parallel()
	const internal = "github.com/hopback/hopback/internal/"
	order := []string{"failure", "loglines", "link"}
	for i, pkg := range order {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../internal/"+pkg).CombinedOutput()
		require.NoError(t, err, "%s", out)
		for path := range strings.FieldsSeq(string(out)) {
			assert.NotEqual(t, "github.com/hopback/hopback/client", path, pkg)
			for _, above := range order[i+1:] {
				assert.NotEqual(t, internal+above, path, "%s stands below it", pkg)
			}
		}
	}
}

// Names, addresses, and topologies are values: neither these packages nor what they import has connections.
func TestWhatDeclaresDoesNoIO(t *testing.T) {
	t.Parallel()
	for _, pkg := range []string{"argument", "address", "declare"} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../"+pkg).CombinedOutput()
		require.NoError(t, err, "%s", out)
		for path := range strings.FieldsSeq(string(out)) {
			for _, io := range []string{"net", "net/http", "crypto/tls", "github.com/hopback/hopback/client", "github.com/hopback/hopback/internal/link", "github.com/hopback/hopback/internal/amqp"} {
				assert.NotEqual(t, io, path, pkg)
			}
		}
	}
}
