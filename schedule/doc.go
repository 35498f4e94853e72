// Package schedule publishes messages that are delivered later, up to a year ahead. It works on
// every RabbitMQ 4, without plugins. Use it for reminders, timeouts, and other messages with a
// due time; for retries, use package retry.
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
// A message waits in a ladder of 29 quorum queues, which all services of a virtual host share.
// The queue of level n delays a message for 2ⁿ tenths of a second. Then the broker dead-letters
// the message, at least once, to the next lower level that its delay needs. So a message passes
// few queues, and one that is due in a second doesn't wait behind one that is due in a year.
//
// From the ladder, a message reaches its target in one of two ways:
//
//   - A queue that you passed to [Topology] is bound to the ladder, and gets its messages from
//     the broker. No other process is needed.
//   - All other messages go to a queue that [Dispatch] consumes, in one or more of your
//     processes. These are messages to an exchange, to a queue that isn't bound, and messages
//     with a ttl or a priority. Dispatch publishes each one to its target, and acknowledges it
//     once the broker has accepted it there.
//
// No message is dropped. If the target of a message is gone, or routes it to no queue, the
// message ends up in the queue "schedule_undeliverable", with the reason. If no Dispatch is
// running, messages for it wait in "schedule_dispatch".
//
// # Precision
//
// A message is never early by the broker's clock. It can be late: by rounding, up to 100 ms for
// delays up to 100 s and 800 ms beyond, plus some milliseconds for each level. After a restart of
// the broker, RabbitMQ can take 180 s more; docs/schedule.md explains why, and which setting
// shortens it.
//
// # Guarantees
//
// A message is delivered at least once. A restart of the broker between two levels can duplicate
// a message. Both copies have the same message-id, so package middleware/dedupe recognizes them.
//
// [Cancel] and the middleware [With] keep a message from its handler.
//
// # Recurring messages
//
// A [Group] publishes messages at recurring times, each once per time. Its state is a single message
// in a queue, the token. When something is due, a worker takes the token, publishes, waits for the
// confirms, and returns the token with the time up to which everything is published. Until then the
// broker gives the token to nobody else. Between times it lies in the queue, where [Group.List] and
// [Group.Pause] find it. A worker that crashes leaves the token unchanged, so the next one publishes
// again, with the same message-ids.
//
// # Alternatives
//
// A service with PostgreSQL can schedule a message in its transaction, and cancel it there: see
// PublishAt in package postgres/outbox.
//
// # RabbitMQ 4.4
//
// Quorum queues of RabbitMQ 4.4 hold a published message until the time in its annotation
// x-opt-delivery-time. The publisher uses that for messages to such a queue, and needs no ladder
// for them: they arrive within milliseconds of their time. See [PublisherConfig].Ladder, and
// docs/schedule.md for what still takes the ladder. Up to RabbitMQ 4.3 the annotation has no effect
// on a published message.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package schedule
