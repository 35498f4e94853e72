package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Series of RabbitMQ that hopback supports, from the oldest to the newest, and the Go release
// that it needs. A change here is a change of all the files below.
var (
	supportedSeries = []string{"4.0", "4.1", "4.2", "4.3", "4.4"}
	// packagedSeries are those that Debian has, so every test runs with the real ones.
	packagedSeries = []string{"4.3", "4.0"}
	supportedGo    = "1.26"
	// untested says what no test has run with, on docs/versions.md alone. Other pages link there.
	untested = "**not 4.4.0 or 4.4.1**"
)

// Everything that names the supported versions names the same ones.
func TestVersionsAgree(t *testing.T) {
	t.Parallel()
	oldest, newest := supportedSeries[0], supportedSeries[len(supportedSeries)-1]
	tested := packagedSeries[0]
	quoted := func(series []string) string { return `"` + strings.Join(series, `", "`) + `"` }
	down := slices.Clone(supportedSeries)
	slices.Reverse(down)

	for file, want := range map[string][]string{
		"README.md":          {fmt.Sprintf("RabbitMQ %s to %s, Go %s", oldest, newest, supportedGo), "rabbitmq:" + tested + "-management"},
		"docs/versions.md":   {fmt.Sprintf("RabbitMQ %s to %s and Go %s", oldest, newest, supportedGo), untested, "from Go " + supportedGo + " on"},
		"CHANGELOG.md":       {fmt.Sprintf("for RabbitMQ %s to %s and Go %s", oldest, newest, supportedGo)},
		"CONTRIBUTING.md":    {"You need Go " + supportedGo},
		"docker-compose.yml": {"RABBITMQ_IMAGE:-rabbitmq:" + tested + "-management"},
		"integration/rabbitmq/broker.go": {
			"supported = []string{" + quoted(down) + "}",
			"packaged  = []string{" + quoted(packagedSeries) + "}",
		},
		"integration/testrun/plan.go": {
			"var versions = []string{" + quoted(packagedSeries) + "}",
			"const newest = \"" + newest + "\"",
			"var between = []string{" + quoted(down[2:len(down)-1]) + "}",
		},
	} {
		text := read(t, file)
		for _, words := range want {
			assert.Contains(t, strings.Join(strings.Fields(text), " "), strings.Join(strings.Fields(words), " "), file)
		}
	}

	for _, file := range []string{"README.md", "docs/concepts.md"} {
		assert.False(t, strings.Contains(read(t, file), "4.4.0"), "%s: docs/versions.md alone says which patches were tested", file)
	}

	// An image without a series would be one that hopback isn't tested with.
	pages, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	for _, page := range append(pages, "../README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, image := range regexp.MustCompile(`\brabbitmq:([\w.]+)-management`).FindAllStringSubmatch(string(text), -1) {
			assert.Contains(t, supportedSeries, image[1], page)
		}
	}

	// Each job of the workflow that has brokers runs with every series.
	workflow := read(t, ".github/workflows/ci.yml")
	matrices := regexp.MustCompile(`(?m)^\s+rabbitmq: \[(.*)\]$`).FindAllStringSubmatch(workflow, -1)
	require.Len(t, matrices, 2, "the jobs integration and examples")
	for _, m := range matrices {
		assert.Equal(t, quoted(supportedSeries), m[1])
	}
	assert.Contains(t, workflow, "make integration SERIES=${{ matrix.rabbitmq }}")
	assert.Contains(t, workflow, "image: rabbitmq:${{ matrix.rabbitmq }}-management")
	assert.Contains(t, workflow, "run: .ci/run")
	assert.Contains(t, workflow, "run: make release")
	assert.Equal(t, strings.Count(workflow, "actions/setup-go@"), strings.Count(workflow, "go-version-file: go.mod"), "no job has another Go")

	goLine := `(?m)^go ` + regexp.QuoteMeta(supportedGo) + `(\.0)?$`
	for _, m := range modules(t) {
		if strings.HasSuffix(m.Path, "/bench") || strings.HasSuffix(m.Path, "/examples") {
			continue // nobody imports these
		}
		text, err := os.ReadFile(filepath.Join(m.Dir, "go.mod"))
		require.NoError(t, err)
		assert.Regexp(t, goLine, string(text), "%s: who has an older patch of Go %s can't build it", m.Path, supportedGo)
	}
	assert.Regexp(t, goLine, read(t, "go.work"))
}

// read returns a file of the repository.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", filepath.FromSlash(name)))
	require.NoError(t, err)
	return string(text)
}
