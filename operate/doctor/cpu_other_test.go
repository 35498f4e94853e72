//go:build !unix

package doctor_test

// cpuSeconds isn't measured here.
func cpuSeconds() float64 { return 0 }
