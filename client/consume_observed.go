package client

import (
	"context"

	"github.com/Azure/go-amqp"
)

// settling returns the disposition with what the Instrument adds to it.
func (o *observed) settling(d disposition) (with disposition) {
	with = d // after a panic
	defer caught(o.log, "Handling.Settling")
	s := Settlement{Kind: SettlementAccepted, Failed: d.failed, DeadLetter: d.dead}
	switch d.kind {
	case released:
		s.Kind = SettlementReleased
	case modified:
		s.Kind = SettlementModified
		reason, _ := d.annotations[AnnotationReason].(string)
		s.Reason = Reason(reason)
	}
	added := o.Settling(s)
	if len(added) == 0 || d.kind != modified {
		return d
	}
	size := 0
	all := make(amqp.Annotations, len(d.annotations)+len(added))
	for k, v := range added {
		if addable(k, v, maxSettling) && checkAnnotationKey("annotations", k) == nil {
			size += len(k) + len(v)
			all[keys.boxed(k)] = v
		}
	}
	if size > maxSettling {
		o.log.Error("hopback: Config.Instrument adds too much to a settlement; nothing is added", "bytes", size)
		return d
	}
	for k, v := range d.annotations { // what decides about the message wins
		all[k] = v
	}
	d.annotations = all
	return d
}

// observe has the Instrument follow d, and returns the ctx for its handler.
func (s *stint) observe(ctx context.Context, d *Delivery) context.Context {
	if s.consumer.deps.hooks == nil {
		return ctx
	}
	return s.consumer.deps.hooks.handle(ctx, d)
}

// count adds the stint's numbers.
func (s *stint) count(c *ConsumerStats) {
	s.window.count(c)
	c.Unsettled += int(s.aside.Load())
	c.Ready = s.crew.count() + s.lanes.count() + s.quarantine.count()
}
