//go:build race

package hopbacktest_test

const underRace = true
