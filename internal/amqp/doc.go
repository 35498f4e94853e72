// Package amqp is the AMQP 1.0 engine of hopback's clients: connections, sessions, senders and
// receivers, on the codec of package frames. It sends and receives messages as encoded bytes
// and knows nothing of their sections.
//
// A connection has two goroutines, and sessions and links have none:
//
//   - the reader decodes frames, moves the state of sessions and links, and calls the
//     connection's callbacks: answers to messages, deliveries, ends of links. All callbacks of
//     a connection run on this goroutine, one at a time, in the order of the frames. They must
//     not block. They may call any method that doesn't wait for the broker.
//   - the writer writes what has gathered in one buffer. A sender encodes into that buffer
//     under the connection's lock and returns.
//
// Nothing is polled: the reader passes on each answer and each delivery when it comes.
// Settlements of neighboring deliveries with the same outcome leave as one range.
//
// # What a peer can do
//
// Nothing that a peer sends makes this package panic, block or hold memory without bound. A
// violation of the protocol costs as little as it can: a link whose peer exceeds its credit or
// the message size is detached, a session whose peer exceeds its window or uses unknown handles
// is ended, and a connection with an undecodable frame is closed. What that costs is in [Error].
//
// # What is certain
//
// A [Sending] gets exactly one [Answer]. If that has an outcome, it is the peer's. If it has an
// error, Answer.Sent says whether the peer may have the message. A settlement is written before
// the detach, end or close that follows it. The peer never confirms one.
package amqp
