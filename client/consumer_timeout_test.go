package client

import (
	"testing"
	"time"

	"github.com/Azure/go-amqp"
	"github.com/stretchr/testify/assert"

	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/link/linktest"
)

// Deliveries that are revoked together show the timeout once.
func TestTheConsumerTimeoutIsNotLearnedFromOnePause(t *testing.T) {
	l := &timeouts{workers: &workerSet{}}
	now := time.Now()
	for i := range 64 {
		l.learn(now.Add(-time.Second), now.Add(time.Duration(i)*time.Millisecond))
	}
	assert.Zero(t, l.limit.Load())
	l.learn(now.Add(time.Second), now.Add(2*time.Second))
	assert.Equal(t, time.Second, time.Duration(l.limit.Load()).Round(100*time.Millisecond))
	l.end()
}

// A message that RabbitMQ 4.3 has delivered very often, without a failure, is handled alone.
func TestAMessageThatWasAcquiredVeryOftenIsASuspect(t *testing.T) {
	for _, c := range []struct {
		acquired int64
		failed   uint32
		known    int64
		later    bool
		want     bool
	}{
		{acquired: 0}, {acquired: poisonAcquired - 1}, {acquired: poisonAcquired, want: true},
		{acquired: poisonAcquired + 1, failed: 2, known: 2}, {acquired: poisonAcquired + 2, failed: 2, known: 2, want: true},
		{acquired: 1000, later: true},
	} {
		m := linktest.WithID("m")
		m.Header.DeliveryCount = c.failed
		m.Annotations = amqp.Annotations{annotationAcquired: c.acquired, annotation.KnownCount: c.known}
		if c.later {
			m.Annotations[annotation.DeliveryTime] = int64(1)
		}
		assert.Equal(t, c.want, poison(&delivery{Delivery: Delivery{message: m}}), "%+v", c)
	}
}
