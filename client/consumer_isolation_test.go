package client

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/internal/link/linktest"
)

// isolationModel drives an isolation and knows what must hold of it.
type isolationModel struct {
	t        *testing.T
	q        *isolation
	narrow   bool
	begun    map[*delivery]bool // handed to the workers, and not settled
	admitted map[*delivery]bool // unsettled, begun or not
}

func newIsolationModel(t *testing.T) *isolationModel {
	m := &isolationModel{t: t, begun: map[*delivery]bool{}, admitted: map[*delivery]bool{}}
	m.q = &isolation{}
	m.q.begin()
	m.narrow = true
	return m
}

// begin gets the delivery that is to be handed on, if there is one.
func (m *isolationModel) begin(d *delivery) {
	if d == nil {
		return
	}
	require.True(m.t, m.admitted[d], "a settled delivery must not begin")
	require.False(m.t, m.begun[d], "a delivery begins once")
	if poison(d) {
		require.Empty(m.t, m.begun, "a suspect begins alone")
	}
	m.begun[d] = true
}

// changed gets whether probing has changed.
func (m *isolationModel) changed(changed bool) {
	if changed {
		m.narrow = !m.narrow
	}
	require.Equal(m.t, m.narrow, m.q.probing)
}

func (m *isolationModel) admit(d *delivery) {
	now, changed := m.q.admit(d)
	m.changed(changed)
	m.begin(now)
}

func (m *isolationModel) delivery(isPoison bool) *delivery {
	d := &delivery{Delivery: Delivery{message: linktest.WithID("m")}}
	if isPoison {
		d.message.Header.DeliveryCount = poisonAfter
	}
	m.admitted[d] = true
	return d
}

func (m *isolationModel) settle(d *delivery) {
	delete(m.begun, d)
	delete(m.admitted, d)
	m.begin(m.q.settled(d))
}

// anyOf returns one of set, chosen by r, or nil.
func anyOf(r *rand.Rand, set map[*delivery]bool) *delivery {
	n := 0
	var chosen *delivery
	for d := range set {
		if n++; r.IntN(n) == 0 {
			chosen = d
		}
	}
	return chosen
}

// For any order of arrivals, settlements, and revocations: no poison message waits while nothing blocks it, and none starts next to another delivery.
func TestIsolationUnderAnySequence(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		m := newIsolationModel(t)
		for range 60 {
			switch r.IntN(7) {
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
			case 6:
				d := m.delivery(r.IntN(2) == 0)
				m.changed(m.q.pass(d))
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
