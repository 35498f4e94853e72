//go:build !race

package client

import "testing"

func notUnderRace(*testing.T) {}

const underRace = false
