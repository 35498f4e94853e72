package oldbroker

// Before44 goes when RabbitMQ 4.3 is out of support.
type Before44 struct {
	// DeliversPublishedAtOnce: no queue holds a published message until its
	// x-opt-delivery-time. A dead letter counts as published.
	DeliversPublishedAtOnce bool
	// LacksTokens: messages can't be parked and claimed by tokens.
	LacksTokens bool
}

func before44(atLeast func(major, minor int) bool) Before44 {
	return Before44{!atLeast(4, 4), !atLeast(4, 4)}
}
