// Package link has AMQP connections with their sessions and links, and keeps them open:
//
//	Wire     one AMQP connection on the engine (internal/amqp), its sessions, senders, and receivers
//	Pool     the connections of a client.Conn: each is rebuilt when it is lost, and consumers and
//	         publishers reserve session slots on them
//
// It translates the engine's errors to those of internal/failure, and AMQP's conditions with
// internal/condition.
package link
