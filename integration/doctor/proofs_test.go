package doctor_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/operate/doctor"
)

// proof are the tests of a rule whose fault a shared broker can't have, or must not.
type proof struct {
	// tests build the fault with real brokers, show its harm, and that doctor names it.
	tests string
	// but is what they don't show, and why.
	but string
}

const (
	harm       = "TestDoctorNamesWhatDoesHarm"
	onACluster = "TestDoctorNamesWhatDoesHarmOnACluster"
)

// proofs are those of the rules that TestDoctorNamesWhatDoesHarm doesn't prove alone.
var proofs = map[string]proof{
	"memory-alarm": {"TestDoctorNamesAlarms TestAlarmStopsPublishingAndNothingElse", ""},
	"disk-alarm":   {"TestDoctorNamesAlarms TestAlarmStopsPublishingAndNothingElse", ""},
	"disk-limit":   {harm, "It only shows that doctor names the default limit: the harm would fill the disk of the machine that runs the tests."},

	"not-replicated":      {onACluster, ""},
	"replicas":            {onACluster, ""},
	"replicas-down":       {onACluster, ""},
	"queue-down":          {onACluster, ""},
	"node-down":           {onACluster, ""},
	"two-nodes":           {onACluster, ""},
	"leaders-on-one-node": {onACluster, ""},
	"partition":           {"TestDoctorNamesAPartition", "It runs with `HOPBACK_LONG=1`. Only Mnesia reports partitions, which is RabbitMQ's default before 4.2. With Khepri, doctor names the nodes that can't be seen: see node-down."},
	"broker-version":      {onACluster, "It only shows that doctor names the version, with `HOPBACK_LONG=1`: a frozen node does harm only at a wrong moment. `TestConsumerThatTheBrokerForgotHasItsSessionReplaced` plays what the broker does then."},

	"delayed-drop-head":      {"TestPublishersForLaterHangAQueueThatDropsItsHead", "RabbitMQ 4.4 only."},
	"delayed-message-plugin": {"TestDoctorNamesAnExchangeOfAnUnsupportedPlugin", "Debian has no package of the plugin, so an exchange type by the same name stands in for it: without it, publishing fails. The loss of held messages together with their node isn't shown."},
	"oversized-queue":        {"TestDoctorNamesAQueueThatGrowsIntoAnAlarm", "The queue grows into the broker's disk alarm; doctor then gets the broker's own counts, multiplied, since a queue as large as the rule's limit would fill the disk of the machine that runs the tests."},
	"transient-queue":        {harm + " TestDelayedMessagesSurviveARestartOfTheBroker", ""},
	"policy-pattern":         {"TestPatternsOfPoliciesMatchAsOnABroker", ""},
	"impossible-queue":       {"TestAFileIsWhatTheBrokerReads", ""},
	"deprecated-feature":     {"TestDoctorNamesADeprecatedFeature", ""},
	"disabled-feature-flags": {"TestDoctorNamesDisabledFeatureFlags", ""},
}

// Each rule has tests that build its fault and name it, or says what isn't shown and why.
func TestEveryRuleOfDoctorHasAFault(t *testing.T) {
	t.Parallel()
	built := map[string]bool{}
	for _, f := range faults {
		built[strings.Fields(f.finds)[1]] = true
	}
	source := testFiles(t)
	rules := map[string]bool{}
	for _, r := range doctor.Rules() {
		rules[r.ID] = true
		p, listed := proofs[r.ID]
		assert.True(t, built[r.ID] || listed, "%s: no fault", r.ID)
		named := false
		for test := range strings.FieldsSeq(p.tests) {
			text, exists := source[test]
			assert.True(t, exists, "%s: there is no %s", r.ID, test)
			named = named || strings.Contains(text, r.ID) || test == harm && built[r.ID] ||
				strings.Contains(text, `alarm.name+"-alarm"`) && strings.HasSuffix(r.ID, "-alarm")
		}
		assert.True(t, named || !listed, "%s: no test of %s contains its name", r.ID, p.tests)
		assert.True(t, !listed || p.tests != harm || p.but != "", "%s: %s is the default", r.ID, harm)
	}
	for rule := range proofs {
		assert.True(t, rules[rule], "there is no rule %s", rule)
	}
	for rule := range built {
		assert.True(t, rules[rule], "there is no rule %s", rule)
	}
}

// testFiles are the sources of the integration tests, by the names of tests in them.
func testFiles(t *testing.T) map[string]string {
	t.Helper()
	source := map[string]string{}
	files, err := filepath.Glob("../*/*_test.go")
	require.NoError(t, err)
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
				source[f.Name.Name] = string(text[set.Position(f.Pos()).Offset:set.Position(f.End()).Offset])
			}
		}
	}
	return source
}
