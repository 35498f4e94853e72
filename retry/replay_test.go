package retry

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// A message that died long ago, with all its retries used up, has all of them again.
func TestReplayedMessageStartsAgain(t *testing.T) {
	t.Parallel()
	p := Policy{MaxRetries: 1, GiveUpAfter: time.Hour, Strategy: StrategyDeadLetter}
	long := time.Now().Add(-24 * time.Hour)
	m := sent()
	m.ApplicationProperties[CountProperty] = "5"
	for k, v := range planOf(t, p).history(client.NewDelivery("orders", m), errA, past{count: 5, first: long}, long) {
		m.Annotations[k] = v
	}
	m.Annotations[client.AnnotationReason] = string(ReasonExhausted)
	m.Annotations[annotation.Delay] = int64(1000)
	m.Annotations[CountProperty] = int64(5) // a worker's over AMQP 0-9-1
	m.Annotations[annotation.DeliveryTime] = long.UnixMilli()
	require.IsType(t, client.DeadLetter{}, handle(t, p, m, returns(errA)), "unchanged, it is dead-lettered again at once")

	c := evidenceOf(Names{}).Copy(m)
	require.NoError(t, client.Validate(c))
	assert.Equal(t, map[any]any{
		"x-opt-tenant": "acme", "x-opt-list": []any{int64(1)}, annotation.Exchange: "shop", annotation.RoutingKey: "k",
	}, map[any]any(c.Annotations))
	assert.NotContains(t, c.ApplicationProperties, CountProperty)
	assert.Equal(t, "acme", c.ApplicationProperties["tenant"])
	assert.Equal(t, m.Data, c.Data)
	assert.Equal(t, m.Properties, c.Properties)
	assert.Equal(t, "5", m.ApplicationProperties[CountProperty], "the dead letter is left alone")
	assert.Equal(t, DeadLetter{Exchange: "shop", RoutingKey: "k"}, DeadLetterOf(c))
	retried, ok := handle(t, p, c, returns(errA)).(client.Modify)
	require.True(t, ok)
	assert.Equal(t, int64(1), retried.Annotations[annotation.Retries])
	assert.WithinDuration(t, time.Now(), millis(notified(retried.Annotations).First), time.Minute)
	assert.Nil(t, evidenceOf(Names{}).Copy(nil))
}
