// Package schedule publishes messages that are delivered later, up to a year ahead, on
// every RabbitMQ 4.
//
//	topology, err := schedule.Topology(schedule.Names{}, "reminders")
//	_, err = declare.Apply(ctx, conn.Management(), topology)
//
//	p, err := schedule.NewPublisher[Reminder](ctx, conn, address.Queue("reminders"), schedule.PublisherConfig{})
//	scheduled, err := p.Publish(ctx, schedule.At(tomorrow), reminder)
//	scheduled, err = p.Publish(ctx, schedule.After(time.Hour), reminder)
//
// # How it works
//
// A message waits in a ladder of quorum queues. The queue of level n holds a message for
// 2ⁿ tenths of a second, and then dead-letters it, at least once, to the next level whose
// bit is set in the message's delay, the highest first. All services of a virtual host
// share one ladder of 29 levels. So a message that is due in a year waits in few queues,
// and one that is due in a second isn't behind it.
//
// From the ladder a message comes to its target in one of two ways:
//
//   - A queue that was given to [Topology] is bound to the ladder. It gets its messages
//     from the broker, and no other process is needed.
//   - All others come to a queue that [Dispatch] consumes, in any process, or in several:
//     those for an exchange, for a queue that isn't bound, and those with a ttl or a
//     priority of their own. It publishes them to their target, which is in the message,
//     and accepts them when the broker has taken them there.
//
// A message whose target is gone, or routes it nowhere, ends in the queue
// "schedule_undeliverable", with the reason. Without a Dispatch it waits in
// "schedule_dispatch". It is never dropped.
//
// # When it comes
//
// Never early by the broker's clock, which [At] is compared with. Late by the rounding, 100 ms
// within the next 100 s and 800 ms beyond, and by some milliseconds for each level that
// it passes. After a restart of the broker RabbitMQ can take 180 s more; docs/schedule.md
// says why, and which setting makes it less.
//
// # What is certain
//
// A message is delivered at least once. A restart of the broker between two levels can
// make two of one, with the same message-id; package middleware/dedupe recognises them.
// [Cancel] and the middleware [With] keep a message from its handler.
//
// A service that has PostgreSQL can schedule in its transaction instead, and cancel by
// deleting a row: see PublishAt in module outbox.
//
// # RabbitMQ's own delivery times
//
// RabbitMQ 4.3 has an annotation x-opt-delivery-time, by which a consumer can give a
// message back for later. Up to 4.3.6 it has no effect on a message that is published, so
// this package doesn't use it.
package schedule
