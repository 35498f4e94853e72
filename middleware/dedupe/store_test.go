package dedupe

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// For any sequence of calls, Memory returns what a log of all calls implies.
func TestMemoryDoesWhatItsHistorySays(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			type truth struct {
				owner               string
				claimed, doneUntil  time.Time
				everDone, isClaimed bool
			}
			r := rand.New(rand.NewPCG(seed, 7))
			m := NewMemory(0)
			model := map[string]*truth{}
			for range 300 {
				key, owner := fmt.Sprint("k", r.IntN(3)), fmt.Sprint("o", r.IntN(3))
				d := time.Duration(1+r.IntN(5)) * time.Second
				x := model[key]
				if x == nil {
					x = &truth{}
					model[key] = x
				}
				now := time.Now()
				live := x.isClaimed && now.Before(x.claimed)
				done := x.everDone && now.Before(x.doneUntil)
				switch r.IntN(5) {
				case 0:
					want := StateClaimed
					switch {
					case done:
						want = StateDone
					case live && x.owner != owner:
						want = StateBusy
					default:
						x.owner, x.claimed, x.isClaimed = owner, now.Add(d), true
					}
					got, err := m.Claim(t.Context(), key, owner, d)
					require.NoError(t, err)
					require.Equal(t, want, got)
				case 1:
					want := live && x.owner == owner
					if want {
						x.claimed = now.Add(d)
					}
					got, err := m.Renew(t.Context(), key, owner, d)
					require.NoError(t, err)
					require.Equal(t, want, got)
				case 2:
					x.doneUntil, x.everDone, x.isClaimed = now.Add(d), true, false
					require.NoError(t, m.Done(t.Context(), key, owner, d))
				case 3:
					if x.owner == owner {
						x.isClaimed = false
					}
					require.NoError(t, m.Release(t.Context(), key, owner))
				case 4:
					time.Sleep(time.Duration(r.IntN(4)) * time.Second)
				}
				require.LessOrEqual(t, len(m.claims), 3)
			}
		})
	}
}
