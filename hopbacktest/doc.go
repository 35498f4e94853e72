// Package hopbacktest is a RabbitMQ in memory, for tests and for development. It speaks
// AMQP 1.0 to any client, behaves as RabbitMQ 4.3.6 or 4.0.5 does, and can be told to
// fail. It stores nothing: what is in it is gone when the process ends. Never run it in
// production.
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
// The Broker must be made inside the bubble, and connections to it come from Dial: a
// bubble has no real network. [Run] does all of this for one policy and one handler, and
// tells what became of each message.
//
// [Broker.Listen] serves other programs and other clients over TCP, in real time.
//
// # What it is not
//
// It is one process. A leader has a name, and no replicas behind it; a partition of the
// network has no counterpart. Streams, AMQP 0-9-1, MQTT and the plugins are missing.
// Wherever it and RabbitMQ differ, RabbitMQ is right.
package hopbacktest
