// Package wire is the server's end of AMQP 1.0 as RabbitMQ speaks it: protocol headers,
// SASL, the connection, sessions, links and their flow control. What a message or a
// request comes to is decided by package engine.
//
// A connection has two goroutines. One reads frames and carries them out, in order. The
// other takes the engine's events and writes. They share what they know of the
// connection under its mutex, which is never held while one of them waits: waits are for
// channels and timers, so a server stands in testing/synctest. The engine never calls
// out, so it may be called with the mutex held.
//
// Frames are written into a buffer, which leaves as one write. Confirmations that leave
// together are joined into ranges.
//
// # Limits
//
// No client can make the server hold more than this: a frame of 8 KiB
// before its open frame and of MaxFrameSize behind it; MaxPartial bytes of messages that
// have begun and not ended; MaxAttached bytes of attach frames and delivery tags; MaxHeld
// of both, together with all other clients; MaxSessions sessions with MaxLinks links each; of each link
// 256 deliveries that wait for the session's window; and maxOut bytes that it doesn't
// read, behind which the server reads no more of it.
package wire
