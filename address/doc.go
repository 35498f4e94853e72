// Package address builds and reads the addresses by which RabbitMQ 4.x names
// queues and exchanges over AMQP 1.0 (the address format v2).
//
//	/queues/:queue                    send to, or receive from, a queue
//	/exchanges/:exchange/:routing-key send to an exchange
//	/exchanges/:exchange              the same, with the empty routing key
//
// Every part is percent-encoded on its own, so a name may hold any character,
// a slash included. An [Address] is a value: make one with [Queue], [Exchange]
// or [Parse], compare it with ==, use it as a map key. Nothing in this package
// does I/O, and everything in it is safe for concurrent use.
//
// # What is refused
//
// [Address.Validate], [Address.Build] and [Parse] answer with an
// *[argument.Error] for what the broker would refuse, and for what it would
// accept but nobody could use afterwards. That matters more than it seems: on
// RabbitMQ 4.0 one bad address ends the whole session with every other link on
// it.
//
// These are the rules, found on live brokers, 4.0 and 4.3:
//   - A name isn't empty, and is valid UTF-8 (declaring a queue whose name is
//     not ends the session).
//   - A name has no carriage return and no line feed: such a queue or exchange
//     can't be declared. Every other control character works, NUL included.
//   - A queue or exchange name is at most [MaxName] bytes long, a routing key
//     at most [MaxRoutingKey]; a routing key may be empty and may hold a line
//     break.
//   - The default exchange can't be named, neither as "" nor as "amq.default":
//     use [Queue].
//   - "." and ".." are good names here, and are refused by package declare:
//     the broker's management node takes them for steps in a path.
package address
