// Package retry decides what happens to a message whose handler failed. The message
// hops back to its queue later, with back-off, or goes to a dead-letter queue together
// with the reason. This package only decides; package client acts on the decision.
//
//	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10*time.Second, time.Minute)}
//	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
//	_, err = declare.Apply(ctx, conn.Management(), topology)
//	err = conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{})
//
// # Three strategies
//
// StrategyRepublish, the default, publishes a copy of a failed message, with its count
// of retries, to the shared topic exchange "retry_exchange" with the routing key
//
//	delay.<milliseconds>.<queue>
//
// Each delay has one queue, shared by all work queues. It holds the copy for that delay
// and dead-letters it to "requeue_exchange", which returns it by the work queue's name.
// The original is accepted only after the copy is confirmed.
//
//	orders ──fail──▶ retry_exchange ──delay.10000.#──▶ delay_10s ──expired──▶ requeue_exchange ──*.*.orders──▶ orders
//
// StrategyDeadLetter has the broker move the message itself, with one disposition:
//
//	orders ──rejected──▶ dead_letter_exchange ──retry, 10000──▶ hold_10s ──expired──▶ return_exchange ──orders──▶ orders
//
// StrategyNative has the work queue hold it, on RabbitMQ 4.3 and later. StrategyAuto
// chooses one of the three when the consumer starts. With each of them, a message that
// is given up goes to a dead-letter queue:
//
//	orders ──rejected──▶ dead_letter_exchange ──▶ given_up_exchange ──orders──▶ orders.dead
//
// # Workers of other kinds
//
// Central does the same for workers that only reject, in any language. It consumes what work
// queues dead-letter, and retries it as StrategyRepublish does:
//
//	orders ──rejected──▶ failed_queue ──▶ Central ──▶ retry_exchange ──delay.10000.#──▶ delay_10s ──expired──▶ ... ──▶ orders
//
// DeadLetterOf reads from such a message why it died. Topology returns all these queues,
// exchanges and bindings.
package retry
