package declare

// Policy is a RabbitMQ policy: it sets arguments of all queues or exchanges whose name matches.
// Use it to change the limits of a live queue.
type Policy struct {
	VHost string `json:"vhost,omitempty"`
	Name  string `json:"name"`
	// Pattern is a regular expression. It matches anywhere in the name.
	Pattern string `json:"pattern"`
	// ApplyTo is "all", "queues", "classic_queues", "quorum_queues", "streams", or "exchanges".
	// Default: "", which means "all".
	ApplyTo string `json:"apply-to"`
	// Priority decides between matching policies: only the one with the highest priority applies.
	Priority int64 `json:"priority"`
	// Definition contains the arguments without their "x-", such as "message-ttl".
	Definition map[string]any `json:"definition"`
	// Operator marks an operator policy, which RabbitMQ merges over the users' policies.
	Operator bool `json:"operator,omitempty"`
}
