//go:build race

package client

import "testing"

// notUnderRace skips a test that counts allocations: the race detector allocates, too.
// make test runs these tests without it, too.
func notUnderRace(t *testing.T) { t.Skip("allocations are counted without the race detector") }

const underRace = true
