// Package check reads what a virtual host has, and checks it against a topology of package declare:
// it finds configuration that loses messages or blocks them.
//
//   - [Read] takes a [Snapshot] of a live broker, and [FromTopology] makes one from a topology.
//   - [Verify] and [VerifyOwn] check a snapshot by rules. Package operate/audit lists the rules, and
//     explains each.
//
// The checks that a worker of package retry makes before it starts are these rules, and
// "hopback topology verify" and "hopback doctor" run the same ones.
//
// Over AMQP, RabbitMQ only describes queues and bindings that the request names. It can't list
// queues, and can't describe exchanges and policies. Read takes those from the management HTTP
// API: see package operate/httpapi. A result lists what couldn't be read, and why.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package check

import (
	"context"

	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/rules"
)

// Snapshot is the content of a virtual host at one time: its queues, exchanges, bindings, and
// policies, the broker's Version, and the cluster's Nodes. It may be partial: Unread lists the parts
// that couldn't be read, and Refused the resources that the user may not read.
//
// Its method Effective returns a queue's arguments as policies change them, and Assume completes a
// snapshot that was read over AMQP alone.
type Snapshot = rules.Snapshot

// ExchangeInfo is the state of an exchange in a [Snapshot].
type ExchangeInfo = rules.ExchangeInfo

// UnreadPart is a part of a [Snapshot] that couldn't be read, and why. Part is "exchanges", "other
// queues", "other bindings", "policies", "nodes", "message counts", or "version".
type UnreadPart = rules.UnreadPart

// UnreadResource is a queue or a binding that couldn't be read, and why.
type UnreadResource = rules.UnreadResource

// Sources is where [Read] takes a snapshot from. AMQP answers for single queues and bindings, and
// needs no more permissions than a worker has. HTTP answers for the whole virtual host. At least one
// of them must be set.
type Sources = rules.Sources

// Reader reads the management HTTP API of one virtual host. Package operate/httpapi implements it. It
// must be safe for concurrent use. Get returns the body of a 2xx reply to a percent-encoded path below /api. Any
// other reply is an error that says what to do, and matches [declare.ErrNotFound],
// [declare.ErrForbidden], or [declare.ErrUnavailable] if it is one of those.
type Reader = rules.Reader

// Verification is the result of [Verify]: the Findings, the worst first, and the rules that were
// Skipped, which might have found more. It prints as text and marshals to JSON.
type Verification = rules.Verification

// Finding is a violation of a rule: the Rule's ID and Severity, the Resource, the Problem, and the
// Remedy.
type Finding = rules.Finding

// Skipped is a rule that [Verify] didn't run, or only in part: the part of the snapshot that it
// Needs, and Why that couldn't be read.
type Skipped = rules.Skipped

// Read takes a snapshot. It reads the whole virtual host from the HTTP API. Without src.HTTP, or
// if that fails, it reads the queues and bindings of the topology of over AMQP. The snapshot's Unread
// lists what is missing, and why.
//
// An error means that nothing could be read, or that a source failed halfway.
func Read(ctx context.Context, src Sources, of declare.Topology) (Snapshot, error) {
	return rules.Read(ctx, src, of)
}

// FromTopology returns a snapshot of a broker that has t, the exchanges of every virtual host,
// and nothing else. It doesn't validate t: see [declare.Topology.Validate].
func FromTopology(t declare.Topology) Snapshot { return rules.FromTopology(t) }

// Verify runs all rules on a snapshot. If the snapshot was read from the HTTP API, it checks the
// whole virtual host, and t may be empty. If it was read over AMQP alone, it checks t's queues
// and bindings, and the result's Skipped lists the rules that need more.
//
// waive disables rules: a rule's ID, such as "dead-letter", or a rule for a single resource as a
// finding prints it, such as "dead-letter queue \"audit\"".
func Verify(s Snapshot, t declare.Topology, waive ...string) Verification {
	return rules.Check(s, t, waive...)
}

// VerifyOwn is [Verify] for a team that shares its virtual host with others. Findings contains only
// violations at resources of t; the others are in Elsewhere. It also reports delay queues that an
// earlier version of t left behind, in Leftovers. An empty t means the whole virtual host.
func VerifyOwn(s Snapshot, t declare.Topology, waive ...string) Verification {
	return rules.CheckOwn(s, t, waive...)
}
