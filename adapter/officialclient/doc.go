// Package officialclient runs hopback's handlers and decorators on RabbitMQ's own Go
// client, github.com/rabbitmq/rabbitmq-amqp-go-client. It is for teams that already use
// that client:
//
//	env := rabbitmqamqp.NewEnvironment("amqp://...", nil)
//	charge := retry.With(policy)(client.JSON(func(ctx context.Context, o Order) error { ... }))
//	err := officialclient.Consume(ctx, env.NewConnection, "orders", charge, officialclient.Config{Concurrency: 16})
//
// [Consume] makes connections of its own and replaces them when they are lost. [Serve]
// uses a consumer that the caller has made.
//
// The package is a module of its own, so users of the SDK alone don't depend on the
// official client.
//
// # The same as on hopback's own consumer
//
// The outcome of a handler follows the rules of [client.Outcome]. A forwarded copy is
// sent on a link for its address, so the sender's To property stays. The original is
// accepted only after the broker has accepted the copy. The handler's slot is free
// meanwhile. A panic dead-letters the message. Annotations that would poison the message
// are refused. Consumers of both kinds may share a queue.
//
// # What differs
//
// The reason for each difference is a limit of the official client, version 1.0.0:
//
//   - It can't send "modified" with delivery-failed for a message that stays in its
//     queue. Its RequeueWithAnnotations sends delivery-failed=false, which RabbitMQ 4.3
//     doesn't count toward the delivery limit, so a failing message would come back for
//     ever. The adapter counts failures itself, in the annotation [AnnotationFailures],
//     and dead-letters at [Config.FailureLimit] with [ReasonFailureLimit].
//   - Its DiscardWithAnnotations always sends delivery-failed=true, so a dead letter's
//     delivery count is one too high. With retry.StrategyDeadLetter each retry therefore
//     counts toward the queue's delivery limit. Give the queue a limit above the number
//     of retries, or use retry.StrategyRepublish.
//   - It can't take back credit. While a drain waits for handlers, up to Config.Prefetch
//     messages wait with this consumer. They go back to the queue when its link closes.
//     RabbitMQ 4.0 counts that toward their delivery limit, 4.3 doesn't.
//   - [client.ControlFrom] finds nothing in a handler's ctx, so middleware can't pause
//     this consumer.
//   - It doesn't report that RabbitMQ 4.3 has taken a message back from a handler that
//     exceeds the consumer timeout (30 minutes by default). That message is delivered
//     elsewhere, and the consumer receives nothing more until the handler returns. Keep
//     handlers well below the timeout, for example with [client.Timeout].
//
// # Faults of the official client that it guards against
//
// Each of these was seen with version 1.0.0, and has a test here or in the folder
// integration:
//
//   - All links of a connection share one session. RabbitMQ 4.0 ends it when one attach
//     names something missing, and the connection's State stays open. So the adapter
//     consumes and forwards on two connections, tries a new address on a third one first,
//     and doesn't rely on State.
//   - A link or a session that ends by itself isn't rebuilt, and Receive then returns
//     errors without a pause. Consume replaces the connection at the first error, with
//     back-off and without limit. Serve waits or gives up, as its documentation says.
//   - A consumer whose attach failed is attached after the next recovery, and receives
//     messages that nobody reads. Consume closes every connection on which anything has
//     failed, so there is nothing to recover.
//   - Publish returns a nil error for a message that was released or rejected. The
//     adapter checks the outcome: only "accepted" is a success.
//   - Publish gives a message without a header the priority 0, which RabbitMQ 4.3 ranks
//     below messages without a priority. So copies always have a header.
//   - Receive panics on a message whose annotation x-stream-offset isn't a long, and any
//     publisher can set that. See [Consume] for what happens to such a message.
//   - The settlement calls panic on an annotation key of one byte.
package officialclient
