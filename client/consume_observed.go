package client

import (
	"maps"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/annotation"
)

// settling returns the disposition with what the Instrument adds to it.
func settling(o *observed, d disposition) disposition {
	s := instrument.Settlement{Kind: instrument.SettlementAccepted, Failed: d.failed, DeadLetter: d.dead}
	switch d.kind {
	case released:
		s.Kind = instrument.SettlementReleased
	case modified:
		s.Kind = instrument.SettlementModified
		s.Reason, _ = d.annotations[annotation.Reason].(string)
	}
	added := o.settling(s)
	if len(added) == 0 {
		return d
	}
	maps.Copy(added, d.annotations) // what decides about the message wins
	d.annotations = added
	return d
}

// follow has an Instrument follow d.
func (d *delivery) follow(o *observed) { d.observed.Store(o) }

// handlerResult notes what the handler has returned.
func (d *delivery) handlerResult(err error) { d.observed.Load().handled(err) }

// count adds the link session's numbers.
func (s *linkSession) count(c *instrument.ConsumerStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.window.count(c)
	c.Unsettled += s.aside
	c.Ready = s.ready()
}
