//go:build race

package hopbackotel_test

// raced reports that the race detector is on, which makes additional allocations.
const raced = true
