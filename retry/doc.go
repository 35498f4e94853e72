// Package retry adds delayed retries to a message handler. When the handler returns an error, the
// message comes back after a delay. When its retries are used up, it goes to a dead-letter queue,
// with the reason and the history of its failures.
//
// Declare the queues, wrap the handler with [With], and consume:
//
//	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10*time.Second, time.Minute)}
//	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
//	_, err = declare.Apply(ctx, conn.Management(), topology)
//	err = conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{})
//
// A [Policy] decides what is retried, how often, and after which delay. The handler can overrule
// it for one message with [Permanent], [After], [Snooze], or [Discard].
//
// # Strategies
//
// The [Strategy] decides where a message waits. [StrategyRepublish] is the default. It publishes
// a copy of the failed message to the topic exchange "retry_exchange". The copy carries the
// number of retries and has this routing key:
//
//	delay.<milliseconds>.<queue>
//
// All work queues share one delay queue for each delay. After the delay, the broker dead-letters
// the copy to "requeue_exchange", which routes it back to its work queue. hopback acknowledges
// the original only after the broker has confirmed the copy.
//
//	orders ──fail──▶ retry_exchange ──delay.10000.#──▶ delay_10s ──expired──▶ requeue_exchange ──*.*.orders──▶ orders
//
// With [StrategyDeadLetter], the broker moves the message itself, without a copy:
//
//	orders ──rejected──▶ dead_letter_exchange ──retry, 10000──▶ hold_10s ──expired──▶ return_exchange ──orders──▶ orders
//
// With [StrategyNative], the work queue itself holds the message. This needs RabbitMQ 4.3 or
// later. [StrategyAuto] chooses one of the three when the consumer starts.
//
// With every strategy, a message that isn't retried any more goes to a dead-letter queue.
// [DeadLetterOf] reads the reason from it.
//
//	orders ──rejected──▶ dead_letter_exchange ──▶ given_up_exchange ──orders──▶ orders.dead
//
// [Topology] returns all these queues, exchanges, and bindings.
//
// # Workers in other languages
//
// [Central] adds retries to workers that only reject messages, in any language. It consumes the
// failed queue, which the work queues dead-letter to, and has the broker move each message to a
// delay queue:
//
//	orders ──rejected──▶ failed_queue ──▶ Central ──▶ failed_exchange ──▶ hold_10s ──expired──▶ failed_exchange ──▶ orders
//
// This package is stable: see docs/versions.md#stability.
package retry
