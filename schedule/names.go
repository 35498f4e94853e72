package schedule

import (
	"strconv"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

// Names are the names of the ladder's exchanges and queues. Publishers, Dispatch, and the
// topology must use the same ones. The zero value is the ladder that all services of a virtual
// host share.
type Names struct {
	// Prefix starts all names. Use it for a ladder separate from others. At most 200 bytes.
	// Default: "", so the names are "schedule_0" to "schedule_28", "schedule_due",
	// "schedule_dispatch", and "schedule_undeliverable".
	Prefix string
}

const maxPrefix = 200

// check checks n, which at leads to.
func (n Names) check(at argument.Path) error {
	at = at.Field("Prefix")
	if len(n.Prefix) > maxPrefix {
		return argument.At(at, argument.CodeTooLong, n.Prefix, "has more than 200 bytes", "use a short prefix, such as a team's name and an underscore")
	}
	return brokername.Check(at, n.due())
}

// DispatchQueue returns the name of the queue that [Dispatch] consumes.
func (n Names) DispatchQueue() string { return n.Prefix + "schedule_dispatch" }

// UndeliverableQueue returns the name of the queue for messages that can't be delivered. Their
// annotations client.AnnotationReason and client.AnnotationError contain the reason, and
// "x-opt-hopback-schedule-to" contains the target.
func (n Names) UndeliverableQueue() string { return n.Prefix + "schedule_undeliverable" }

// ClaimableQueue returns the name of the queue in which messages of
// [PublisherConfig].Claimable wait. Pass it to client.NewClaimer to cancel, run, or reschedule them.
func (n Names) ClaimableQueue() string { return n.Prefix + "schedule_claimable" }

// owns reports whether an address is part of the ladder.
func (n Names) owns(to address.Address) bool {
	name := to.ExchangeName()
	if to.IsQueue() {
		name = to.QueueName()
	}
	rest, ok := strings.CutPrefix(name, n.Prefix+"schedule_")
	if !ok {
		return false
	}
	if strings.HasPrefix(rest, "recurring_") || strings.HasPrefix(rest, "run_") {
		return true
	}
	switch rest {
	case "due", "dispatch", "undeliverable", "claimable":
		return true
	}
	level, err := strconv.Atoi(rest)
	return err == nil && n.ladder().Name(level) == name && level < levels
}

// due is the exchange where messages leave the ladder.
func (n Names) due() string { return n.Prefix + "schedule_due" }
