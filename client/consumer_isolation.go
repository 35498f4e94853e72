package client

import (
	"slices"

	"github.com/hopback/hopback/internal/annotation"
)

// isolation keeps a message that may crash the process from driving up the delivery counts of
// other messages. When a process crashes, RabbitMQ counts a failed delivery for every message
// that it held. So a message with two failures that no consumer has reported counts as poison,
// and is handled while nothing else on the link is unsettled. (One unreported failure is normal:
// every message of a consumer has it after its connection was lost.)
//
// A quorum queue puts returned messages at its head. So a link starts with one credit, and gets
// the rest with the first message that isn't poison. A poison message that arrives later waits
// until all others are settled. deliveries.mu guards it.
type isolation struct {
	off     bool
	probing bool // the link may have one delivery only
	// running is the poison message that is with the workers.
	running *delivery
	// others counts unsettled deliveries that aren't poison.
	others  int
	poisons []*delivery
}

// begin is called before the first delivery.
func (q *isolation) begin() {
	if !q.off {
		q.probing = true
	}
}

// admit returns the delivery to hand on now, d or none: d may be handed on later. changed
// says that probing has changed.
func (q *isolation) admit(d *delivery) (now *delivery, changed bool) {
	if q.off {
		return d, false
	}
	if !poison(d) {
		d.standing = standingOrdinary
		q.others++
		return d, q.widen()
	}
	d.standing = standingWaiting
	q.poisons = append(q.poisons, d)
	changed = !q.probing
	q.probing = true
	return q.next(), changed
}

// pass records a delivery that no worker gets. changed says that probing has changed.
func (q *isolation) pass(d *delivery) (changed bool) {
	if q.off {
		return false
	}
	d.standing = standingAside
	return q.widen()
}

// widen says whether the link may have more than one delivery again.
func (q *isolation) widen() bool {
	widen := q.probing && len(q.poisons) == 0 && q.running == nil
	if widen {
		q.probing = false
	}
	return widen
}

// settled is called for every settlement, and returns the delivery to hand on then, or
// none. d may be one that no worker has had: the broker revokes those that wait, too.
func (q *isolation) settled(d *delivery) (now *delivery) {
	if q.off {
		return nil
	}
	switch d.standing {
	case standingOrdinary:
		q.others--
	case standingWaiting:
		if i := slices.Index(q.poisons, d); i >= 0 {
			q.poisons = slices.Delete(q.poisons, i, i+1)
		}
	case standingAlone:
		q.running = nil
	}
	d.standing = standingSettled
	return q.next()
}

// next is the poison message whose turn it is.
func (q *isolation) next() *delivery {
	if q.others > 0 || q.running != nil || len(q.poisons) == 0 {
		return nil
	}
	d := q.poisons[0]
	q.poisons = slices.Delete(q.poisons, 0, 1)
	d.standing = standingAlone
	q.running = d
	return d
}

// empty returns the poison messages that wait, so that they can be returned.
func (q *isolation) empty() []*delivery {
	all := q.poisons
	q.poisons = nil
	return all
}

// count is how many wait.
func (q *isolation) count() int {
	return countUnsettled(q.poisons)
}

// poisonAfter is how many unreported failures make a message poison.
const poisonAfter = 2

// poisonAcquired is how many deliveries without a failure make a message poison. RabbitMQ 4.3
// counts them in annotationAcquired, and doesn't count a delivery that it revokes after the
// consumer timeout as a failure. Consumers that pause or stop cause some, too. A message that a
// consumer has returned for later delivery, with annotation.DeliveryTime, isn't poison: it may
// be redelivered for as long as an address accepts nothing.
const poisonAcquired = 50

// annotationAcquired is how often RabbitMQ 4.3 has delivered the message before.
const annotationAcquired = "x-acquired-count"

// poison says whether d has failed deliveries that nobody knows the reason of, or was
// delivered very often without a failure.
func poison(d *delivery) bool {
	n := d.failures()
	if acquired, _ := d.message.Annotations[annotationAcquired].(int64); acquired-int64(n) >= poisonAcquired {
		if _, later := d.message.Annotations[annotation.DeliveryTime]; !later {
			return true
		}
	}
	return annotation.Unreported(d.message) >= poisonAfter
}
