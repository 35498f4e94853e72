package audit

import (
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/rules"
)

// Diff is the result of [Compare]: a Change for each resource of the topology. It prints as text and
// marshals to JSON.
type Diff = rules.Diff

// Change is what [declare.Apply] would do with one resource: its Kind is "create", "keep", "refuse", or "unknown".
type Change = rules.Change

// NamedSetting is a setting of a resource that [declare.Apply] would create.
type NamedSetting = rules.NamedSetting

// Compare returns what [declare.Apply] of t would do to the broker that s is a snapshot of. It
// changes nothing. Conflicts with the broker are in the Diff. If the snapshot was read without
// the HTTP API, it is unknown whether exchanges exist.
func Compare(s check.Snapshot, t declare.Topology) Diff { return rules.Compare(s, t) }
