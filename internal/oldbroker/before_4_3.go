package oldbroker

// Before43 goes when RabbitMQ 4.2 is out of support.
type Before43 struct {
	// ForgetsSessionsLate: it forgets a session some time after it has sent its end.
	ForgetsSessionsLate bool
	// CountsReturns: what a consumer returns counts toward the queue's delivery limit.
	CountsReturns bool
	// LacksConsumerTimeout: a consumer of AMQP 1.0 may hold a delivery for any time.
	LacksConsumerTimeout bool
	// LacksActiveState: a single active consumer doesn't learn whether it is the active one.
	LacksActiveState bool
	// IgnoresDeliveryTime: no queue holds a message until its x-opt-delivery-time.
	IgnoresDeliveryTime bool
	// LosesSettlements: settlements may be lost when the leader of a queue moves.
	LosesSettlements bool
	// LacksStrictPriorities: quorum queues tell two priorities apart, and prefer the higher one only
	// in part.
	LacksStrictPriorities bool
}

func before43(atLeast func(major, minor int) bool) Before43 {
	old := !atLeast(4, 3)
	return Before43{old, old, old, old, old, old, old}
}
