package inside

// decorated is what retry.With(policy)(handler) returns. Its type isn't exported, so users don't see these methods.
type decorated interface {
	InPlace() (Policy, error)
	Evidence() Names
}

// InPlace returns the policy of h, which must be retry.With(policy)(handler), for a consumer in which messages wait
// for their next attempt. Strategies and topologies aren't used, and MaxRetries has no upper limit. The error is
// that of the policy's Validate.
func InPlace[Handler comparable](h Handler) (Policy, error) { return any(h).(decorated).InPlace() }

// NamesOf returns what the names in the policy of h reveal about dead letters. h must be retry.With(policy)(handler).
// Invalid names stay unchanged.
func NamesOf[Handler comparable](h Handler) Names { return any(h).(decorated).Evidence() }
