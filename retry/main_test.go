package retry

import (
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// epoch is when tests of pure functions take place.
var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

var errDown = errors.New("service is down")

// random is a source of randomness whose seed is printed when the test fails;
// HOPBACK_SEED repeats a run.
func random(t testing.TB) *rand.Rand {
	t.Helper()
	seed := new(maphash.Hash).Sum64()
	if text := os.Getenv("HOPBACK_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("HOPBACK_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// pick returns one of values.
func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// planOf is p's plan; p must be valid.
func planOf(t testing.TB, p Policy) *plan {
	t.Helper()
	pl, err := p.plan()
	require.NoError(t, err)
	return &pl
}
