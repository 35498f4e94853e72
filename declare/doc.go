// Package declare describes RabbitMQ topologies as values and declares them on a
// broker. A topology is a set of exchanges, queues and bindings.
//
//	topology := declare.Topology{
//		Exchanges: []declare.Exchange{{Name: "shop", Type: declare.ExchangeTopic}},
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
// # Nothing is dropped unless you say so
//
// By default RabbitMQ drops a message that is rejected, that expires, or that has
// come back 20 times. A queue with a dead-letter exchange publishes such messages
// there, but only once. This package refuses a queue that doesn't say where its
// dead messages go ([DeadLetterTarget], [Drop]). Dead-lettering is at least once
// unless DeadLetterTarget.AtMostOnce is set.
//
// # Checked before it is sent
//
// The broker silently accepts unknown and ill-typed arguments. A delivery limit
// that is sent as a string means "unlimited" on one version and "20" on another.
// So arguments are typed fields, and everything is validated before anything is
// sent. Bad input is an *[argument.Error]. A refusal by the broker is an *[Error].
//
// # Beyond this package
//
// Package audit compares and checks: its Plan shows what [Apply] would do, and its
// Verify finds what loses messages or holds them for ever. It also reads and
// writes RabbitMQ's definitions documents and draws topologies. Package migrate
// moves a queue's messages to a new queue. Package httpapi reads the management
// HTTP API.
//
// # No I/O of its own
//
// Requests go through a [Requester], which a client connection's management
// satisfies. Values may be shared and used concurrently as long as nobody changes
// them. Maps that are passed in are neither changed nor kept.
package declare
