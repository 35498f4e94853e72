// Package workerclock lets tests outside of package retry give a policy another clock
// than the host's.
package workerclock

import "time"

// Set returns a copy of policy, a retry.Policy, whose workers go by now. Package retry
// sets it.
var Set func(policy any, now func() time.Time) any
