package engine

import (
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// Session is a client's session.
type Session struct {
	// Tag is the wire's.
	Tag any

	conn       *Connection
	over       bool
	consumers  map[*Consumer]struct{}
	publishers map[*Publisher]struct{}
	reached    map[*queue]bool // by what it has published
	ghosts     []*Consumer     // of links that are gone
	// allowed are the permissions that the session has found once: RabbitMQ doesn't look
	// again.
	allowed map[access]bool
}

type access struct {
	kind, name string
	p          permission
}

// End ends the session at the client's wish. Its unsettled deliveries go back to their
// queues as failed ones. It has no events afterwards.
func (s *Session) End() {
	s.conn.b.lock()
	defer s.conn.b.unlock()
	s.end()
}

func (s *Session) end() {
	if s.over {
		return
	}
	s.over = true
	for p := range s.publishers {
		p.close()
	}
	// In the order of their attaching, so that what they requeue is in order.
	for _, q := range s.conn.vhost.queues {
		delete(q.enqueuers, s)
	}
	for _, c := range append(s.ghosts, s.attached()...) {
		c.cancel(true)
	}
	if !s.conn.b.version.newer { // see quiesced
		byName := func(a, b *queue) int { return strings.Compare(a.name, b.name) }
		for _, q := range slices.SortedFunc(maps.Keys(s.reached), byName) {
			if q.active == nil {
				q.activate()
			}
		}
	}
	clear(s.consumers)
	clear(s.publishers)
	s.conn.sessions = slices.DeleteFunc(s.conn.sessions, func(other *Session) bool { return other == s })
	if !s.conn.over {
		s.conn.purge(func(e *Event) bool { return e.Session == s })
	}
}

// attached are the session's consumers in the order of their attaching.
func (s *Session) attached() []*Consumer {
	all := make([]*Consumer, 0, len(s.consumers))
	for c := range s.consumers {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *Consumer) int { return int(int64(a.serial) - int64(b.serial)) })
	return all
}

// fail ends the session with a fault.
func (s *Session) fail(f *Fault) *Fault {
	s.end()
	return f
}

// detached notifies the client that a consumer's link has ended.
func (s *Session) detached(c *Consumer, err *frames.Error) {
	delete(s.consumers, c)
	s.conn.purge(func(e *Event) bool { return e.Consumer == c })
	s.conn.emit(Event{Kind: EventDetached, Session: s, Consumer: c, Err: err})
}

// permit checks a permission. Without it the session ends.
func (s *Session) permit(kind, name string, p permission) *Fault {
	a := access{kind, name, p}
	if s.allowed[a] {
		return nil
	}
	v := s.conn.vhost
	if s.conn.b.may(s.conn.user.name, v.name, name, p) {
		s.allowed[a] = true
		return nil
	}
	if name == "" && kind == kindExchange {
		name = "amq.default"
	}
	return s.fail(&Fault{ScopeSession, &frames.Error{
		Condition:   "amqp:unauthorized-access",
		Description: p.String() + " access to " + v.what(kind, name) + " refused for user '" + s.conn.user.name + "'",
	}})
}

// permitTopics checks the permission for routing keys of a topic exchange. Without it the session
// ends.
func (s *Session) permitTopics(x *exchange, keys []string, p permission) *Fault {
	if x == nil || x.kind != typeTopic {
		return nil
	}
	v := s.conn.vhost
	for _, key := range keys {
		a := access{kindTopic + x.name, key, p}
		if s.allowed[a] {
			continue
		}
		if !s.conn.b.mayTopic(s.conn.user.name, v.name, x.name, key, p) {
			return s.fail(&Fault{ScopeSession, &frames.Error{
				Condition:   "amqp:unauthorized-access",
				Description: p.String() + " access to topic '" + key + "' in exchange '" + x.name + "' in vhost '" + v.name + "' refused for user '" + s.conn.user.name + "'",
			}})
		}
		if len(s.allowed) < maxAllowed {
			s.allowed[a] = true
		}
	}
	return nil
}

// maxAllowed bounds what a session remembers: a publisher may have any number of routing keys.
const maxAllowed = 4096

// refuse is the fault of an attach.
func (s *Session) refuse(condition frames.Symbol, text string) *Fault {
	f := &Fault{s.conn.b.linkScope(), &frames.Error{Condition: condition, Description: text}}
	if f.Ends == ScopeSession {
		return s.fail(f)
	}
	return f
}

