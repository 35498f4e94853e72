// Package hopbacktest is a RabbitMQ in memory, for tests and for development. It speaks
// AMQP 1.0 with any client, behaves like RabbitMQ 4.4.0, 4.3.6, or 4.0.5, and fails on demand.
// All data is in memory and is lost when the process stops. Don't use it in production.
//
// In a testing/synctest bubble time is virtual, so a retry after an hour takes no time at
// all:
//
//	func TestOrderIsRetried(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			broker := hopbacktest.Start(t, hopbacktest.Config{})
//			conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
//			...
//		})
//	}
//
// Start the Broker inside the bubble, and connect to it with Dial: a bubble has no real
// network.
//
// What to use when:
//
//   - [Run] tests one retry policy with one handler: it starts the broker, publishes, runs a
//     worker, and returns what happened to each message.
//   - [Start] gives a test a broker, to test a whole service.
//   - [Recorder] tests code that only publishes, without a broker.
//   - [New] and [Broker.Listen] serve other programs and clients over TCP, in real time.
//
// # Limits
//
// The broker is one process, not a cluster: a queue's leader is only a name, there are no
// replicas, and no network partitions. Streams, AMQP 0-9-1, MQTT, and plugins are missing.
// Where it differs from RabbitMQ, RabbitMQ is right.
//
// This package is stable: see docs/versions.md#stability.
package hopbacktest
