package annotation

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestThePageDescribesEachAnnotation(t *testing.T) {
	page, err := os.ReadFile("../../docs/messages.md")
	require.NoError(t, err)
	source, err := os.ReadFile("annotation.go")
	require.NoError(t, err)
	all := regexp.MustCompile(`= "(x-[a-z-]+)"`).FindAllStringSubmatch(string(source), -1)
	require.Len(t, all, 25)
	for _, m := range all {
		assert.Contains(t, string(page), "`"+m[1]+"`")
	}
}
