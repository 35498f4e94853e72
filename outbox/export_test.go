package outbox

const (
	// InsertOne is the statement that writes one message.
	InsertOne = insertOne
	// LockSleep is the advisory lock that a sleeping relay holds.
	LockSleep = lockSleep
)

// Statements that a test has PostgreSQL explain.
const (
	MoveDue = moveDue
	NextDue = nextDue
)