// refuseAddress is refuse for an address that is no good.
func (s *Session) refuseAddress(reason string) *Fault {
	if s.conn.b.version.newer {
		return s.refuse("amqp:invalid-field", "Attach refused: "+reason)
	}
	return s.refuse("amqp:invalid-field", "Attach rejected: "+reason)
}

// numberSideEffects are AMQP's names of the types of numbers.
var numberSideEffects = map[reflect.Kind]string{
	reflect.Int8: "byte", reflect.Int16: "short", reflect.Int32: "int", reflect.Int64: "long",
	reflect.Uint8: "ubyte", reflect.Uint16: "ushort", reflect.Uint32: "uint", reflect.Uint64: "ulong",
}

// term is a value as RabbitMQ's errors show it.
func term(v any) string {
	switch v := v.(type) {
	case nil:
		return "undefined"
	case string:
		return "{utf8," + binaryTerm(v) + "}"
	case bool:
		return fmt.Sprint(v)
	case int8, int16, int32, int64, uint8, uint16, uint32, uint64:
		return fmt.Sprintf("{%s,%d}", numberSideEffects[reflect.TypeOf(v).Kind()], v)
	case []byte:
		return "{binary," + binaryTerm(string(v)) + "}"
	case frames.List:
		items := make([]string, len(v))
		for i, item := range v {
			items[i] = term(item)
		}
		return "{list,[" + strings.Join(items, ",") + "]}"
	case frames.Map:
		items := make([]string, len(v))
		for i, item := range v {
			items[i] = "{" + term(item.Key) + "," + term(item.Value) + "}"
		}
		return "{map,[" + strings.Join(items, ",") + "]}"
	case frames.Symbol:
		return "{symbol," + binaryTerm(string(v)) + "}"
	}
	return fmt.Sprint(v)
}

func binaryTerm(s string) string {
	if s == "" {
		return "<<>>"
	}
	return fmt.Sprintf("<<%q>>", s)
}

// notPermitted refuses an address of version 1. RabbitMQ 4.0 still takes these; this broker
// doesn't.
func (s *Session) notPermitted(address string) *Fault {
	return s.refuseAddress("{amqp_address_v1_not_permitted," + term(address) + "}")
}

// to is the target of a link or of a message.
type to struct{ exchange, key, queue string }

// parseTarget reads an address of a target.
func parseTarget(address string) (to, bool) {
	if rest, ok := strings.CutPrefix(address, "/exchanges/"); ok {
		parts := strings.Split(rest, "/")
		if len(parts) > 2 || parts[0] == "" || parts[0] == "amq.default" {
			return to{}, false
		}
		name, err := decode(parts[0])
		key := ""
		if len(parts) == 2 && err == nil {
			key, err = decode(parts[1])
		}
		return to{exchange: name, key: key}, err == nil
	}
	if rest, ok := strings.CutPrefix(address, "/queues/"); ok && rest != "" && !strings.Contains(rest, "/") {
		name, err := decode(rest)
		return to{key: name, queue: name}, err == nil
	}
	return to{}, false
}

// decode decodes a part of an address or of a path.
func decode(part string) (string, error) { return url.PathUnescape(part) }

// addressOf is the target that a message names itself.
func addressOf(m *message) (to, *frames.Error) {
	address, ok := m.property(fieldTo).(string)
	if !ok {
		return to{}, &frames.Error{Condition: "amqp:precondition-failed", Description: "anonymous terminus requires 'to' address to be set"}
	}
	target, ok := parseTarget(address)
	if !ok {
		return to{}, &frames.Error{Condition: "amqp:precondition-failed", Description: "bad 'to' address string: " + address}
	}
	return target, nil
}

