package engine

import (
	"strconv"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// A volatile queue is the other end of direct reply-to, of RabbitMQ 4.2 and later. It belongs to
// one link, shows in no list and keeps nothing: a message that finds no credit is dropped.
// Publishers get accepted for it, even if the link is gone.

const (
	volatileCapability = "rabbitmq:volatile-queue"
	volatilePrefix     = "amq.rabbitmq.reply-to."
	// maxVolatile is how many of them are remembered that are gone.
	maxVolatile = 10_000
)

// volatile are the volatile queues of a virtual host, by name, among them some that are gone.
type volatile map[string]*queue

// lives says whether the link of a volatile queue is there.
func (all volatile) lives(name string) bool { return all[name] != nil && !all[name].gone }

// target is the queue that the default exchange routes a key to.
func (v *vhost) target(key string) *queue {
	if q := v.queues[key]; q != nil {
		return q
	}
	return v.volatile[key]
}

// openVolatile opens a link with its own volatile queue. It takes the permission to read
// from that queue.
func (s *Session) openVolatile(c *Consumer, attach *frames.Attach, source frames.Source) (*Consumer, *Fault) {
	v := s.conn.vhost
	name := volatilePrefix + "g1" + strconv.FormatUint(s.conn.b.next(), 36) + "." + strconv.FormatUint(s.conn.b.next(), 36)
	if fault := s.permit(kindQueue, name, permissionRead); fault != nil {
		return nil, fault
	}
	q := v.addQueue(name, typeClassic, false, false, nil, nil)
	delete(v.queues, name)
	if v.volatile == nil {
		v.volatile = volatile{}
	}
	if len(v.volatile) >= maxVolatile {
		for name, old := range v.volatile {
			if old.gone {
				delete(v.volatile, name)
			}
		}
	}
	v.volatile[name], q.volatile = q, true
	source.Address = "/queues/" + strings.ReplaceAll(name, "=", "%3D")
	source.Durable, source.Timeout = frames.Some[uint32](0), frames.Some[uint32](0)
	c.queue, c.serial, c.dropsQueue = q, s.conn.b.next(), true
	c.attach = s.consumerAttach(c, attach, source)
	answer := c.attach.Source
	answer.DefaultOutcome, answer.Outcomes, answer.Capabilities = nil, nil, nil
	answer.DynamicNodeProperties = frames.Map{
		{Key: frames.Symbol("lifetime-policy"), Value: frames.Described{Descriptor: frames.Symbol("amqp:delete-on-close:list"), Value: frames.List{}}},
		{Key: frames.Symbol("supported-dist-modes"), Value: frames.Array{Type: 0xb3, Elements: []any{frames.Symbol("move")}}},
	}
	s.consumers[c] = struct{}{}
	q.consumers = append(q.consumers, c)
	q.used = true
	return c, nil
}

// takesNow says whether a volatile queue's link has credit for one message more.
func (q *queue) takesNow() bool {
	return len(q.consumers) > 0 && int64(q.consumers[0].credit) > int64(q.ready.n)
}
