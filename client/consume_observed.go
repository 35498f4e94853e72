package client

import (
	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/client/internal/instrumented"
	"github.com/hopback/hopback/client/internal/keys"
	"github.com/hopback/hopback/internal/annotation"
)

// settling returns the disposition with what the Instrument adds to it.
func (o *observed) settling(d disposition) (with disposition) {
	with = d // after a panic
	defer caught(o.log, "Handling.Settling")
	s := instrument.Settlement{Kind: instrument.SettlementAccepted, Failed: d.failed, DeadLetter: d.dead}
	switch d.kind {
	case released:
		s.Kind = instrument.SettlementReleased
	case modified:
		s.Kind = instrument.SettlementModified
		s.Reason, _ = d.annotations[annotation.Reason].(string)
	}
	added := o.Settling(s)
	if len(added) == 0 || d.kind != modified {
		return d
	}
	size := 0
	all := make(amqp.Annotations, len(d.annotations)+len(added))
	for k, v := range added {
		if instrumented.Addable(k, v, maxSettling) && checkAnnotationKey("annotations", k) == nil {
			size += len(k) + len(v)
			all[keys.Boxed(k)] = v
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

// follow has an Instrument follow d.
func (d *delivery) follow(o *observed) { d.observed.Store(o) }

// handlerReturned notes the handler's result.
func (d *delivery) handlerReturned(err error) { d.observed.Load().handled(err) }

// count adds the stint's numbers.
func (s *stint) count(c *instrument.ConsumerStats) {
	s.window.count(c)
	c.Unsettled += int(s.aside.Load())
	c.Ready = s.crew.count() + s.lanes.count() + s.quarantine.count()
}
