package consume_test

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/retry"
	"github.com/hopback/hopback/schedule"
)

// needs44 are the places in the code that ask whether the broker is older than RabbitMQ 4.4, and for each the cases of
// TestWhatNeedsRabbitMQ44SaysSo that end there, or why none does.
var needs44 = map[string]string{
	"client/claim.go":             "NewClaimer, desk.Desk.Claimer, and the commands",
	"client/park_before_4_4.go":   "Park",
	"declare/apply.go":            "PlacementTag",
	"retry/strategy.go":           "Policy.Claimable",
	"retry/start.go":              "StrategyAuto, which logs it: TestAutoSaysThatNothingIsClaimable",
	"schedule/publisher.go":       "PublisherConfig.Claimable",
	"schedule/dispatch.go":        "DispatchConfig.Claimable",
	"schedule/held.go":            "nothing is refused: the ladder holds the message",
	"operate/desk/waiting.go":     "nothing is refused: no dead letter waits there",
	"operate/desk/web/waiting.go": "the pages that cancel, run, or reschedule by token: TestWaitingMessagesNeedRabbitMQ44 in operate/desk/web",
	"client/consumer_results.go":  "nothing is refused: no dead letter waits there",
	"internal/rules/rules.go":     "nothing is refused: a rule of verify, about the version that it has read",
}

// The table is complete: a new place has to be added, with its case.
func TestEachRefusalBelowRabbitMQ44IsInTheTable(t *testing.T) {
	t.Parallel()
	asks := regexp.MustCompile(`\.(LacksTokens|DeliversPublishedAtOnce)\b|\.Required &&|atLeast\((c\.Snapshot, )?4, 4\)`)
	found := map[string]bool{}
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (name == "integration" || name == "hopbacktest" || name == "examples" || strings.HasPrefix(d.Name(), ".git")):
			return filepath.SkipDir
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && !strings.HasPrefix(name, filepath.Join("internal", "oldbroker")):
			text, err := os.ReadFile(path)
			if asks.Match(text) {
				found[filepath.ToSlash(name)] = true
			}
			return err
		}
		return nil
	}))
	assert.Equal(t, slices.Sorted(maps.Keys(needs44)), slices.Sorted(maps.Keys(found)))
}

// Earlier versions refuse what needs RabbitMQ 4.4, with an error that names both versions, before anything is published.
func TestWhatNeedsRabbitMQ44SaysSo(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		if s.AtLeast("4.4") {
			t.Skip("it has all of this")
		}
		conn, _ := s.Connect(t)
		suite.Apply(t, conn, declare.Topology{Queues: []declare.Queue{
			suite.Quorum("orders", declare.ToQueue("dead")), suite.Quorum("dead", declare.Drop()), suite.Quorum(schedule.Names{}.ClaimableQueue(), declare.Drop()),
		}})
		version := conn.Broker().Version
		says := func(name, text string) {
			t.Helper()
			assert.Contains(t, text, "4.4", name)
			assert.Contains(t, text, version, name)
		}
		ctx := suite.Within(t)
		policy := retry.Policy{Strategy: retry.StrategyNative, Claimable: true, MaxRetries: 1}
		for name, do := range map[string]func() error{
			"NewClaimer": func() error { _, err := client.NewClaimer(ctx, conn, "orders"); return err },
			"desk.Desk.Claimer": func() error {
				_, err := suite.NewDesk(t, s, conn).Claimer(ctx, "orders")
				return err
			},
			"Policy.Claimable": func() error {
				return conn.Consume(ctx, "orders", retry.With(policy)(suite.Nop), client.ConsumerConfig{})
			},
			"PublisherConfig.Claimable": func() error {
				_, err := schedule.NewPublisher[string](ctx, conn, address.Queue("orders"), schedule.PublisherConfig{Claimable: true})
				return err
			},
			"DispatchConfig.Claimable": func() error { return schedule.Dispatch(ctx, conn, schedule.DispatchConfig{Claimable: true}) },
			"PlacementTag": func() error {
				_, err := declare.Apply(ctx, conn.Management(), suite.QueueOf(declare.QuorumQueue{Name: "placed", DeadLetter: declare.Drop(), PlacementTag: "zone"}))
				return err
			},
		} {
			err := do()
			require.Error(t, err, name)
			require.NotErrorIs(t, err, context.DeadlineExceeded, name)
			says(name, err.Error())
		}
		hopback := s.Shell(t)
		hopback.Group = "retry"
		for _, args := range [][]string{{"cancel", "orders", "4711"}, {"run-now", "orders", "4711"}, {"reschedule", "orders", "4711", "--in", "1h"}} {
			says(args[0], hopback.Run(suite.ExitNo, args...).Stderr)
		}
		for _, queue := range []string{"orders", "dead", schedule.Names{}.ClaimableQueue()} {
			assert.Zero(t, suite.Ready(t, conn, queue), "nothing was published")
		}

		// Park can say so only with a message: that is dead-lettered, and nothing is published.
		suite.Consume(t, conn, "orders", client.HandlerFunc(func(context.Context, *client.Delivery) error {
			return client.Park{Token: "payment", Until: time.Now().Add(time.Hour)}
		}), client.ConsumerConfig{})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "order")
		m := s.Peer(t).Take("dead", 1)[0]
		text, _ := m.Annotations[client.AnnotationError].(string)
		says("Park", text)
	})
}

// StrategyAuto works with every version. Where a message can't be claimed, the consumer says so, with the version.
func TestAutoSaysThatNothingIsClaimable(t *testing.T) {
	suite.ForEachBroker(t, func(t *testing.T, s *suite.Site) {
		conn, log := s.Connect(t)
		policy := retry.Policy{Strategy: retry.StrategyAuto, Claimable: true, MaxRetries: 1, Backoff: retry.Delays(100 * time.Millisecond)}
		suite.ApplyRetry(t, conn, policy, declare.QuorumQueue{Name: "orders"})
		attempts := make(chan int, 10)
		suite.Consume(t, conn, "orders", retry.With(policy)(client.HandlerFunc(func(ctx context.Context, _ *client.Delivery) error {
			attempts <- retry.Attempt(ctx)
			return errors.New("down")
		})), client.ConsumerConfig{})
		suite.Publish(t, suite.PublisherOf(t, conn, address.Queue("orders")), "order")
		assert.Equal(t, 1, suite.Await(t, attempts, "an attempt"))
		assert.Equal(t, 2, suite.Await(t, attempts, "its retry"))
		logged := log.With("Policy.Claimable has no effect", conn.Broker().Version, "4.4")
		if s.AtLeast("4.4") {
			assert.Empty(t, logged)
		} else {
			assert.Len(t, logged, 1)
		}
	})
}
