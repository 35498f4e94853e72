//go:build race

package retry

import "testing"

// notUnderRace skips a test that counts allocations: the race detector adds some.
// make test runs these tests without it, too.
func notUnderRace(t *testing.T) { t.Skip("allocations are counted without the race detector") }
