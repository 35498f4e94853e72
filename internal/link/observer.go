package link

import "time"

// Observer is notified of what happens to a pool's connections. Its methods must not block, because they may be
// called with locks held.
type Observer interface {
	// Up reports that a connection is open, after so many attempts. down is how long it was lost; 0: it is new.
	Up(at Place, attempts int, down time.Duration)
	Lost(at Place, why error)
	// Refused reports that an attempt to open a connection failed. attempt is its number, from 1.
	Refused(at Place, attempt int, why error)
	// Blocked reports that the broker accepts no messages, and Unblocked that it accepts them again.
	Blocked(at Place)
	Unblocked(at Place, after time.Duration)
	TokenRenewed(at Place, attempts int)
	TokenRefused(at Place, attempt int, why error)
	Ended(at Place)
}

// Place identifies a connection.
type Place struct {
	Endpoint   string // for people
	Address    string // host:port
	Generation uint64 // the connection's number; 0: it was never open
	Node       string // the broker's; "": there is no connection now
}

// Place returns the connection's Place.
func (w *Wire) Place() Place {
	return Place{w.endpoint.Shown, w.endpoint.address, w.generation, w.Node}
}
