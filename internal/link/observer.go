package link

import "time"

// Observer hears what becomes of a pool's connections. Its methods return at once: they may be called with locks
// held.
type Observer interface {
	// Up reports a connection that is open, after so many attempts. down is how long there was none; 0: it is new.
	Up(at Place, attempts int, down time.Duration)
	Lost(at Place, why error)
	// Refused reports an attempt to open a connection that failed, by its number.
	Refused(at Place, attempt int, why error)
	// Blocked and Unblocked report that the broker takes no messages, and that it takes them again.
	Blocked(at Place)
	Unblocked(at Place, after time.Duration)
	TokenRenewed(at Place, attempts int)
	TokenRefused(at Place, attempt int, why error)
	Ended(at Place)
}

// Place says which connection something is about.
type Place struct {
	Endpoint   string // for people
	Address    string // host:port
	Generation uint64 // the connection's number; 0: it was never open
	Node       string // "": there is no connection now
}

// Place is where the connection leads to.
func (w *Wire) Place() Place {
	return Place{w.endpoint.Shown, w.endpoint.address, w.generation, w.Node}
}
