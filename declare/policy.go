package declare

// Policy sets arguments of all queues or exchanges whose name matches. It can
// change the limits of a live queue.
type Policy struct {
	VHost string `json:"vhost,omitempty"`
	Name  string `json:"name"`
	// Pattern is a regular expression. It matches anywhere in the name.
	Pattern string `json:"pattern"`
	// ApplyTo is "all", "queues", "classic_queues", "quorum_queues", "streams"
	// or "exchanges"; empty is "all".
	ApplyTo string `json:"apply-to"`
	// Priority decides between policies that match: only the one with the highest
	// applies.
	Priority int64 `json:"priority"`
	// Definition has the arguments without their "x-", such as "message-ttl".
	Definition map[string]any `json:"definition"`
	// Operator marks an operator policy. RabbitMQ merges it over the users'
	// policies.
	Operator bool `json:"operator,omitempty"`
}
