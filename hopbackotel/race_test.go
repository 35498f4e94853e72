//go:build race

package hopbackotel_test

// raced says that the race detector makes allocations of its own.
const raced = true
