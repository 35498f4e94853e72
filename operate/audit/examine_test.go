package audit_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/operate/audit"
)

func TestExaminedRulesAreExplained(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, r := range audit.ExamineRules() {
		assert.False(t, seen[r.ID], r.ID)
		seen[r.ID] = true
		assert.Contains(t, []string{"error", "warning", "note"}, r.Examined, r.ID)
		for _, text := range []string{r.Summary, r.Remedy, r.Happens, r.Reproduce} {
			assert.NotEmpty(t, text, r.ID)
		}
		assert.True(t, strings.HasPrefix(r.Docs, "https://"), r.ID)
		assert.True(t, strings.HasSuffix(r.Happens, "."), r.ID)
	}
	assert.GreaterOrEqual(t, len(seen), 25)
}
