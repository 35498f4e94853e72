package oldbroker

// Before42 goes when RabbitMQ 4.1 is out of support.
type Before42 struct {
	// KeepsToken: an open connection takes no new OAuth 2 token.
	KeepsToken bool
	// IgnoresCC: it routes a message by its first routing key only.
	IgnoresCC bool
	// IgnoresPropertyFilters and IgnoresSQLFilters: streams apply no such filters.
	IgnoresPropertyFilters, IgnoresSQLFilters bool
	// LacksDirectReplies: replies come by a queue of the requester.
	LacksDirectReplies bool
}

func before42(atLeast func(major, minor int) bool) Before42 {
	is40, is41 := !atLeast(4, 1), !atLeast(4, 2)
	return Before42{KeepsToken: is40, IgnoresCC: is40, IgnoresPropertyFilters: is40, IgnoresSQLFilters: is41, LacksDirectReplies: is41}
}
