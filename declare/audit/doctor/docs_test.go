package doctor_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare/audit/doctor"
)

func TestEveryRuleIsInTheDocs(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/doctor.md")
	require.NoError(t, err)
	for _, r := range doctor.Rules() {
		for _, part := range []string{"\n### " + r.ID + "\n", r.Happens, r.Remedy, r.Fix, r.Docs} {
			assert.Contains(t, string(text), part, r.ID)
		}
	}
}
