// Package stream consumes from RabbitMQ streams over AMQP 1.0.
//
// A stream keeps its messages after they were read. Each has an offset, and a consumer
// remembers the offset that comes next:
//
//	err := stream.Consume(ctx, conn, "orders", client.JSON(handle), stream.Config{
//		Consumer: "billing",
//		Offsets:  &stream.FileStore{Dir: "/var/lib/billing"},
//	})
//
// Handlers are those of package client. Messages are handled one at a time, in the order
// of their offsets. A stream takes no message back and has no dead letters. So a handler
// that fails is called again in place, and what fails to the end stops the consumer, is
// skipped, or is copied to a queue: see Config.Failed. retry.With is refused on a
// stream. It works on that queue.
//
// To publish to a stream, use a client.Publisher with the stream's address. FilterValue
// sets the value that Filter.Values select by. Declare a stream with declare.Stream.
//
// Each consumer has a connection of its own, to where its client.Conn is connected to, or
// to the next endpoint if that doesn't serve the stream.
// It is in the Conn's Stats, and so in package health, and its Config.Instrument follows each
// call of the handler. Config.OnEvent isn't called for it.
package stream
