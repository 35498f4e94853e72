// Package audit compares a RabbitMQ virtual host with a topology of package declare,
// and checks it for what loses messages.
//
//   - [Plan] shows what declare.Apply would do: what it would create, what is there
//     already, and what differs, argument by argument.
//   - [Verify] checks what is live against every one of [Rules].
//   - [DeleteUnused], [DeleteQueueIf] and [DeleteExchangeIf] delete only what nobody
//     needs.
//   - [Export] and [ParseDefinitions] write and read RabbitMQ's definitions documents.
//   - [Mermaid] and [DOT] draw a topology.
//
// All of them work on a [Snapshot]. [Read] takes one of a live broker, [FromTopology]
// makes one of a topology, and [Definitions.Snapshot] one of a document. [Compare],
// [Check] and [CheckUnused] do without I/O what Plan, Verify and DeleteUnused do with
// it.
//
// Over AMQP, RabbitMQ answers for queues and bindings that the question names; it has
// no lists, and doesn't answer for exchanges and policies. Read takes those from the
// management HTTP API, see package httpapi. A result says what couldn't be read, and
// why.
package audit
