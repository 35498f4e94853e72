package client

import (
	"maps"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/link"
)

// settling returns the disposition with what the Instrument adds to it.
func settling(o *observedDelivery, d link.Disposition) link.Disposition {
	s := instrument.Settlement{Kind: instrument.SettlementAccepted, Failed: d.Failed, DeadLetter: d.Dead}
	switch d.Kind {
	case link.DispositionReleased:
		s.Kind = instrument.SettlementReleased
	case link.DispositionModified:
		s.Kind = instrument.SettlementModified
		s.Reason, _ = d.Annotations[annotation.Reason].(string)
	}
	added := o.Settling(s)
	if len(added) == 0 {
		return d
	}
	maps.Copy(added, d.Annotations) // what decides about the message wins
	d.Annotations = added
	return d
}

// count adds the link session's numbers.
func (s *linkSession) count(c *instrument.ConsumerStats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.window.count(c)
	c.Unsettled += s.aside
	c.Ready = s.ready()
	c.Owner = s.gated() && s.gate.serves
}
