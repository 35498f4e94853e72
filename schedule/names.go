package schedule

import (
	"strconv"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

// Names are the names of the ladder's exchanges and queues. Publishers, dispatchers and
// the topology must have the same. The zero value is the ladder that all services of a
// virtual host share.
type Names struct {
	// Prefix begins all names, for a ladder apart from others. It has at most 200 bytes.
	// Default: "", so that the names are "schedule_0" to "schedule_28", "schedule_due",
	// "schedule_dispatch" and "schedule_undeliverable".
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

// DispatchQueue returns the name of the queue that Dispatch consumes.
func (n Names) DispatchQueue() string { return n.Prefix + "schedule_dispatch" }

// UndeliverableQueue returns the name of the queue for messages whose target is gone. The
// annotations client.AnnotationReason and client.AnnotationError say why, and annotation.To
// says what the target was.
func (n Names) UndeliverableQueue() string { return n.Prefix + "schedule_undeliverable" }

// owns reports whether an address leads into the ladder.
func (n Names) owns(to address.Address) bool {
	name := to.ExchangeName()
	if to.IsQueue() {
		name = to.QueueName()
	}
	rest, ok := strings.CutPrefix(name, n.Prefix+"schedule_")
	if !ok {
		return false
	}
	switch rest {
	case "due", "dispatch", "undeliverable":
		return true
	}
	level, err := strconv.Atoi(rest)
	return err == nil && n.level(level) == name && level < levels
}

// due is the exchange where messages leave the ladder.
func (n Names) due() string { return n.Prefix + "schedule_due" }

// level is the exchange and the queue of a level; that of -1 is due.
func (n Names) level(level int) string {
	if level < 0 {
		return n.due()
	}
	return n.Prefix + "schedule_" + strconv.Itoa(level)
}
