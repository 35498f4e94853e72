package client

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/link/linktest"
)

// RabbitMQ 4.4 holds a dead letter until the delivery time in it. One of a message that was claimed
// before its time must be visible at once.
func TestDeadLettersOfClaimedMessagesDontWaitForTheirTime(t *testing.T) {
	for _, c := range []struct {
		name, version string
		at            any // from now
		result        error
		want          any
	}{
		{"claimed", "4.4.0", time.Hour, DeadLetter{Reason: "bad"}, int64(0)},
		{"claimed, without a reason", "4.4.0", time.Hour, DeadLetter{}, int64(0)},
		{"its time has come", "4.4.0", -time.Hour, DeadLetter{Reason: "bad"}, nil},
		{"its time has just come, by this host's clock", "4.4.0", -time.Second, DeadLetter{Reason: "bad"}, int64(0)},
		{"a timestamp of another client", "4.4.0", func(at time.Time) any { return at }, DeadLetter{Reason: "bad"}, int64(0)},
		{"a ulong of another client", "4.4.0", func(at time.Time) any { return uint64(at.UnixMilli()) }, DeadLetter{Reason: "bad"}, int64(0)},
		{"a time without end", "4.4.0", func(time.Time) any { return uint64(1<<64 - 1) }, DeadLetter{Reason: "bad"}, int64(0)},
		{"another type", "4.4.0", "soon", DeadLetter{Reason: "bad"}, nil},
		{"no time", "4.4.0", nil, DeadLetter{Reason: "bad"}, nil},
		{"it goes back, and may exceed the delivery limit", "4.4.0", time.Hour, Modify{Failed: true}, int64(0)},
		{"it goes back", "4.4.0", time.Hour, Modify{}, nil},
		{"it fails, and has another time", "4.4.0", time.Hour, Modify{Failed: true, Annotations: map[string]any{annotation.DeliveryTime: int64(4711)}}, int64(4711)},
		{"4.3 delivers it at once", "4.3.6", time.Hour, DeadLetter{Reason: "bad"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := linktest.NewFakeBroker(t)
				b.Version = c.version
				m := linktest.WithID("m")
				m.Annotations = amqp.Annotations{annotation.DeferralToken: "t"}
				switch at := c.at.(type) {
				case time.Duration:
					m.Annotations[annotation.DeliveryTime] = time.Now().Add(at).UnixMilli()
				case func(time.Time) any:
					m.Annotations[annotation.DeliveryTime] = at(time.Now().Add(time.Hour))
				case string:
					m.Annotations[annotation.DeliveryTime] = at
				}
				b.Update(func() { b.Ready = append(b.Ready, m) })
				k := startConsumer(b, ConsumerConfig{}, returns(c.result))
				synctest.Wait()
				require.Len(t, b.History(settlements...), 1)
				settled := b.Last
				require.NoError(t, k.end())
				assert.Equal(t, c.want, settled.Annotations[annotation.DeliveryTime])
			})
		})
	}
}
