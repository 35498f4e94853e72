// Package audit compares a RabbitMQ virtual host with a topology of package declare, and finds
// configuration that loses messages.
//
//   - [Compare] shows what [declare.Apply] would do: what it would create, what exists, and what
//     differs, argument by argument.
//   - [Check] and [CheckOwn] check a virtual host against all [Rules].
//   - [DeleteUnused] and [DeleteQueueIf] delete only what nobody needs.
//   - [Export] and [ParseDefinitions] write and read RabbitMQ's definitions documents.
//   - [Snapshot.Mermaid] and [Snapshot.DOT] draw a topology.
//
// All of them work on a [Snapshot]. [Read] takes one of a live broker, [FromTopology] makes one
// from a topology, and [Definitions.Snapshot] one from a document.
//
// Over AMQP, RabbitMQ only describes queues and bindings that the request names. It can't list
// queues, and can't describe exchanges and policies. [Read] takes those from the management HTTP
// API: see package declare/httpapi. A result lists what couldn't be read, and why.
//
// This package is a preview: a minor version may change its names. See docs/stability.md.
package audit
