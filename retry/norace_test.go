//go:build !race

package retry

import "testing"

func notUnderRace(*testing.T) {}
