//go:build !race

package explore

// UnderRace reports whether the race detector runs. It makes explorations ten times slower, and finds nothing more in
// the thousandth run. So those that take long try less then: everyday tests without it try everything.
const UnderRace = false
