package engine

import (
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/internal/frames"
)

func validText(s string) bool { return utf8.ValidString(s) }

// permitAny checks whether the user has any permission on a queue.
func (s *Session) permitAny(name string) *Fault {
	b, v := s.conn.b, s.conn.vhost.name
	for _, p := range []permission{permissionRead, permissionWrite} {
		if s.allowed[access{kindQueue, name, p}] || b.may(s.conn.user.name, v, name, p) {
			return nil
		}
	}
	return s.permit(kindQueue, name, permissionConfigure)
}

func (s *Session) getQueue(name string) (answer, *Fault) {
	if s.conn.b.version.newer {
		if fault := s.permitAny(name); fault != nil {
			return answer{}, fault
		}
	}
	q := s.conn.vhost.queues[name]
	if q == nil {
		return no(404, s.conn.vhost.what(kindQueue, name)+" not found"), nil
	}
	return answer{200, q.describe()}, nil
}

// describe is a queue as the management shows it.
func (q *queue) describe() frames.Map {
	messages, consumers := q.ready.n, len(q.consumers)
	if q.quorum() && q.single { // those that wait their turn aren't counted
		consumers = min(consumers, 1)
		if q.active == nil && !q.b.version.newer {
			consumers = 0
		}
	}
	nodes := []string{q.b.cfg.Node}
	if q.quorum() {
		nodes = q.b.cfg.Nodes
	}
	replicas := frames.Array{Type: frames.CodeString32}
	for _, n := range nodes {
		replicas.Elements = append(replicas.Elements, n)
	}
	return frames.Map{
		{Key: "leader", Value: q.leader},
		{Key: "message_count", Value: uint64(messages)},
		{Key: "consumer_count", Value: uint32(consumers)},
		{Key: "name", Value: q.name},
		{Key: "vhost", Value: q.vhost.name},
		{Key: "durable", Value: q.durable},
		{Key: "auto_delete", Value: q.autoDelete},
		{Key: "exclusive", Value: q.exclusive != nil},
		{Key: "type", Value: q.kind},
		{Key: "arguments", Value: q.args.amqp()},
		{Key: "replicas", Value: replicas},
	}
}

// declaration is what a queue is to be like.
type declaration struct {
	name                           string
	durable, exclusive, autoDelete bool
	args                           table
}

func (s *Session) putQueue(name string, body any) (answer, *Fault) {
	d := declaration{name: name, durable: true}
	problem, fault := fields(body, map[string]any{
		"durable": &d.durable, "exclusive": &d.exclusive, "auto_delete": &d.autoDelete, "arguments": &d.args,
	})
	if fault != nil {
		return answer{}, fault
	}
	v := s.conn.vhost
	switch {
	case problem != "":
		return no(400, prefixed("bad queue property", problem)), nil
	case name == "":
		return no(400, "declare queue with empty name not allowed"), nil
	case hasLineBreak(name):
		return badName(name), nil
	case strings.HasPrefix(name, "amq."):
		return v.reserved(kindQueue, name), nil
	}
	if fault := s.permit(kindQueue, name, permissionConfigure); fault != nil {
		return answer{}, fault
	}
	if v.queues[name] == nil {
		if a, ok := d.args.get("x-dead-letter-exchange"); ok {
			if a.kind != argText {
				return no(400, "invalid type '"+a.kind+"' for arg 'x-dead-letter-exchange'"), nil
			}
			if fault := s.permit(kindQueue, name, permissionRead); fault != nil {
				return answer{}, fault
			}
			if fault := s.permit(kindExchange, a.value.(string), permissionWrite); fault != nil {
				return answer{}, fault
			}
		}
	}
	var owner *Connection
	if d.exclusive {
		owner = s.conn
	}
	q, is, status, text := v.declare(d, owner)
	switch {
	case status != 0:
		return no(status, text), nil
	case is:
		return answer{201, q.describe()}, nil
	}
	return answer{200, q.describe()}, nil
}

