package desk

import (
	"strings"

	"github.com/hopback/hopback/schedule"
)

// recurringQueues is in the names of the queues with the states of groups of recurring messages; a prefix may precede it.
var recurringQueues = schedule.Names{}.TokenQueue("")

// Recurring returns the group of recurring messages whose state a queue has, by the queue's name: see
// [schedule.Names.TokenQueue]. ok is false if it isn't such a name.
func (d *Desk) Recurring(queue string) (g schedule.Group, ok bool) {
	prefix, name, ok := strings.Cut(queue, recurringQueues)
	return schedule.Group{Conn: d.conn, Name: name, Names: schedule.Names{Prefix: prefix}}, ok && name != ""
}
