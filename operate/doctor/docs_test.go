package doctor_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/doctor"
)

// The tables of docs/doctor.md are the rules, word for word.
func TestEveryRuleIsInTheDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/doctor.md")
	require.NoError(t, err)
	titles := map[string]string{"error": "\n### Errors\n", "warning": "\n### Warnings\n", "note": "\n### Notes\n"}
	rows := map[string]string{} // the tables, by severity
	for severity, title := range titles {
		_, after, found := strings.Cut(string(text), title)
		require.True(t, found, title)
		rows[severity], _, _ = strings.Cut(after, "\n#")
	}
	cell := strings.NewReplacer("|", `\|`).Replace
	for _, r := range doctor.Rules() {
		assert.Contains(t, rows[r.Examined], "\n| `"+r.ID+"` | "+cell(r.Happens)+" |\n", r.ID)
	}
	all := strings.Join([]string{rows["error"], rows["warning"], rows["note"]}, "")
	assert.Equal(t, len(doctor.Rules()), strings.Count(all, "\n| `"), "a row for a rule that doesn't exist")
}