// OpenPublisher opens the link of a client that sends. The attach frame is the client's.
// The target's address is one of version 2, or absent: then each message's to property
// is its address. The target of /management isn't for the engine: see Request.
func (s *Session) OpenPublisher(attach *frames.Attach) (*Publisher, *Fault) {
	b := s.conn.b
	b.lock()
	defer b.unlock()
	if fault := s.checkAttach(attach); fault != nil {
		return nil, fault
	}
	target, ok := attach.Target.(*frames.Target)
	if !ok || target == nil {
		return nil, s.refuseAddress("{bad_address,undefined}")
	}
	p := &Publisher{session: s, open: true, anonymous: target.Address == nil && !target.Dynamic}
	v := s.conn.vhost
	answer := *target
	switch {
	case target.Dynamic:
		name, fault := s.ownQueue(target.Capabilities, "target", target)
		if fault != nil {
			return nil, fault
		}
		answer = frames.Target{
			Address: "/queues/" + url.PathEscape(name), Durable: frames.Some[uint32](0), ExpiryPolicy: "link-detach", Timeout: frames.Some[uint32](0),
			Dynamic: true, Capabilities: []frames.Symbol{"temporary-queue"},
		}
		p.key, p.queue, p.drops = name, name, v.queues[name]
	case p.anonymous:
	default:
		address, _ := target.Address.(string)
		parsed, ok := parseTarget(address)
		if !ok {
			if !strings.HasPrefix(address, "/exchanges/") && !strings.HasPrefix(address, "/queues/") {
				return nil, s.notPermitted(address)
			}
			return nil, s.refuseAddress(fmt.Sprintf("{bad_address_string,<<%q>>}", address))
		}
		if parsed.queue != "" && v.queues[parsed.queue] == nil && !v.volatile.lives(parsed.queue) {
			return nil, s.refuse("amqp:not-found", "no "+v.what(kindQueue, parsed.queue))
		}
		if fault := s.permit(kindExchange, parsed.exchange, permissionWrite); fault != nil {
			return nil, fault
		}
		switch x := v.exchanges[parsed.exchange]; {
		case x == nil:
			return nil, s.refuse("amqp:not-found", "no "+v.what(kindExchange, parsed.exchange))
		case x.internal:
			return nil, s.refuse("amqp:unauthorized-access", "forbidden to publish to internal "+v.what(kindExchange, x.name))
		}
		p.exchange, p.key, p.queue = parsed.exchange, parsed.key, parsed.queue
	}
	p.keys = []string{p.key}
	p.attach = &frames.Attach{
		Role: frames.RoleReceiver, Source: attach.Source, Target: &answer, SenderSettleMode: attach.SenderSettleMode,
		ReceiverSettleMode: frames.Some[uint8](0), MaxMessageSize: frames.Some(uint64(b.cfg.MaxMessageSize)),
		OfferedCapabilities: v.queues[p.queue].offers(),
	}
	s.publishers[p] = struct{}{}
	return p, nil
}

// checkAttach refuses what RabbitMQ doesn't implement.
func (s *Session) checkAttach(attach *frames.Attach) *Fault {
	if s.over {
		return &Fault{ScopeSession, &frames.Error{Condition: "amqp:illegal-state", Description: "the session has ended"}}
	}
	missing := func(text string) *Fault { return s.refuse("amqp:not-implemented", text) }
	if d, ok := attach.Target.(frames.Described); ok {
		return missing(fmt.Sprintf("Transactions not supported: %v", d.Descriptor))
	}
	if len(attach.Unsettled) > 0 || attach.IncompleteUnsettled {
		return missing("Link recovery not supported")
	}
	if attach.ReceiverSettleMode.Or(0) == 1 && attach.SenderSettleMode.Or(2) != 1 {
		return missing("rcv-settle-mode second not supported")
	}
	if attach.Source != nil {
		for _, o := range attach.Source.Outcomes {
			if !slices.Contains(outcomes, o) {
				return missing(fmt.Sprintf("Outcomes not supported: [{symbol,<<%q>>}]", o))
			}
		}
	}
	return nil
}

var outcomes = []frames.Symbol{"amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list"}

// ownQueue makes the queue of a dynamic link.
func (s *Session) ownQueue(capabilities []frames.Symbol, which string, terminus any) (string, *Fault) {
	if !s.conn.b.version.newer || !slices.Contains(capabilities, "temporary-queue") {
		return "", s.refuse("amqp:not-implemented", fmt.Sprintf("Dynamic %s not supported: %v", which, terminus))
	}
	name := "amq.dyn-" + strconv.FormatUint(s.conn.b.next(), 36)
	for _, p := range []permission{permissionConfigure, permissionRead} {
		if fault := s.permit(kindQueue, name, p); fault != nil {
			return "", fault
		}
	}
	s.conn.vhost.addQueue(name, typeClassic, true, false, s.conn, table{{"x-queue-type", argText, typeClassic}})
	return name, nil
}
