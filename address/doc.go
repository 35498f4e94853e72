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
// [Address.Validate], [Address.Build] and [Parse] return an *[argument.Error] for
// an address that the broker would refuse, and for one that it would accept but
// no other tool could use. On RabbitMQ 4.0 one bad address ends the whole session,
// with every other link on it.
//
// These are the rules, found on live brokers, 4.0 and 4.3:
//   - A name isn't empty, and is valid UTF-8. Declaring a queue with another name
//     ends the session.
//   - A name has no carriage return and no line feed: such a queue or exchange
//     can't be declared. Every other control character works, NUL included.
//   - A queue or exchange name is at most 255 bytes long, a routing key at
//     most 4,096. A routing key may be empty and may have a line break.
//   - The default exchange can't be named, neither as "" nor as "amq.default":
//     use [Queue].
//   - "." and ".." are valid here. Package declare refuses them: they are steps in
//     the paths of the broker's management node.
package address
