//go:build race

package client

import "testing"

// notUnderRace skips a test that counts allocations: the race detector makes some of
// its own. tools/test.sh runs these tests without it.
func notUnderRace(t *testing.T) { t.Skip("allocations are counted without the race detector") }

const underRace = true
