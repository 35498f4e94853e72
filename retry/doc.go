// Package retry decides what becomes of a message whose handler failed: it hops
// back to its queue later, with back-off, or ends in a dead-letter queue that
// says why. It is policy only; package client carries the decision out.
//
//	policy := retry.Policy{MaxRetries: 5, Backoff: retry.Delays(10*time.Second, time.Minute)}
//	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: "orders", DeliveryLimit: 5})
//	_, err = declare.Apply(ctx, conn.Management(), topology)
//	err = conn.Consume(ctx, "orders", retry.With(policy)(handler), client.ConsumerConfig{})
//
// # Three strategies
//
// Republish, the default, copies a failed message, with its counter raised, to the
// shared topic exchange "retry_exchange" under the routing key
//
//	delay.<milliseconds>.<queue>
//
// There one queue for each delay, shared by all work queues, holds it for that
// long and dead-letters it to "requeue_exchange", which brings it back by the
// queue's name. The original is accepted only after the copy is confirmed.
//
//	orders ──fail──▶ retry_exchange ──delay.10000.#──▶ delay_10s ──expired──▶ requeue_exchange ──*.*.orders──▶ orders
//
// DeadLetter lets the broker move the message itself, with one disposition:
//
//	orders ──rejected──▶ dead_letter_exchange ──retry, 10000──▶ hold_10s ──expired──▶ return_exchange ──orders──▶ orders
//
// Native, with RabbitMQ 4.3 and later, lets the queue hold it. Auto takes the best
// that the broker can do. With each, what is given up goes
//
//	orders ──rejected──▶ dead_letter_exchange ──▶ given_up_exchange ──orders──▶ orders.dead
//
// and Autopsy reads there why it died. Topology declares all of this.
package retry
