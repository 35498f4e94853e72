// Package declare describes a RabbitMQ topology, exchanges, queues and
// bindings, as values, and makes a broker have it.
//
//	topology := declare.Topology{
//		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.Topic}},
//		Queues: []declare.Queue{
//			declare.QuorumQueue{
//				Name:          "orders",
//				DeliveryLimit: 5,
//				DeadLetter:    declare.ToQueue("orders.dead"),
//			},
//			declare.QuorumQueue{
//				Name:          "orders.dead",
//				DeliveryLimit: declare.Unlimited,
//				DeadLetter:    declare.Drop(),
//			},
//		},
//		Bindings: []declare.Binding{{Source: "shop", Queue: "orders", Key: "order.*"}},
//	}
//	report, err := declare.Apply(ctx, conn.Management(), topology)
//
// # Nothing lost unless you say so
//
// RabbitMQ drops a message that is rejected, that expires, or that has come
// back too often (20 times, by default) unless the queue says where such
// messages go, and even then publishes them only once. Here a queue without an
// answer is refused ([DeadLetter], [Drop]), and dead-lettering is at least once
// unless [AtMostOnce] is asked for.
//
// # Checked before it is sent
//
// The broker accepts unknown and ill-typed arguments in silence: a delivery
// limit sent as a string means "unlimited" on one version and "20" on another.
// So arguments are typed fields, and everything is validated before anything
// is sent. Bad input is an *[argument.Error]; what the broker refuses, an
// *[Error].
//
// # See it, check it, hand it over
//
// [Plan] says what [Apply] would do: what is created, what is there, what differs
// argument by argument, and what can't be told. What differs is refused, never
// changed: RabbitMQ can't change a queue's arguments, and the ways out (a policy, a
// new name and a move with package migrate) are in the error.
//
// [Verify] checks what is live against every one of [Rules]: whatever loses
// messages or holds them for ever. [Export] and [ParseDefinitions] are RabbitMQ's
// own definitions documents, for operators who alone may declare. [Mermaid] and
// [DOT] draw a topology.
//
// All of them work on a [Snapshot]: of a live broker by [Read], of a [Topology] or
// of [Definitions]. Over AMQP alone a broker tells about queues and bindings that
// one can name; for the rest Read takes the HTTP API, see package httpapi. What
// couldn't be told is in the result, with the reason.
//
// # No I/O of its own
//
// Requests go through a [Requester], which a client connection's management
// satisfies, and a [Reader] for the HTTP API. Values can be shared and used concurrently as long as nobody
// changes them; maps given in are never changed and not kept.
package declare
