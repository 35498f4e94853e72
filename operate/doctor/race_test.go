//go:build race

package doctor_test

import "testing"

// notUnderRace skips a test that measures memory and CPU: the race detector adds some.
// make test runs it without the detector, too.
func notUnderRace(t *testing.T) { t.Skip("memory and CPU are measured without the race detector") }
