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
// answer is refused ([DeadLetterTarget], [Drop]), and dead-lettering is at least once
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
// # Beyond this package
//
// Package audit compares and checks: its Plan shows what [Apply] would do, its Verify
// finds what loses messages or holds them for ever. It also reads and writes
// RabbitMQ's definitions documents and draws topologies. Package migrate moves a
// queue's messages to a new queue. Package httpapi reads the management HTTP API.
//
// # No I/O of its own
//
// Requests go through a [Requester], which a client connection's management
// satisfies. Values may be shared and used concurrently as long as nobody changes
// them. Maps that are passed in are neither changed nor kept.
package declare
