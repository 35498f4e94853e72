package differ

import (
	"strings"
	"sync/atomic"
)

// knownDifference is one that stays, and why.
type knownDifference struct {
	version, reason string
	// shows is a sequence that still shows it, in its last operation.
	shows sequence
	// is says whether a difference in an operation is this one.
	is func(op operation, memory, real string) bool

	met atomic.Int64
}

var knownDifferences = []*knownDifference{
	{
		version: "4.0.5",
		reason:  "RabbitMQ 4.0 still takes addresses of version 1; the broker in memory doesn't",
		shows:   sequence{send{Link: "s0", On: "c0.0", To: "nonsense"}},
		is: func(op operation, _, _ string) bool {
			switch op := op.(type) {
			case send:
				return !op.Anonymous && !versionTwo(op.To)
			case receive:
				return !versionTwo(op.From) || strings.HasPrefix(op.From, "/exchanges/")
			}
			return false
		},
	},
}

func versionTwo(address string) bool {
	for _, prefix := range []string{"/queues/", "/exchanges/"} {
		if rest, ok := strings.CutPrefix(address, prefix); ok && rest != "" {
			return true
		}
	}
	return false
}

// known is the known difference that a result shows, or nil.
func known(version string, r result) *knownDifference {
	if r.err != nil || r.at < 0 || r.at >= len(r.sequence) {
		return nil
	}
	for _, k := range knownDifferences {
		if k.version == version && k.is(r.sequence[r.at], strings.Join(r.memory[r.at].lines(), "\n"), strings.Join(r.real[r.at].lines(), "\n")) {
			return k
		}
	}
	return nil
}
