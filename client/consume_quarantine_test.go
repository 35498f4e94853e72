package client

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/consume"
	"github.com/hopback/hopback/internal/link/linktest"
)

// quarantineModel drives a quarantine and knows what must hold of it.
type quarantineModel struct {
	t        *testing.T
	q        *consume.Quarantine
	narrow   bool
	begun    map[*consume.Delivery]bool // handed to the workers, and not settled
	admitted map[*consume.Delivery]bool // unsettled, begun or not
}

func newQuarantineModel(t *testing.T) *quarantineModel {
	m := &quarantineModel{t: t, begun: map[*consume.Delivery]bool{}, admitted: map[*consume.Delivery]bool{}}
	m.q = &consume.Quarantine{}
	m.q.Begin()
	m.narrow = true
	return m
}

// begin is told of the delivery that is to be handed on, if there is one.
func (m *quarantineModel) begin(d *consume.Delivery) {
	if d == nil {
		return
	}
	require.True(m.t, m.admitted[d], "a settled delivery must not begin")
	require.False(m.t, m.begun[d], "a delivery begins once")
	if consume.Suspect(d) {
		require.Empty(m.t, m.begun, "a suspect begins alone")
	}
	m.begun[d] = true
}

// changed is told whether narrowed has changed.
func (m *quarantineModel) changed(changed bool) {
	if changed {
		m.narrow = !m.narrow
	}
	require.Equal(m.t, m.narrow, m.q.Narrowed())
}

func (m *quarantineModel) admit(d *consume.Delivery) {
	now, changed := m.q.Admit(d)
	m.changed(changed)
	m.begin(now)
}

func (m *quarantineModel) delivery(isSuspect bool) *consume.Delivery {
	d := &consume.Delivery{Message: linktest.WithID("m")}
	if isSuspect {
		d.Message.Header.DeliveryCount = consume.SuspectAfter
	}
	m.admitted[d] = true
	return d
}

func (m *quarantineModel) settle(d *consume.Delivery) {
	delete(m.begun, d)
	delete(m.admitted, d)
	m.begin(m.q.Settled(d))
}

// anyOf returns one of set, chosen by r, or nil.
func anyOf(r *rand.Rand, set map[*consume.Delivery]bool) *consume.Delivery {
	n := 0
	var chosen *consume.Delivery
	for d := range set {
		if n++; r.IntN(n) == 0 {
			chosen = d
		}
	}
	return chosen
}

// Whatever arrives, is settled and is taken back by the broker, in any order: no
// suspect waits while nothing is in its way, and none begins beside another delivery.
func TestQuarantineUnderAnySequence(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		m := newQuarantineModel(t)
		for range 60 {
			switch r.IntN(8) {
			case 0, 1:
				m.admit(m.delivery(false))
			case 2, 3:
				m.admit(m.delivery(true))
			case 4: // a handler is done
				if d := anyOf(r, m.begun); d != nil {
					m.settle(d)
				}
			case 5: // the broker takes one back, whether it has begun or not
				if d := anyOf(r, m.admitted); d != nil {
					m.settle(d)
				}
			case 6: // or before it was admitted
				d := m.delivery(r.IntN(2) == 0)
				m.settle(d)
				if r.IntN(3) == 0 {
					m.changed(m.q.Pass(d))
				} else {
					m.admit(d)
				}
			case 7:
				d := m.delivery(r.IntN(2) == 0)
				m.changed(m.q.Pass(d))
				m.settle(d)
			}
			if len(m.begun) == 0 {
				require.Empty(t, m.admitted, "seed %d: something waits, and nothing is in its way", seed)
			}
		}
		for len(m.begun) > 0 {
			m.settle(anyOf(r, m.begun))
		}
		require.Empty(t, m.admitted, "seed %d: suspects are left", seed)
		m.admit(m.delivery(false))
		require.False(t, m.narrow, "seed %d: the link is wide again", seed)
		require.Len(t, m.begun, 1)
	}
}

// A suspect that the broker takes back while it waits is out of the way: those
// behind it are handled, and the link is wide again.
func TestSuspectThatIsTakenBackWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := linktest.NewFakeBroker(t)
		b.Publish("first")
		b.Update(func() {
			for i := range 3 {
				m := linktest.WithID(fmt.Sprintf("s%d", i))
				m.Header.DeliveryCount = consume.SuspectAfter
				b.Ready = append(b.Ready, m)
			}
		})
		k := startConsumer(b, ConsumerConfig{Concurrency: 4, Prefetch: 8}, func(_ context.Context, d *Delivery) error {
			time.Sleep(time.Minute)
			return nil
		})
		synctest.Wait()
		k.Mu.Lock()
		s := k.Current.(*consume.Stint)
		k.Mu.Unlock()
		s.LeaseEnded(2, 2)
		time.Sleep(time.Hour)
		b.Publish(linktest.Numbered("m", 8)...)
		time.Sleep(time.Hour)
		assert.ElementsMatch(t, append(linktest.Numbered("accept m", 8), "accept first", "release s0", "accept s1", "accept s2"), b.History(settlements...))
		assert.False(t, s.Quarantine.Narrowed())
		start := time.Now()
		require.NoError(t, k.end())
		assert.Less(t, time.Since(start), time.Second)
	})
}