// declare finds or makes a queue. status is 0, or that of the refusal.
func (v *vhost) declare(d declaration, owner *Connection) (q *queue, is bool, status int, text string) {
	d.args = v.withType(d)
	what := v.what(kindQueue, d.name)
	if q := v.queues[d.name]; q != nil {
		if q.exclusive != owner {
			return nil, false, 400, lockedText(what)
		}
		for _, f := range []struct {
			name     string
			old, new bool
		}{{"durable", q.durable, d.durable}, {"auto_delete", q.autoDelete, d.autoDelete}} {
			if f.old != f.new {
				return nil, false, 409, inequivalent(f.name, what, boolText(f.new), boolText(f.old))
			}
		}
		if text, differs := q.args.differs(d.args, what, v.b.version.arguments(q.kind)); differs {
			return nil, false, 409, text
		}
		return q, false, 0, ""
	}
	kind, problem := v.b.version.checkArguments(d.args, what)
	if problem != "" {
		return nil, false, 409, problem
	}
	if v.b.version.newest && !d.durable && owner == nil {
		return nil, false, 400, transientDenied
	}
	if kind != typeClassic {
		property := ""
		switch {
		case d.autoDelete:
			property = "auto-delete"
		case owner != nil:
			property = "exclusive-owner"
		case !d.durable:
			property = "non-durable"
		}
		if property != "" {
			return nil, false, 400, "invalid property '" + property + "' for " + what
		}
	}
	if limit, ok := v.limits["max-queues"]; ok && limit >= 0 && int64(len(v.queues)) >= limit {
		return nil, false, 403, "cannot declare " + what + ": vhost queue limit (" + itoa(limit) + ") is reached"
	}
	return v.addQueue(d.name, kind, d.durable, d.autoDelete, owner, d.args), true, 0, ""
}

// transientDenied refuses transient queues that aren't exclusive, as RabbitMQ 4.4 does by default.
const transientDenied = "Feature `transient_nonexcl_queues` is deprecated.\nBy default, this feature is not permitted anymore.\n" +
	"The feature will be removed from a future major RabbitMQ version, regardless of the configuration; actual version to be determined.\n" +
	"To continue using this feature when it is not permitted by default, set the following parameter in your configuration:\n" +
	"    \"deprecated_features.permit.transient_nonexcl_queues = true\""

func lockedText(what string) string {
	return "cannot obtain exclusive access to locked " + what + ". It could be originally declared on another connection or the " +
		"exclusive property value does not match that of the original declaration."
}

func boolText(v bool) string {
	if v {
		return "'true'"
	}
	return "'false'"
}

// withType is a declaration's arguments with the queue's type, which is the virtual host's default
// where none is given.
func (v *vhost) withType(d declaration) table {
	if _, ok := d.args.get("x-queue-type"); ok {
		return d.args
	}
	kind := v.DefaultQueueType
	if kind == "" || kind == "undefined" || kind != typeClassic && (!d.durable || d.exclusive || d.autoDelete) {
		kind = typeClassic
	}
	return d.args.set(argument{"x-queue-type", argText, kind})
}

func counted(n int) frames.Map { return frames.Map{{Key: "message_count", Value: uint64(n)}} }

func (s *Session) deleteQueue(name string) (answer, *Fault) {
	if hasLineBreak(name) {
		return badName(name), nil
	}
	if fault := s.permit(kindQueue, name, permissionConfigure); fault != nil {
		return answer{}, fault
	}
	v := s.conn.vhost
	q := v.queues[name]
	switch {
	case q == nil:
		return answer{200, counted(0)}, nil
	case q.exclusive != nil && q.exclusive != s.conn:
		return no(400, lockedText(v.what(kindQueue, name))), nil
	}
	n := q.ready.n
	v.b.deleteQueue(q)
	return answer{200, counted(n)}, nil
}

func (s *Session) purgeQueue(name string) (answer, *Fault) {
	if fault := s.permit(kindQueue, name, permissionRead); fault != nil {
		return answer{}, fault
	}
	v := s.conn.vhost
	q := v.queues[name]
	switch {
	case q == nil && v.b.version.newer:
		return no(404, "no "+v.what(kindQueue, name)), nil
	case q == nil:
		return no(400, "no "+v.what(kindQueue, name)), nil
	case q.exclusive != nil && q.exclusive != s.conn:
		return no(400, lockedText(v.what(kindQueue, name))), nil
	case q.kind == typeStream:
		return no(400, "purge not supported by "+v.what(kindQueue, name)), nil
	}
	return answer{200, counted(q.purge())}, nil
}
