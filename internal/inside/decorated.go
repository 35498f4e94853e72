package inside

// decorated is a handler around which retry.With put its policy. Decorated handlers of package retry have these
// methods; their type isn't exported, so users don't see them.
type decorated interface {
	InPlace() (Policy, error)
	Evidence() Names
}

// InPlace returns the decisions of the policy of h, which is retry.With(policy)(handler). It uses only what
// decides about a failure: messages wait in the consumer, and MaxRetries has no upper limit. The error is
// that of the policy's Validate.
func InPlace[Handler comparable](h Handler) (Policy, error) { return any(h).(decorated).InPlace() }

// NamesOf returns what the names of the policy of h say of dead letters. Invalid names stay unchanged.
func NamesOf[Handler comparable](h Handler) Names { return any(h).(decorated).Evidence() }
