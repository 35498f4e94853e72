//go:build !race

package doctor_test

import "testing"

func notUnderRace(*testing.T) {}
