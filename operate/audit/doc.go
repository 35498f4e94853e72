// Package audit compares a RabbitMQ virtual host with a topology of package declare, and finds
// configuration that loses messages.
//
//   - [Compare] shows what [declare.Apply] would do: what it would create, what exists, and what
//     differs, argument by argument.
//   - [Rules] and [ExamineRules] list what check.Verify and the doctor look for, and explain it.
//   - [DeleteUnused] and [DeleteQueueIf] delete only what nobody needs.
//   - [Export] and [ParseDefinitions] write and read RabbitMQ's definitions documents.
//   - [Mermaid] and [DOT] draw a topology.
//
// All of them work on a [check.Snapshot]. [check.Read] takes one of a live broker,
// [check.FromTopology] makes one from a topology, and [Definitions.Snapshot] one from a document.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package audit
