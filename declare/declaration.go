package declare

// Declaration is the request that declares one exchange, queue, or binding. Use it if you send
// requests yourself; [Apply] does that for you.
type Declaration struct {
	Resource Resource
	// Method and Path are parameters of [Requester], such as "PUT" and "/queues/orders".
	Method, Path string
	// Body is what the broker stores:
	//
	//   - For an exchange: "type", "durable", "auto_delete", "internal", and "arguments".
	//   - For a queue: "durable", "exclusive", "auto_delete", and "arguments".
	//   - For a binding: "source", "destination_queue" or "destination_exchange", "binding_key",
	//     and "arguments".
	//
	// "arguments" is a map[string]any whose values are string, bool, int64, float64, nil, or
	// []any of these.
	Body map[string]any
}

// Declarations returns the requests that [Apply] sends, in its order: exchanges, queues,
// bindings, each one once. It sends nothing and validates nothing: see [Topology.Validate]. It
// leaves out a nil queue. You may change the maps.
func (t Topology) Declarations() []Declaration {
	p := t.plan()
	return append(append(p.exchanges, p.queues...), p.bindings...)
}

// Differs compares d with an existing resource. found has the fields of [Declaration.Body]. The
// result is nil if they are the same, and otherwise the [ErrConflict] that Apply would return,
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
