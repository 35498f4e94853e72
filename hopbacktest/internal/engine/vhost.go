package engine

import (
	"maps"
	"slices"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// vhost is a virtual host.
type vhost struct {
	b    *Broker
	name string
	VHostConfig
	queues    map[string]*queue
	volatile  volatile
	exchanges map[string]*exchange
	policies  map[string]*policy
	operators map[string]*policy
	limits    map[string]int64
	topology  uint64 // increased by every change of the routing
}

// VHostConfig is what a virtual host is made with.
type VHostConfig struct {
	Description      string
	Tags             []string
	DefaultQueueType string
}

// The kinds of things that have names and permissions.
const (
	kindQueue    = "queue"
	kindExchange = "exchange"
	kindTopic    = "topic of "
)

func (v *vhost) what(kind, name string) string {
	return kind + " '" + name + "' in vhost '" + v.name + "'"
}

// changed notes that messages may have other ways now.
func (v *vhost) changed() { v.topology++ }

func (b *Broker) addVHost(name string) *vhost {
	v := &vhost{
		b: b, name: name, queues: map[string]*queue{}, exchanges: map[string]*exchange{}, policies: map[string]*policy{},
		operators: map[string]*policy{}, limits: map[string]int64{}, topology: 1,
	}
	for name, kind := range map[string]string{
		"": typeDirect, "amq.direct": typeDirect, "amq.fanout": typeFanout, "amq.topic": typeTopic, "amq.headers": typeHeaders,
		"amq.match": typeHeaders, "amq.rabbitmq.trace": typeTopic,
	} {
		x := &exchange{name: name, kind: kind, durable: true, internal: name == "amq.rabbitmq.trace"}
		x.index()
		v.exchanges[name] = x
	}
	b.vhosts[name] = v
	return v
}

// PutVHost adds a virtual host, or changes one. It says whether it is new.
func (b *Broker) PutVHost(name string, cfg VHostConfig) bool {
	b.lock()
	defer b.unlock()
	v := b.vhosts[name]
	is := v == nil
	if is {
		v = b.addVHost(name)
	}
	v.VHostConfig = cfg
	if is {
		// Who makes it by the HTTP API, guest here, gets all permissions.
		if guest := b.users["guest"]; guest != nil {
			guest.permissions[name] = everything
		}
	}
	return is
}

// DeleteVHost removes a virtual host with all that is in it. Its connections are
// closed. It says whether there was one.
func (b *Broker) DeleteVHost(name string) bool {
	b.lock()
	defer b.unlock()
	v := b.vhosts[name]
	if v == nil {
		return false
	}
	delete(b.vhosts, name)
	for _, c := range slices.Clone(b.conns) {
		if c.vhost == v {
			c.shut(connectionForced("vhost '" + name + "' is deleted"))
		}
	}
	for _, q := range v.sortedQueues() {
		b.deleteQueue(q)
	}
	for _, u := range b.users {
		delete(u.permissions, name)
		maps.DeleteFunc(u.topics, func(a topicAccess, _ *Permissions) bool { return a.vhost == name })
	}
	return true
}

func connectionForced(why string) *frames.Error {
	return &frames.Error{Condition: "amqp:internal-error", Description: `Connection forced: "` + why + `"`}
}

func (v *vhost) sortedQueues() []*queue {
	return slices.SortedFunc(maps.Values(v.queues), func(a, b *queue) int { return strings.Compare(a.name, b.name) })
}

func (v *vhost) sortedExchanges() []*exchange {
	return slices.SortedFunc(maps.Values(v.exchanges), func(a, b *exchange) int { return strings.Compare(a.name, b.name) })
}

// addQueue adds a queue whose arguments are checked.
func (v *vhost) addQueue(name, kind string, durable, autoDelete bool, owner *Connection, args table) *queue {
	b := v.b
	q := &queue{
		b: b, vhost: v, name: name, kind: kind, durable: durable, autoDelete: autoDelete, exclusive: owner, args: args,
		leader: b.cfg.Node, idleSince: b.now(), settings: settings{maxLength: -1, maxBytes: -1, limit: -1, expires: -1, ttl: -1},
	}
	v.queues[name] = q
	q.configure()
	q.ready = newReady(kind, b.version.newer, q.maxPriority)
	if owner != nil {
		owner.queues = append(owner.queues, q)
	}
	v.changed()
	b.log(q, logDeclared, nil)
	return q
}

// deleteQueue removes a queue with all that is in it, its bindings and its links. It says
// how many messages were in it.
func (b *Broker) deleteQueue(q *queue) int {
	if q.gone {
		return 0
	}
	v := q.vhost
	n := q.ready.n + q.held
	delete(v.queues, q.name)
	for _, binding := range slices.Clone(q.bindings) {
		v.removeBinding(binding)
	}
	q.gone = true
	q.drain()
	q.halt()
	v.changed()
	notified := map[*Session]bool{}
	for _, c := range slices.Clone(q.consumers) {
		notified[c.session] = true
		c.attached = false
		c.session.detached(c, &frames.Error{Condition: "amqp:resource-deleted"})
	}
	q.consumers, q.active = nil, nil
	for _, c := range b.conns {
		if c.vhost == v {
			c.queueGone(q, notified)
		}
	}
	for _, other := range v.queues {
		if other.worker != nil {
			other.worker.forgets(q)
		}
	}
	if q.exclusive != nil {
		q.exclusive.queues = slices.DeleteFunc(q.exclusive.queues, func(other *queue) bool { return other == q })
	}
	b.log(q, logDeleted, nil)
	return n
}

// drain drops all messages of the queue, including those that consumers hold.
func (q *queue) drain() {
	q.purge()
	if q.worker != nil {
		q.worker.purge()
	}
	for _, c := range q.consumers {
		for d := c.oldest; d != nil; d = c.oldest {
			e, late := d.entry, d.revoked
			q.release(d)
			if !late {
				q.forget(e)
			}
		}
	}
}

func (v *vhost) addExchange(x *exchange) {
	v.exchanges[x.name] = x
	v.configureExchange(x)
	x.index()
	v.changed()
}

// configureExchange finds an exchange's policy and its alternate exchange.
func (v *vhost) configureExchange(x *exchange) {
	x.policy = v.policyForExchange(x)
	x.alternate, x.hasAlternate = x.args.text("alternate-exchange")
	if x.policy != nil && !x.hasAlternate {
		x.alternate, x.hasAlternate = x.policy.definition.text("alternate-exchange")
	}
	v.changed()
}

func (v *vhost) deleteExchange(x *exchange) {
	delete(v.exchanges, x.name)
	for _, binding := range slices.Concat(x.bindings, x.incoming) {
		v.removeBinding(binding)
	}
	v.changed()
}

func (v *vhost) addBinding(b *binding) {
	for _, old := range b.source.bindings {
		if old.same(b) {
			return
		}
	}
	b.source.bindings = append(b.source.bindings, b)
	switch {
	case b.source.stale:
	case b.source.kind == typeDirect:
		b.source.direct[b.key] = append(b.source.direct[b.key], b)
	case b.source.kind == typeTopic:
		b.source.topics.add(words(b.key), b)
	case b.source.kind == typeModulus:
		b.source.stale = true
	}
	if b.queue != nil {
		b.queue.bindings = append(b.queue.bindings, b)
	} else {
		b.target.incoming = append(b.target.incoming, b)
	}
	v.changed()
}

func (v *vhost) removeBinding(b *binding) {
	is := func(other *binding) bool { return other == b }
	b.source.bindings = slices.DeleteFunc(b.source.bindings, is)
	b.source.stale = true
	if b.queue != nil {
		b.queue.bindings = slices.DeleteFunc(b.queue.bindings, is)
	} else {
		b.target.incoming = slices.DeleteFunc(b.target.incoming, is)
	}
	v.changed()
	if x := b.source; x.autoDelete && len(x.bindings) == 0 && v.exchanges[x.name] == x {
		v.deleteExchange(x)
	}
}
