package engine

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// OpenConsumer opens the link of a client that receives from a queue.
func (s *Session) OpenConsumer(attach *frames.Attach) (*Consumer, *Fault) {
	b := s.conn.b
	b.lock()
	defer b.unlock()
	if fault := s.checkAttach(attach); fault != nil {
		return nil, fault
	}
	if attach.Source == nil {
		if !b.version.newer {
			return nil, s.refuse("amqp:internal-error", "function_clause")
		}
		return nil, s.refuseAddress("source_required")
	}
	v, source := s.conn.vhost, *attach.Source
	c := &Consumer{session: s, name: attach.Name, settled: attach.SenderSettleMode.Or(2) == 1, attached: true}
	var name string
	if source.Dynamic && b.version.newer && c.settled && slices.Contains(source.Capabilities, volatileCapability) {
		return s.openVolatile(c, attach, source)
	}
	if source.Dynamic {
		own, fault := s.ownQueue(source.Capabilities, "source", attach.Source)
		if fault != nil {
			return nil, fault
		}
		name, c.dropsQueue = own, true
		source.Address, source.Capabilities = "/queues/"+url.PathEscape(own), []frames.Symbol{"temporary-queue"}
		source.Durable, source.ExpiryPolicy, source.Timeout = frames.Some[uint32](0), "link-detach", frames.Some[uint32](0)
	} else {
		address, isText := source.Address.(string)
		rest, ok := strings.CutPrefix(address, "/queues/")
		var err error
		if ok {
			name, err = decode(rest)
		}
		if !ok || err != nil || strings.Contains(rest, "/") {
			reason := "bad_address"
			if b.version.newer && isText && !ok {
				reason = "amqp_address_v1_not_permitted"
			}
			return nil, s.refuseAddress(fmt.Sprintf("{%s,%s}", reason, term(source.Address)))
		}
	}
	q := v.queues[name]
	if q == nil && v.volatile.lives(name) {
		return nil, s.refuse("amqp:precondition-failed", "only creator channel may consume from "+v.what(kindQueue, name))
	}
	if q == nil {
		return nil, s.refuse("amqp:not-found", "no "+v.what(kindQueue, name))
	}
	if fault := s.permit(kindQueue, name, permissionRead); fault != nil {
		return nil, fault
	}
	switch {
	case q.exclusive != nil && q.exclusive != s.conn:
		return nil, s.refuse("amqp:resource-locked", "cannot obtain exclusive access to locked "+v.what(kindQueue, name))
	case q.kind == typeStream:
		return nil, s.refuse("amqp:not-implemented", "hopbacktest doesn't deliver from streams")
	}
	if p, ok := attach.Properties.Get("rabbitmq:priority"); ok {
		if n, ok := p.(int32); ok {
			c.priority = int64(n)
		}
	}
	c.queue, c.serial, c.timeout = q, b.next(), q.consumerTimeout
	if p, ok := attach.Properties.Get("rabbitmq:consumer-timeout"); ok && b.version.newer {
		if n, ok := p.(uint32); ok {
			c.timeout = int64(n)
		}
	}
	c.attach = s.consumerAttach(c, attach, source)
	s.consumers[c] = struct{}{}
	q.consumers = append(q.consumers, c)
	q.used = true
	q.activate()
	return c, nil
}

// consumerAttach is the broker's answer to an attach.
func (s *Session) consumerAttach(c *Consumer, attach *frames.Attach, source frames.Source) *frames.Attach {
	source.Filter = effective(source.Filter)
	source.DefaultOutcome = &frames.Released{}
	if source.Outcomes == nil {
		source.Outcomes = outcomes
	}
	if s.conn.b.version.newer {
		source.DistributionMode = "move"
	}
	mode := uint8(0)
	if c.settled {
		mode = 1
	}
	return &frames.Attach{
		Role: frames.RoleSender, OfferedCapabilities: c.queue.offers(), Source: &source, Target: attach.Target, SenderSettleMode: frames.Some(mode),
		ReceiverSettleMode: attach.ReceiverSettleMode, InitialDeliveryCount: frames.Some[uint32](0), MaxMessageSize: attach.MaxMessageSize,
	}
}

// offers are the capabilities that RabbitMQ offers on links to a queue, which may be nil.
func (q *queue) offers() []frames.Symbol {
	if q == nil || !q.quorum() || !q.b.version.newest {
		return nil
	}
	return []frames.Symbol{"rabbitmq:deferral-tokens"}
}

// effective are the filters that RabbitMQ says to be in place. A quorum queue ignores them
// all the same.
func effective(desired frames.Map) frames.Map {
	if desired == nil {
		return nil
	}
	m := frames.Map{}
	for _, e := range desired {
		d, ok := e.Value.(frames.Described)
		if !ok {
			continue
		}
		switch name, _ := d.Descriptor.(frames.Symbol); {
		case strings.HasPrefix(string(name), "rabbitmq:stream-"), name == "amqp:sql-filter",
			name == "amqp:properties-filter", name == "amqp:application-properties-filter":
			m = append(m, e)
		default:
			switch d.Descriptor {
			case uint64(0x120), uint64(0x173), uint64(0x174):
				m = append(m, e)
			}
		}
	}
	return m
}
