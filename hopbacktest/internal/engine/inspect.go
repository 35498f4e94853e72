package engine

import (
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/internal/frames"
)

// QueueInfo is the state of a queue.
type QueueInfo struct {
	VHost, Name, Type              string
	Durable, Exclusive, AutoDelete bool
	// Arguments have strings, bools, int64, float64, nil, slices and maps as values.
	Arguments map[string]any
	// Policy and OperatorPolicy are their names, "" for none.
	Policy, OperatorPolicy string
	// EffectivePolicy is what both set together. It is nil if neither applies.
	EffectivePolicy map[string]any
	Leader          string
	Nodes           []string
	// Ready messages can be delivered. Unacknowledged ones are held by consumers.
	// DeadLettering ones wait to be handed on at least once, and Delayed ones for their
	// time. Messages is the sum of all.
	Ready, Unacknowledged, DeadLettering, Delayed, Messages int
	// Unsettled are those that something is still to happen to: all but the ready ones that don't
	// expire and have no consumer.
	Unsettled int
	// ReadyBytes and UnacknowledgedBytes are bytes of bare messages.
	ReadyBytes, UnacknowledgedBytes int64
	Consumers                       int
	// Published and Delivered count since the queue was declared.
	Published, Delivered uint64
	// DeliveryLimit is -1 for none. NextDelayed and LastDelayed are when the first and the
	// last delayed message are due.
	DeliveryLimit            int64
	NextDelayed, LastDelayed time.Time
}

func (q *queue) info() QueueInfo {
	dead, _ := q.deadCount()
	i := QueueInfo{
		VHost: q.vhost.name, Name: q.name, Type: q.kind, Durable: q.durable, Exclusive: q.exclusive != nil, AutoDelete: q.autoDelete,
		Arguments: q.args.plain(), Leader: q.leader, Nodes: []string{q.leader},
		Ready: q.ready.n, Unacknowledged: q.held, DeadLettering: dead, Delayed: q.delayed.len(),
		ReadyBytes: q.bytes, UnacknowledgedBytes: q.heldBytes, Consumers: len(q.consumers), Published: q.published, Delivered: q.delivered,
		DeliveryLimit: q.limit,
	}
	i.Messages = i.Ready + i.Unacknowledged + i.DeadLettering + i.Delayed
	i.Unsettled = i.Messages - q.resting()
	if q.kind != typeClassic {
		i.Nodes = slices.Clone(q.b.cfg.Nodes)
	}
	if p := best(q.vhost.policies, q.name, q.kind); p != nil {
		i.Policy = p.name
	}
	if p := best(q.vhost.operators, q.name, q.kind); p != nil {
		i.OperatorPolicy = p.name
	}
	if p := q.vhost.policyFor(q); p != nil {
		i.EffectivePolicy = p.definition.plain()
	}
	for _, d := range q.delayed.h {
		at := time.UnixMilli(d.at)
		if i.NextDelayed.IsZero() || at.Before(i.NextDelayed) {
			i.NextDelayed = at
		}
		if at.After(i.LastDelayed) {
			i.LastDelayed = at
		}
	}
	return i
}

// resting counts the ready messages that stay where they are: they don't expire, and the queue has no
// consumer, nor one that was cut off and may come back.
func (q *queue) resting() (n int) {
	switch {
	case len(q.consumers) > 0 || q.cutOff:
		return 0
	case !q.ttls:
		return q.ready.n
	}
	q.ready.all(func(e *entry) {
		if e.expiry == 0 {
			n++
		}
	})
	return n
}

// Queue is the state of a queue. The error is ErrMissing if there is none.
func (b *Broker) Queue(vhost, name string) (QueueInfo, error) {
	b.peek()
	defer b.mu.Unlock()
	q, err := b.find(vhost, name)
	if err != nil {
		return QueueInfo{}, err
	}
	return q.info(), nil
}

// Queues are the queues of a virtual host by name, or, if it is "", of all.
func (b *Broker) Queues(vhost string) []QueueInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []QueueInfo
	for _, v := range b.sorted(vhost) {
		for _, q := range v.sortedQueues() {
			all = append(all, q.info())
		}
	}
	return all
}

// sorted are the virtual hosts by name, or the one that is named.
func (b *Broker) sorted(name string) []*vhost {
	if name != "" {
		if v := b.vhosts[name]; v != nil {
			return []*vhost{v}
		}
		return nil
	}
	return slices.SortedFunc(maps.Values(b.vhosts), func(a, b *vhost) int { return strings.Compare(a.name, b.name) })
}

// The states of messages in a queue.
const (
	StateReady         = "ready"
	StateHeld          = "unacknowledged"
	StateDelayed       = "delayed"
	StateDeadLettering = "dead-lettering"
)

// MessageInfo is a message in a queue.
type MessageInfo struct {
	State string
	// Message is what a consumer would get now, or has got.
	Message *frames.Message
	// Due is when a delayed message is ready, and Expires when one is dead-lettered or
	// dropped, once it is at the head of the queue. Zero: never.
	Due, Expires time.Time
	// Reason is why a message is dead-lettered.
	Reason string
}

// Messages are all messages of a queue: the ready ones in the order of their delivery,
// those that consumers hold, the delayed ones, and those that wait for their
// dead-lettering.
func (b *Broker) Messages(vhost, name string) ([]MessageInfo, error) {
	return b.selected(vhost, name, func(*message) bool { return true })
}

