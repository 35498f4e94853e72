package fair_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/explore"
)

// size is how large a storm is.
type size struct{ tenants, messages, workers, strikes int }

// Workers join, leave, and die while tenants publish bursts, and some messages fail at first. Nothing is
// lost, and in the end no tenant is bound to a lane. HOPBACK_LONG=1 makes it 20 times as long.
func TestNothingIsLostInAStorm(t *testing.T) {
	n := size{tenants: 1000, messages: 40_000, workers: 12, strikes: 60}
	if explore.UnderRace {
		n = size{tenants: 300, messages: 10_000, workers: 8, strikes: 20}
	}
	if long {
		n = size{tenants: 1000, messages: 1_000_000, workers: 50, strikes: 500}
	}
	seed := rand.Uint64()
	t.Logf("seed %d, %+v", seed, n)
	synctest.Test(t, func(t *testing.T) { storm(t, n, rand.New(rand.NewPCG(seed, 0))) })
}

func storm(t *testing.T, n size, r *rand.Rand) {
	s := newScene(t, hopbacktest.Config{MaxEvents: -1})
	s.handle = func(ctx context.Context, j job) error {
		time.Sleep(time.Duration(1+j.N%20) * time.Millisecond)
		if j.N%50 == 0 && firstAttempt(ctx) {
			return errors.New("busy")
		}
		return nil
	}
	var workers []*worker
	for range n.workers / 2 {
		workers = append(workers, s.start(t))
	}
	counts := map[string]int{}
	published, strikes := 0, 0
	for published < n.messages || strikes < n.strikes {
		if published < n.messages {
			burst := 1 + r.IntN(3)
			if r.IntN(10) == 0 {
				burst = 1 + r.IntN(2*n.messages/200)
			}
			burst = min(burst, n.messages-published)
			s.publish(t, fmt.Sprint("tenant", int(r.ExpFloat64()*float64(n.tenants)/5)%n.tenants), burst)
			published += burst
		}
		if published*n.strikes >= strikes*n.messages && strikes < n.strikes {
			strikes++
			i := 0
			if len(workers) > 0 {
				i = r.IntN(len(workers))
			}
			switch x := r.IntN(3); {
			case x == 0 && len(workers) < n.workers || len(workers) < 2:
				workers = append(workers, s.start(t))
				counts["joins"]++
			case x == 1:
				workers[i].leave(t)
				workers = slices.Delete(workers, i, i+1)
				counts["leaves"]++
			default:
				workers[i].kill()
				workers = slices.Delete(workers, i, i+1)
				counts["kills"]++
			}
		}
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
	}
	for len(workers) < n.workers/2 {
		workers = append(workers, s.start(t))
	}
	twice := s.all(t)
	t.Logf("%d published, 0 lost, %d twice, %d copies, %d in lanes; %v", published, twice, s.moved, s.lanes, counts)
	assert.Positive(t, s.moved)
	assert.Positive(t, s.lanes)
	s.unbound(t, n.tenants)
	for _, w := range workers {
		w.leave(t)
	}
	for _, q := range []string{"orders.dead", "parking_queue"} {
		assert.Zero(t, s.broker.Queue(q).Counts().Ready, q)
	}
}

// unbound waits until no tenant is bound to a lane.
func (s *scene) unbound(t *testing.T, tenants int) {
	deadline := time.Now().Add(time.Minute)
	for {
		var left []string
		for i := range tenants {
			for lane := range 4 {
				b := declare.Binding{Source: fmt.Sprint("orders.sort.", lane), Queue: fmt.Sprint("orders.bulk.", lane), Key: fmt.Sprint("tenant", i)}
				found, err := declare.Bindings(t.Context(), s.conn.Management(), b)
				require.NoError(t, err)
				if len(found) > 0 {
					left = append(left, b.Key)
				}
			}
		}
		if len(left) == 0 {
			return
		}
		if !time.Now().Before(deadline) { // a worker that bound it died, and it came no more: the next message unbinds it
			t.Logf("stale: %v", left)
			for _, tenant := range left {
				s.publish(t, tenant, 1)
			}
			s.all(t)
			deadline = time.Now().Add(time.Minute)
		}
		time.Sleep(5 * time.Second)
	}
}
