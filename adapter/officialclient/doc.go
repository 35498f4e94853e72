// Package officialclient runs hopback's handlers and decorators on RabbitMQ's
// own Go client, github.com/rabbitmq/rabbitmq-amqp-go-client, for teams that
// have it in use already:
//
//	env := rabbitmqamqp.NewEnvironment("amqp://...", nil)
//	charge := retry.With(policy)(client.JSON(func(ctx context.Context, o Order) error { ... }))
//	err := officialclient.Consume(ctx, env.NewConnection, "orders", charge, officialclient.Config{Concurrency: 16})
//
// [Consume] makes connections of its own and replaces them when they are lost.
// [Serve] runs on a consumer that the caller has made.
//
// It is a module of its own, so that users of the SDK alone don't get the
// official client and what it depends on into their go.sum.
//
// # The same as on hopback's own consumer
//
// What a handler returns is carried out by the rules of [client.Outcome]. A
// forwarded copy is sent to an address of its own link, so the sender's To
// property survives, and the original is accepted when the broker has accepted
// the copy, never before; the handler's slot is free meanwhile. A panic
// dead-letters the message. Annotations that would poison it are refused.
// Deliveries of both consumers may be mixed on one queue.
//
// # What differs
//
// All of this is due to what the official client, in version 1.0.0, offers:
//
//   - It can't send "modified" with delivery-failed for a message that stays in
//     its queue: its RequeueWithAnnotations says delivery-failed=false, which
//     RabbitMQ 4.3 doesn't count toward the delivery limit. A failing message
//     would come back for ever. So the adapter counts failures itself, in the
//     annotation [AnnotationFailures], and dead-letters at [Config.FailureLimit]
//     with [ReasonFailureLimit].
//   - Its DiscardWithAnnotations always says delivery-failed=true, so a dead
//     letter's delivery count is one higher than it would be. In the retry
//     strategy DeadLetter each retry counts toward the queue's delivery limit for
//     that reason: give the queue a limit above the number of retries, or use
//     Republish.
//   - It doesn't let credit be taken back. While a drain waits for handlers, up to
//     Config.Prefetch messages wait with this consumer; they go back when its
//     link closes. RabbitMQ 4.0 counts that toward their delivery limit, 4.3
//     doesn't.
//   - [client.ControlFrom] finds nothing in a handler, so what pauses a consumer
//     can't pause this one.
//   - It doesn't tell when RabbitMQ 4.3 takes a message back from a handler that
//     exceeds the consumer timeout (30 minutes by default). That message is
//     delivered elsewhere, and the consumer gets nothing more until the handler
//     is done. Keep handlers well below it, for instance with [client.Timeout].
//
// # What it is guarded against
//
// Each of these was seen with version 1.0.0, and has a test here or in the folder
// integration:
//
//   - All links of a connection share one session. RabbitMQ 4.0 ends it over one
//     attach to something missing, and the connection's State stays open. So
//     consuming and forwarding have a connection each, an address that wasn't
//     forwarded to before is tried on a third one first, and State isn't asked.
//   - A link or session that ends alone isn't rebuilt; Receive then returns
//     errors without a pause. Consume replaces the connection at the first error,
//     with back-off and without limit; Serve waits or gives up, see there.
//   - A consumer whose attach failed is attached after the next recovery all the
//     same, and takes messages that nobody reads. Consume closes a connection on
//     which anything has failed, so recovery has nothing to act on.
//   - Publish returns a nil error for a message that was released or rejected:
//     the outcome is looked at, and only "accepted" counts.
//   - Publish gives a message without a header the priority 0, which RabbitMQ
//     4.3 ranks below those with none: copies have a header always.
//   - Receive panics on a message whose annotation x-stream-offset isn't a long,
//     which any publisher can set. See [Consume] for what becomes of it.
//   - The settlement calls panic on an annotation key of one byte.
package officialclient
