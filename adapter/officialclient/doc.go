// Package officialclient runs hopback's handlers and middleware on RabbitMQ's own Go client,
// github.com/rabbitmq/rabbitmq-amqp-go-client. Use it if your program already uses that client:
//
//	consumer, err := conn.NewConsumer(ctx, "orders", &rabbitmqamqp.ConsumerOptions{InitialCredits: 64})
//	charge := retry.With(policy)(client.JSON(func(ctx context.Context, o Order) error { ... }))
//	err = officialclient.Serve(ctx, own, consumer, "orders", charge, officialclient.Config{Concurrency: 16})
//
// The consumer is the official client's. The second argument of [Serve] is a connection of
// client.Connect. It carries the copies of client.Forward, so a retry copy is as safe as with
// hopback's own consumer.
//
// The package is a separate module, so other users of hopback don't depend on the official
// client.
//
// # The same as with hopback's own consumer
//
//   - The error of a handler means the same: see [client.Outcome].
//   - A forwarded copy is sent on a link for its address, so the sender's To property stays. The
//     original is acknowledged only after the broker has confirmed the copy. The handler's slot
//     is free in between.
//   - A panic dead-letters the message.
//   - Annotations that would poison the message are refused.
//   - Consumers of both kinds may share a queue.
//
// # What differs
//
// The reason for each difference is a limit of the official client, version 1.0.0:
//
//   - It can't send "modified" with delivery-failed for a message that stays in its queue. Its
//     RequeueWithAnnotations sends delivery-failed=false, which RabbitMQ 4.3 doesn't count
//     toward the delivery limit, so a failing message would be redelivered without end. So the
//     adapter counts failures itself, in the annotation x-opt-hopback-failures, and dead-letters
//     at [Config.FailureLimit] with client.ReasonFailureLimit.
//   - Its DiscardWithAnnotations always sends delivery-failed=true, so a dead letter's delivery
//     count is one too high. With retry.StrategyDeadLetter, each retry therefore counts toward
//     the queue's delivery limit. Set that limit higher than the number of retries, or use
//     retry.StrategyRepublish.
//   - It can't take back credit. While a drain waits for handlers, prefetched messages wait with
//     this consumer. They return to the queue when its link closes. RabbitMQ 4.0 counts that
//     toward their delivery limit; 4.3 doesn't.
//   - [client.ControlFrom] returns nothing for a handler's ctx, so middleware can't pause this
//     consumer.
//   - It doesn't report that RabbitMQ 4.3 has revoked a message from a handler that exceeds the
//     consumer timeout (30 minutes by default). That message is delivered elsewhere, and the
//     consumer receives nothing more until the handler returns. Keep handlers well below the
//     timeout, for example with [client.Timeout].
//
// # Bugs of the official client that it guards against
//
// Each of these was seen with version 1.0.0, and has a test here or in the folder integration:
//
//   - A link or a session that ends by itself isn't rebuilt, and Receive then returns errors
//     without a pause. [Serve] waits or returns an error.
//   - Its publisher returns a nil error for a message that was released or rejected, and gives a
//     message without a header the priority 0. So hopback publishes the copies.
//   - Receive panics on a message whose annotation x-stream-offset isn't a long, and any
//     publisher can set that. See [Serve] for what happens to such a message.
//   - The settlement calls panic on an annotation key of one byte.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package officialclient
