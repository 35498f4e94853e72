//go:build race

package hopbacktest_test

const underRace = true

// The race detector takes a megabyte or two for each consumer.
const idleConsumers = 100
