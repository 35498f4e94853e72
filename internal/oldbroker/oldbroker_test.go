package oldbroker_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/oldbroker"
)

func TestQuirksGoByTheVersion(t *testing.T) {
	t.Parallel()
	before43 := oldbroker.Before43{ForgetsSessionsLate: true, CountsReturns: true, LacksConsumerTimeout: true, LacksActiveState: true, IgnoresDeliveryTime: true, LosesSettlements: true, LacksStrictPriorities: true}
	before44 := oldbroker.Before44{DeliversPublishedAtOnce: true, LacksTokens: true}
	in41 := oldbroker.Before42{IgnoresSQLFilters: true, LacksDirectReplies: true}
	in40 := oldbroker.Before42{KeepsToken: true, IgnoresCC: true, IgnoresPropertyFilters: true, IgnoresSQLFilters: true, LacksDirectReplies: true}
	for version, want := range map[string]oldbroker.Quirks{
		"":      {Before42: in40, Before43: before43, Before44: before44},
		"4.0.5": {Before42: in40, Before43: before43, Before44: before44},
		"4.1.0": {Before42: in41, Before43: before43, Before44: before44},
		"4.2.9": {Before43: before43, Before44: before44},
		"4.3.0": {Before44: before44},
		"4.4.0": {},
		"5.0.0": {},
	} {
		assert.Equal(t, want, oldbroker.Of(client.Broker{Version: version}.AtLeast), version)
	}
}

// Nothing else in the packages decides by a version.
func TestVersionsAreComparedHereAlone(t *testing.T) {
	t.Parallel()
	compares := regexp.MustCompile(`\.AtLeast\(\w`)
	found := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "examples" || d.Name() == "integration" || strings.HasPrefix(d.Name(), ".git")):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			found++
			// client's own AtLeast is this package's.
			assert.NotRegexp(t, compares, strings.ReplaceAll(string(text), "oldbroker.Version(b.Version).AtLeast(major, minor)", ""), path)
			return err
		}
		return nil
	}))
	assert.Greater(t, found, 100)
}
