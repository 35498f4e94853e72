// Package engine is what stands behind the wire of hopbacktest: the semantics of
// RabbitMQ 4.3 and 4.0, in memory. It knows no sockets and no frames. It uses the types
// of internal/frames for messages, link parameters, outcomes and errors.
//
// # How the wire uses it
//
//	user, err := broker.Authenticate("PLAIN", "guest", "guest")
//	conn, err := broker.Connect(user, "/", Peer{...})
//	session := conn.Begin()
//	publisher, fault := session.OpenPublisher(attach)
//	consumer, fault := session.OpenConsumer(attach)
//	fault = publisher.Publish(deliveryID, settled, payload)
//	consumer.Flow(flow)
//	fault = session.Settle(deliveries, state)
//	reply, fault := session.Request(message)
//
// These calls never wait. Everything that the client gets later is an [Event] of its
// Connection. The events of a connection are in order. The goroutine that writes a
// connection's frames waits for Ready and takes the events that have come:
//
//	for range conn.Ready() {
//		events = conn.Take(events[:0])
//		...
//	}
//
// So nothing in the engine calls out, and nothing can hold it up.
//
// # Faults
//
// A [Fault] is an error and what ends by it: the link, the session or the connection.
// The engine has then already ended it on its side, and lets the wire say so. The same
// holds for the faults in events.
//
// # Time
//
// The engine waits by timers only, so it stands in testing/synctest. Broker.Close ends
// every timer and goroutine.
package engine
