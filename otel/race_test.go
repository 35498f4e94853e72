//go:build race

package otel_test

// raced says that the race detector makes allocations of its own.
const raced = true
