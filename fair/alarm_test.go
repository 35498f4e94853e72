package fair_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
)

// Workers that start during a memory alarm handle everything, noisy tenants, too. In an alarm that comes
// while a tenant is noisy, nothing waits for its end but the copies that were in flight.
func TestAnAlarmStopsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		s.publish(t, "noisy", 5000)
		for i := range 50 {
			s.publish(t, fmt.Sprint("quiet", i), 1)
		}
		s.broker.SetMemoryAlarm(true)
		early := s.start(t)
		time.Sleep(20 * time.Second)
		s.mu.Lock()
		handled := len(s.handled)
		s.mu.Unlock()
		assert.Greater(t, handled, 4000)
		s.broker.SetMemoryAlarm(false)
		assert.Zero(t, s.all(t))

		s.publish(t, "noisy", 5000)
		time.Sleep(time.Second)
		s.broker.SetMemoryAlarm(true)
		time.Sleep(20 * time.Second)
		s.mu.Lock()
		t.Logf("%d of %d were handled in the alarms, %d in lanes", len(s.handled), s.sent, s.lanes)
		assert.Greater(t, len(s.handled), s.sent-1000)
		s.mu.Unlock()
		s.broker.SetMemoryAlarm(false)
		assert.Zero(t, s.all(t))
		early.leave(t)
	})
}

// A lane that is missing or full holds nothing up, and nothing is lost.
func TestALaneAcceptsNothing(t *testing.T) {
	for _, fault := range []string{"missing", "full"} {
		t.Run(fault, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScene(t, hopbacktest.Config{})
				if fault == "full" {
					for i := range 4 {
						require.NoError(t, s.broker.SetPolicy("/", fmt.Sprint("full", i), hopbacktest.Policy{Pattern: fmt.Sprintf(`^orders\.bulk\.%d$`, i), Definition: map[string]any{"max-length": 1, "overflow": "reject-publish"}}))
					}
				}
				if fault == "full" { // a tenant that isn't bound: otherwise its publisher is refused
					s.cfg.Key = func(d *client.Delivery) string { return "team " + *d.Message().Properties.GroupID }
				}
				w := s.start(t)
				s.publish(t, "quiet", 1)
				assert.Zero(t, s.all(t))
				if fault == "missing" {
					for i := range 4 {
						_, err := declare.DeleteQueue(t.Context(), s.conn.Management(), fmt.Sprint("orders.bulk.", i))
						require.NoError(t, err)
					}
				}
				began := time.Now()
				s.publish(t, "noisy", 3000)
				s.all(t)
				t.Logf("it took %v; %d in lanes", time.Since(began), s.lanes)
				w.leave(t)
				assert.Zero(t, s.broker.Queue("orders.dead").Counts().Ready)
			})
		})
	}
}

// Bulk handlers that never end leave the reserve to others.
func TestTheReserveIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t, hopbacktest.Config{})
		s.cfg.Reserve = 3
		release := make(chan struct{})
		s.handle = func(_ context.Context, j job) error {
			if j.Tenant == "noisy" {
				<-release
			}
			time.Sleep(5 * time.Millisecond)
			return nil
		}
		w := s.start(t)
		s.publish(t, "noisy", 200)
		time.Sleep(time.Minute)
		assert.Equal(t, 5, s.count("noisy"), "in handlers")
		for i := range 100 {
			s.publish(t, fmt.Sprint("quiet", i), 1)
		}
		time.Sleep(time.Second)
		s.mu.Lock()
		assert.Len(t, s.handled, 100)
		s.mu.Unlock()
		close(release)
		assert.Zero(t, s.all(t))
		w.leave(t)
	})
}
