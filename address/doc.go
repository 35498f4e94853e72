// Package address builds and parses the addresses of queues and exchanges in RabbitMQ 4 over
// AMQP 1.0 (address format v2):
//
//	/queues/:queue                    send to, or receive from, a queue
//	/exchanges/:exchange/:routing-key send to an exchange
//	/exchanges/:exchange              the same, with the empty routing key
//
// Pass plain names to [Queue] and [Exchange]; they are percent-encoded for you, so a name may
// contain any character, including a slash. An [Address] is a value: compare it with ==, or use
// it as a map key. The package does no I/O, and everything in it is safe for concurrent use.
//
// # Which addresses are invalid
//
// [Address.Validate], [Address.Build], and [Parse] return an *[argument.Error] for an address
// that the broker would refuse, and for one that it would accept but no other tool could use. On
// RabbitMQ 4.0, one invalid address ends the whole session, with all other links on it.
//
// The rules, checked with RabbitMQ 4.0 and 4.3:
//
//   - A name isn't empty, and is valid UTF-8. Declaring a queue with any other name ends the
//     session.
//   - A name contains no carriage return and no line feed: such a queue or exchange can't be
//     declared. All other control characters work, including NUL.
//   - The name of a queue or exchange has at most 255 bytes, a routing key at most 4,096. A
//     routing key may be empty and may contain a line break.
//   - The default exchange has no address, neither as "" nor as "amq.default". Use [Queue].
//   - "." and ".." are valid here. Package declare refuses them, because they are steps in the
//     paths of the broker's management node.
//
// This package is stable: see docs/versions.md#stability.
package address
