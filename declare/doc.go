// Package declare describes RabbitMQ topologies as Go values and declares them on a broker. A
// topology is a set of exchanges, queues, and bindings.
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
// For work queues with delayed retries, let package retry build the topology.
//
// # Nothing is dropped unless you say so
//
// By default, RabbitMQ drops a message that is rejected, that expires, or that was redelivered 20
// times. A queue with a dead-letter exchange publishes such messages there, but without waiting
// for a confirmation. This package refuses a queue that doesn't say where its dead letters go
// ([DeadLetterTarget], [Drop]). Dead-lettering is at least once unless you set
// [DeadLetterTarget.AtMostOnce].
//
// # Validated before it is sent
//
// The broker silently accepts unknown arguments and arguments of a wrong type. A delivery limit
// that is sent as a string means "unlimited" on one version and "20" on another. So arguments are
// typed fields, and everything is validated before anything is sent. If your input is invalid,
// the error is an *[argument.Error]. If the broker refuses a request, it is an *[Error].
//
// # Related packages
//
//   - Package operate/audit compares and checks: its Compare shows what [Apply] would do, and its
//     Check finds configuration that loses messages or blocks them permanently. It also reads and
//     writes RabbitMQ's definitions documents, and draws topologies.
//   - Package operate/migrate moves a queue's messages to a new queue.
//   - Package operate/httpapi reads the management HTTP API.
//
// # Concurrency and I/O
//
// Requests go through a [Requester]; the Management of a client connection is one. Values may be
// shared and used concurrently as long as nobody changes them. The functions neither change nor
// keep the maps that you pass in.
//
// This package is stable: see docs/versions.md#stability.
package declare
