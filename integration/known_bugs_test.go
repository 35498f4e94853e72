package integration

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// knownBugs are the faults that were reproduced in the official Go client (o), in
// go-amqp (g) or in a broker, and the tests which show that hopback isn't hit.
var knownBugs = []struct {
	no    int
	in    string
	fault string
	tests string // package folder and name; one below integration where none is named
}{
	{1, "o", "a consumer whose attach failed is attached after a reconnect, and swallows messages", "TestRefusedConsumerIsNoGhostAfterAReconnect"},
	{2, "o", "the socket of a failed open stays, and starts a second recovery; receivers survive Close", "TestFailedOpensLeaveNothingBehind"},
	{3, "o", "recovery redeclares queues without their arguments", "TestQueueThatIsDeletedAndDeclaredAgainKeepsItsArguments"},
	{4, "g", "Send returns nil for a message that was released", "TestPublishToNowhereIsErrUnroutable adapter/officialclient/integration.TestUnroutableForwardKeepsTheOriginal"},
	{5, "4.0, o", "an attach to a missing queue ends the session that others share", "TestAttachingToWhatIsMissingHarmsNobodyElse"},
	{6, "o", "unbinding with arguments does nothing", "TestBindingWithArgumentsIsDeleted"},
	{7, "g", "closing the session before the receiver counts all that is prefetched", "TestDrainGivesBackWhatNoHandlerHasBegun TestGracefulRestartsCostNoMessageItsDeliveries client.TestDrainKeepsTheOrderThatLeavesDeliveryCountsAlone"},
	{8, "g", "an annotation or error text that can't be encoded or is too large closes the connection", "TestHostileOutcomesLeaveTheConnectionAlone client.TestConsumerCutsErrorTextsToWhatASettlementCanCarry"},
	{9, "g", "a message without a body, or with a bad annotation key, ends the link or session", "TestHostileMessagesAreRefusedBeforeTheyAreSent client.TestValidateRefusesWhatWouldEndTheLink"},
	{10, "g", "after a cancel during a large message the next message kills the link", "TestCancelledPublishesHarmNobodyElse"},
	{11, "g", "a ctx's deadline becomes a write deadline and closes the connection", "TestCancelledPublishesHarmNobodyElse client.TestWhatIsNotAnsweredIsAbandoned"},
	{12, "g", "the 65th session closes the connection, the 257th link ends the session", "TestSessionTooManyIsErrSessionLimit TestForwardsToMoreAddressesThanASessionHasLinks"},
	{13, "g", "delivery-id 2³²-1 hangs the session", "TestSessionsAreReplacedLongBeforeTheirDeliveryIDsEnd TestDeliveryIDsOfASessionBeginAtZero client.TestConsumerReplacesItsSessionWithNothingUnsettled internal/publish.TestSenderReplacesItsSessionInOrder"},
	{14, "o", "management replies are mixed up by concurrent callers and after a timeout", "TestConcurrentManagementRequestsGetTheirOwnReplies TestTimedOutManagementRequestDoesNotHarmTheNext"},
	{15, "o", "the management's session ends after a malformed name, and stays unusable", "TestManagementComesBackAfterItsSessionEnded TestManagementRefusalDoesNotFailOtherRequests client.TestManagementRefusesRequestsThatWouldEndTheSession"},
	{16, "g", "ctx isn't heeded without credit or with the session's window full", "TestAlarmStopsPublishingAndNothingElse internal/publish.TestSenderCloseCutsOffWhenItsContextEnds"},
	{17, "o", "an undrained state channel blocks recovery; Close never ends; Receive spins", "TestOutageIsWaitedForWithoutSpinning TestObserverThatHangsHoldsNothingUp TestCloseEndsInEveryState"},
	{18, "4.3, g", "the consumer timeout starves a consumer silently; the late accept says nil", "TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement"},
	{19, "o", "panics: purge of a missing queue, int arguments, nil of every kind", "TestNilAndMissingAreErrorsAndNoPanics TestQueueArgumentsReachTheBrokerWithTheirTypes"},
	{20, "g", "a message with a char or decimal ends the link, on 4.3 each time; one nested deeply enough overflows the stack; a binary for a key in a footer is a panic", "TestMessagesThatCannotBeDecodedHarmNoOthers internal/message.TestWhatIsNotDecodable client.TestHostileServers"},
	{21, "g", "an array of ints or longs with one below -128 and none above 127 is cut to its lowest bytes", "client.TestValidateRefusesArraysThatWouldBeCut bench/interop.TestEveryTypeBetweenProtonAndHopback"},
}

// Every fault has a test, and every test named above exists.
func TestEveryKnownBugHasATest(t *testing.T) {
	t.Parallel()
	exists := map[string]bool{}
	require.NoError(t, filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		folder := filepath.ToSlash(filepath.Dir(strings.TrimPrefix(path, ".."+string(filepath.Separator))))
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				exists[folder+"."+fn.Name.Name] = true
				if subject, ok := strings.CutPrefix(folder, "integration/"); ok {
					exists[fn.Name.Name] = exists[fn.Name.Name] || !strings.Contains(subject, "/")
				}
			}
		}
		return nil
	}))
	var numbers []int
	for _, b := range knownBugs {
		numbers = append(numbers, b.no)
		assert.NotEmpty(t, b.tests, "B%d", b.no)
		for name := range strings.FieldsSeq(b.tests) {
			assert.True(t, exists[name], "B%d: there is no %s", b.no, name)
		}
	}
	var all []int
	for i := range 21 {
		all = append(all, i+1)
	}
	assert.Equal(t, all, slices.Compact(numbers))
}
