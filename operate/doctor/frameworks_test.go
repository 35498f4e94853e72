package doctor_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/doctor"
)

// Of each framework's topology the doctor finds what is known to be wrong, and no error besides.
func TestFrameworksHaveTheirKnownFaultsAndNoOtherErrors(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../internal/frameworks/testdata/*.json")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			wanted, err := os.ReadFile(strings.TrimSuffix(file, ".json") + ".want")
			require.NoError(t, err)
			r, err := doctor.FromDefinitions(t.Context(), bytes.NewReader(text), doctor.Options{})
			require.NoError(t, err)
			var found []string
			for _, g := range r.Groups {
				for _, f := range g.Findings {
					found = append(found, fmt.Sprintf("%s %s %s", f.Severity, f.Rule, f.Resource))
				}
			}
			var want []string
			for line := range strings.Lines(string(wanted)) {
				if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
					want = append(want, line)
				}
			}
			require.NotEmpty(t, want)
			assert.Subset(t, found, want)
			for _, line := range found {
				if strings.HasPrefix(line, "error ") {
					assert.True(t, slices.Contains(want, line), "not expected: %s", line)
				}
			}
		})
	}
}
