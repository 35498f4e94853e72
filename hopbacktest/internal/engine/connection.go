package engine

// Connection is a client's connection. Its methods may be called concurrently.
type Connection struct{}

// Ready has a value while there are events to take, and is closed with the connection,
// after its last event.
func (c *Connection) Ready() <-chan struct{} { return nil }

// Take appends the events that have come to events, in order, and returns them all.
func (c *Connection) Take(events []Event) []Event { return events }

// Close closes the connection at the client's wish, or since the client is gone. Its
// unsettled deliveries go back to their queues. It has no events afterwards.
func (c *Connection) Close() {}

// Blocked says whether an alarm stops publishing now: a new session's incoming window
// is 0 then.
func (c *Connection) Blocked() bool { return false }

// Begin begins a session.
func (c *Connection) Begin() *Session { return nil }
