// Package fair shares workers fairly among the tenants of a queue: one that publishes a million
// messages, or whose messages are slow or fail, doesn't delay the others.
//
//	orders := fair.Queue{Name: "orders"}
//	topology, err := orders.Topology(policy, declare.QuorumQueue{})
//	...
//	publisher, err := client.NewPublisher[Order](ctx, conn, address.Address{}, client.PublisherConfig{})
//	err = publisher.Publish(ctx, order, orders.To(order.Customer))
//	...
//	err = fair.Consume(ctx, conn, orders, client.JSON(handle), fair.Config{Retry: policy})
//
// A tenant is a customer, a team, or anything else that has a name. There can be any number of tenants
// and of workers, and neither are configured anywhere. It needs RabbitMQ 4.3 or later.
//
// # The path of a message
//
//	orders.in ──▶ orders.sort.0 ──▶ … ──no binding──▶ orders.rest ──▶ orders
//	                   │                                                │
//	           tenants bound here                       sieve: noisy tenants, by a confirmed copy
//	                   ▼                                                │
//	             orders.bulk.0 ◀────────────────────────────────────────┘
//
// All workers consume from the main queue and from its lanes, orders.bulk.0 to orders.bulk.3. A
// worker has [Config.Concurrency] slots for handlers. A quiet tenant gets the next free slot. A
// noisy one gets a slot that nobody else needs; otherwise the worker moves its message to a
// lane. Lanes take turns at the slots that quiet tenants leave.
//
// When a worker has moved many messages of a tenant, it binds the tenant's name to its lane, so
// that RabbitMQ routes further ones there without a move. When the tenant is quiet again, a worker
// removes the binding. These bindings are the only state. If a worker leaves one behind, the
// tenant's messages pass its lane, which does no harm.
//
// # Who is noisy
//
// Each worker estimates by itself what each tenant demands: the number of its messages, times how
// long its handlers take. If all tenants together demand more than there are slots, those that
// demand more than their fair share are noisy. The fair share is what remains for each when the
// smaller demands are met. A tenant is noisy at once if the worker holds three of its messages.
// Being noisy costs nothing while slots are free, and ends 2 s after the last message in a lane.
//
// # What is promised
//
//   - No message is lost, and each is handled at least once. A message moves at most once, and is
//     acknowledged after its copy is confirmed. A worker that crashes in between leaves both.
//   - Retries, dead letters, and replays keep the tenant. A retry returns to the lane that it comes
//     from. The main queue and its lanes share a dead-letter queue.
//   - There is no order, neither among tenants nor within one.
//
// If a lane is full or missing, or the broker has a memory or disk alarm, workers handle
// everything from the main queue.
//
// # Limits
//
//   - A worker needs two session slots for the main queue and two for each lane.
//   - A publisher that addresses the main queue itself sets the tenant as the message's group-id.
//     Workers move its messages to lanes, but RabbitMQ never routes them there.
//   - Sum the main queue and its lanes when you scale by queue length.
//   - A tenant with many names is many tenants.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package fair
