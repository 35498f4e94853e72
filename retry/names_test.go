package retry

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
)

func TestRoutingKeyNamesTheDelayAndTheQueue(t *testing.T) {
	t.Parallel()
	for queue, want := range map[string]string{
		"orders": "delay.10000.orders", "a.b": "delay.10000.a.b", "a..b": "delay.10000.a..b", ".": "delay.10000..",
		"a*": "delay.10000.a*", "##": "delay.10000.##", "été": "delay.10000.été", "a/b c": "delay.10000.a/b c",
	} {
		key, err := RoutingKey(10*time.Second, queue)
		require.NoError(t, err, queue)
		assert.Equal(t, want, key)
	}
}

func TestRoutingKeyRefusesWhatTheWayBackCannotName(t *testing.T) {
	t.Parallel()
	for _, queue := range []string{
		"", "*", "#", "a.*", "#.a", "a.#.b", "*.*", "a\nb", "\xff", strings.Repeat("x", 256),
		strings.Repeat("x", 255-len("delay.10000.")+1),
	} {
		_, err := RoutingKey(10*time.Second, queue)
		var bad *argument.Error
		assert.ErrorAs(t, err, &bad, "%q", queue)
	}
	key, err := RoutingKey(10*time.Second, strings.Repeat("x", 255-len("delay.10000.")))
	require.NoError(t, err)
	assert.Len(t, key, 255)
}

func TestNamesHaveTheDocumentedDefaults(t *testing.T) {
	t.Parallel()
	n, err := Names{}.withDefaults(nil)
	require.NoError(t, err)
	assert.Equal(t, Names{
		RetryExchange: "retry_exchange", RequeueExchange: "requeue_exchange", DeadLetterExchange: "dead_letter_exchange",
		GivenUpExchange: "given_up_exchange", ReturnExchange: "return_exchange", ReplayExchange: "replay_exchange", Parking: "parking", FailedQueue: "failed_queue", FailedExchange: "failed_exchange",
		DelayPrefix: "delay_", HoldPrefix: "hold_", LadderPrefix: "retry_ladder_", DeadSuffix: ".dead",
	}, n)
	assert.Equal(t, "delay_10s", n.DelayQueue(10*time.Second))
	assert.Equal(t, "delay_60s", Names{}.DelayQueue(time.Minute))
	assert.Equal(t, "delay_1500ms", n.DelayQueue(1500*time.Millisecond))
	assert.Equal(t, "hold_10s", n.HoldQueue(10*time.Second))
	assert.Equal(t, "orders.dead", Names{}.DeadLetterQueue("orders"))
	assert.Equal(t, "parking_queue", Names{}.ParkingQueue())
}

func TestPrefixBeginsAllDefaultNamesAndNoGivenOne(t *testing.T) {
	t.Parallel()
	n, err := Names{Prefix: "team-", RetryExchange: "ours"}.withDefaults(nil)
	require.NoError(t, err)
	assert.Equal(t, "ours", n.RetryExchange)
	assert.Equal(t, "team-requeue_exchange", n.RequeueExchange)
	assert.Equal(t, "team-delay_10s", Names{Prefix: "team-"}.DelayQueue(10*time.Second))
	assert.Equal(t, "team-parking_queue", Names{Prefix: "team-"}.ParkingQueue())
	assert.Equal(t, "orders.dead", Names{Prefix: "team-"}.DeadLetterQueue("orders"))

	// Two sets go side by side on one virtual host.
	p := Policy{Strategy: StrategyAuto}
	theirs, err := Topology(p, declare.QuorumQueue{Name: "a"})
	require.NoError(t, err)
	p.Names.Prefix = "team-"
	ours, err := Topology(p, declare.QuorumQueue{Name: "b"})
	require.NoError(t, err)
	_, err = declare.Merge(theirs, ours)
	require.NoError(t, err)
}

// Two things of one name would bring messages where they don't belong: an exchange
// that both returns and gives up copies each message into both queues.
func TestNamesThatCollideAreRefused(t *testing.T) {
	t.Parallel()
	for what, n := range map[string]Names{
		"return and given up":      {ReturnExchange: "x", GivenUpExchange: "x"},
		"retry and requeue":        {RetryExchange: "x", RequeueExchange: "x"},
		"a default's":              {RequeueExchange: "retry_exchange"},
		"a default's with prefix":  {Prefix: "p_", RequeueExchange: "p_retry_exchange"},
		"dead letter and given up": {DeadLetterExchange: "x", GivenUpExchange: "x"},
		"parking":                  {RequeueExchange: "lost_exchange", Parking: "lost"},
		"delay and hold":           {DelayPrefix: "wait_", HoldPrefix: "wait_"},
	} {
		for _, strategy := range []Strategy{StrategyRepublish, StrategyDeadLetter, StrategyNative, StrategyAuto} {
			err := Policy{Strategy: strategy, Names: n}.Validate()
			var bad *argument.Error
			if assert.ErrorAs(t, err, &bad, "%s, %v", what, strategy) {
				assert.True(t, strings.HasPrefix(bad.Path.String(), "Policy.Names."), bad.Path.String())
			}
		}
	}
}
