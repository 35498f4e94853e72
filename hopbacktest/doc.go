// Package hopbacktest is a RabbitMQ in memory, for tests and for development. It speaks
// AMQP 1.0 to any client, behaves like RabbitMQ 4.3.6 or 4.0.5, and fails on demand. It
// keeps everything in memory, so all messages are lost when the process ends. Never run it
// in production.
//
// In a testing/synctest bubble its time is virtual, so a retry after an hour takes no
// time at all:
//
//	func TestOrderIsRetried(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			broker := hopbacktest.Start(t, hopbacktest.Config{})
//			conn, err := client.Connect(t.Context(), broker.URL(), client.Config{Dial: broker.Dial})
//			...
//		})
//	}
//
// Make the Broker inside the bubble, and connect to it with Dial, because a bubble has no
// real network. [Run] does all of this for one policy and one handler, and returns the fate
// of each message.
//
// [Broker.Listen] serves other programs and clients over TCP, in real time.
//
// # What it is not
//
// It is one process, not a cluster. A queue's leader is only a name, without replicas, and
// there are no network partitions. Streams, AMQP 0-9-1, MQTT and plugins are missing. Where
// it differs from RabbitMQ, RabbitMQ is right.
package hopbacktest
