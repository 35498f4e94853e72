// Package stream consumes from RabbitMQ streams over AMQP 1.0.
//
// A stream keeps its messages after they were read. Each message has an offset, and a consumer
// saves the offset of the next message as its position:
//
//	err := stream.Consume(ctx, conn, "orders", client.JSON(handle), stream.Config{
//		Consumer: "billing",
//		Offsets:  &stream.FileStore{Dir: "/var/lib/billing"},
//	})
//
// Handlers are those of package client. [Consume] handles messages one at a time, in the order of
// their offsets.
//
// # Failures
//
// A stream can't requeue or dead-letter a message. So Consume calls a failing handler again, in
// place. A message that isn't retried any more stops the consumer, is skipped, or is copied to a
// queue: see [Config.Failed]. retry.With refuses a stream, but works on that queue.
//
// # Publishing and declaring
//
// To publish to a stream, use a client.Publisher with the stream's address. [FilterValue] sets
// the value that [Filter.Values] selects by. Declare a stream with declare.Stream.
//
// # Connections
//
// Each consumer has a separate connection, to the same node as its client.Conn, or to the next
// endpoint if that node doesn't serve the stream. The Conn's Stats, and so package health,
// include it. Its Config.Instrument covers each call of the handler. Its Config.OnEvent isn't
// called for the consumer.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package stream
