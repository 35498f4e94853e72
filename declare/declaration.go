package declare

// Declaration is the request that declares one exchange, queue or binding.
type Declaration struct {
	Resource Resource
	// Method and Path are what [Requester] takes, such as "PUT" and "/queues/orders".
	Method, Path string
	// Body is what the broker stores. That of an exchange has "type", "durable",
	// "auto_delete", "internal" and "arguments"; that of a queue "durable",
	// "exclusive", "auto_delete" and "arguments"; that of a binding "source",
	// "destination_queue" or "destination_exchange", "binding_key" and "arguments".
	// "arguments" is a map[string]any whose values are string, bool, int64, float64,
	// nil or []any of these.
	Body map[string]any
}

// Declarations returns the requests of [Apply], in its order: exchanges, queues, bindings,
// each one once. It sends nothing and validates nothing: see [Topology.Validate]. A nil
// queue is left out. The maps are the caller's own.
func (t Topology) Declarations() []Declaration {
	p := t.plan()
	return append(append(p.exchanges, p.queues...), p.bindings...)
}

// Differs compares d with what exists. found has the fields of [Declaration.Body].
// The result is nil if they are the same, and otherwise the ErrConflict of [Apply],
// with Differences and Remedies.
func (d Declaration) Differs(found map[string]any) *Error {
	differences := conflicts(d.Body, found)
	if len(differences) == 0 {
		return nil
	}
	return &Error{
		Op: opDeclare, Resource: d.Resource, Method: d.Method, Path: d.Path, Reason: ErrConflict,
		Conflict: &differences[0], Differences: differences, Remedies: remedies(d.Resource.Kind, differences),
	}
}
