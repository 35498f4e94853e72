//go:build !race

package hopbacktest_test

const underRace = false

const idleConsumers = 1000
