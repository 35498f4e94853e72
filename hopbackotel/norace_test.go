//go:build !race

package hopbackotel_test

const raced = false
