package client

import (
	"context"
	"maps"

	"github.com/hopback/hopback/client/instrument"
)

// settling returns the disposition with what the Instrument adds to it.
func settling(o *observed, d disposition) disposition {
	s := instrument.Settlement{Kind: instrument.SettlementAccepted, Failed: d.failed, DeadLetter: d.dead}
	switch d.kind {
	case released:
		s.Kind = instrument.SettlementReleased
	case modified:
		s.Kind = instrument.SettlementModified
		s.Reason, _ = d.annotations[AnnotationReason].(string)
	}
	added := o.settling(s)
	if len(added) == 0 {
		return d
	}
	maps.Copy(added, d.annotations) // what decides about the message wins
	d.annotations = added
	return d
}

// observe has the Instrument follow d, and returns the ctx for its handler.
func (s *stint) observe(ctx context.Context, d *Delivery) context.Context {
	if s.consumer.deps.hooks == nil {
		return ctx
	}
	return d.follow(ctx, s.consumer.deps.hooks)
}

// count adds the stint's numbers.
func (s *stint) count(c *instrument.ConsumerStats) {
	s.window.count(c)
	c.Unsettled += int(s.aside.Load())
	c.Ready = s.crew.count() + s.lanes.count() + s.quarantine.count()
}