// Message is the first one of Messages with a message-id, and false if there is none. The id is a value of Entry.MessageID.
func (b *Broker) Message(vhost, name string, id any) (MessageInfo, bool) {
	text, isText := id.(string)
	all, err := b.selected(vhost, name, func(m *message) bool {
		return m.id != "" && (!isText || strings.HasSuffix(m.id, text)) && reflect.DeepEqual(read([]byte(m.id)), id)
	})
	if err != nil || len(all) == 0 {
		return MessageInfo{}, false
	}
	return all[0], true
}

// selected are those of Messages that want has chosen.
func (b *Broker) selected(vhost, name string, want func(*message) bool) ([]MessageInfo, error) {
	b.peek()
	defer b.mu.Unlock()
	q, err := b.find(vhost, name)
	if err != nil {
		return nil, err
	}
	var all []MessageInfo
	add := func(state string, e *entry, edit func(*MessageInfo)) {
		if !want(e.msg) {
			return
		}
		i := MessageInfo{State: state, Message: q.peek(e)}
		if e.expiry != 0 {
			i.Expires = time.UnixMilli(e.expiry)
		}
		if edit != nil {
			edit(&i)
		}
		all = append(all, i)
	}
	q.ready.all(func(e *entry) { add(StateReady, e, nil) })
	for _, c := range q.consumers {
		for d := c.oldest; d != nil; d = d.next {
			if !d.revoked {
				add(StateHeld, d.entry, nil)
			}
		}
	}
	waiting := slices.Clone(q.delayed.h)
	slices.SortFunc(waiting, (*delayItem).before)
	for _, d := range waiting {
		add(StateDelayed, d.e, func(i *MessageInfo) { i.Due = time.UnixMilli(d.at) })
	}
	if q.worker != nil {
		for _, l := range q.worker.pending {
			add(StateDeadLettering, l.entry, func(i *MessageInfo) { i.Reason = l.reason })
		}
		for i := range q.worker.waiting.len() {
			l := q.worker.waiting.at(i)
			add(StateDeadLettering, l.entry, func(i *MessageInfo) { i.Reason = l.reason })
		}
	}
	return all, nil
}

// peek is a message as a consumer would get it. One that can't be encoded is empty.
func (q *queue) peek(e *entry) *frames.Message {
	m, err := frames.DecodeMessage(q.delivery(e).Append(nil))
	if err != nil {
		return &frames.Message{}
	}
	return m
}

// ExchangeInfo is an exchange.
type ExchangeInfo struct {
	VHost, Name, Type             string
	Durable, AutoDelete, Internal bool
	Arguments                     map[string]any
	Policy                        string
}

// Exchanges are the exchanges of a virtual host by name, or, if it is "", of all.
func (b *Broker) Exchanges(vhost string) []ExchangeInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []ExchangeInfo
	for _, v := range b.sorted(vhost) {
		for _, x := range v.sortedExchanges() {
			i := ExchangeInfo{
				VHost: v.name, Name: x.name, Type: x.kind, Durable: x.durable, AutoDelete: x.autoDelete, Internal: x.internal, Arguments: x.args.plain(),
			}
			if x.policy != nil {
				i.Policy = x.policy.name
			}
			all = append(all, i)
		}
	}
	return all
}

// BindingInfo is a binding.
type BindingInfo struct {
	VHost, Source, Destination string
	// ToExchange is whether the destination is an exchange rather than a queue.
	ToExchange bool
	Key        string
	Arguments  map[string]any
	// Properties is what the HTTP API tells bindings apart by.
	Properties string
}

// Bindings are the bindings of a virtual host by source, or, if it is "", of all. Those of
// the default exchange are among them.
func (b *Broker) Bindings(vhost string) []BindingInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []BindingInfo
	for _, v := range b.sorted(vhost) {
		for _, q := range v.sortedQueues() {
			all = append(all, BindingInfo{VHost: v.name, Destination: q.name, Key: q.name, Arguments: map[string]any{}, Properties: q.name})
		}
		for _, x := range v.sortedExchanges() {
			for _, bound := range x.bindings {
				all = append(all, bound.info(v.name))
			}
		}
	}
	return all
}

func (b *binding) info(vhost string) BindingInfo {
	kind, name := b.destination()
	i := BindingInfo{VHost: vhost, Source: b.source.name, Destination: name, ToExchange: kind == kindExchange, Key: b.key, Arguments: b.args.plain()}
	quoted := strings.ReplaceAll(url.QueryEscape(b.key), "~", "%7E")
	switch {
	case len(b.args) > 0:
		i.Properties = quoted + "~" + b.args.hash()
	case b.key == "":
		i.Properties = "~"
	default:
		i.Properties = quoted
	}
	return i
}

// ConnectionInfo is a connection.
type ConnectionInfo struct {
	Name, User, VHost string
	Peer              Peer
	Since             time.Time
	Sessions          int
}

// Connections are the open connections, oldest first.
func (b *Broker) Connections() []ConnectionInfo {
	b.peek()
	defer b.mu.Unlock()
	var all []ConnectionInfo
	for _, c := range b.conns {
		all = append(all, ConnectionInfo{c.name, c.user.name, c.vhost.name, c.peer, c.since, len(c.sessions)})
	}
	return all
}
