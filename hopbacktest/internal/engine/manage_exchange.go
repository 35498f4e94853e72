package engine

import (
	"encoding/base64"
	"fmt"
	"hash/fnv"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// exchangeDeclaration is what an exchange is to be like.
type exchangeDeclaration struct {
	name, kind                    string
	durable, autoDelete, internal bool
	args                          table
}

func (s *Session) putExchange(name string, body any) (answer, *Fault) {
	d := exchangeDeclaration{name: name, kind: typeDirect, durable: true}
	problem, fault := fields(body, map[string]any{
		"durable": &d.durable, "auto_delete": &d.autoDelete, "type": &d.kind, "internal": &d.internal, "arguments": &d.args,
	})
	if fault != nil {
		return answer{}, fault
	}
	v := s.conn.vhost
	switch {
	case problem != "":
		return no(400, prefixed("bad exchange property", problem)), nil
	case !v.b.version.hasExchangeType(d.kind):
		return no(400, "unknown exchange type '"+d.kind+"'"), nil
	case name == "":
		return notTheDefault, nil
	}
	if fault := s.permit(kindExchange, name, permissionConfigure); fault != nil {
		return answer{}, fault
	}
	if v.exchanges[name] == nil {
		switch {
		case hasLineBreak(name):
			return badName(name), nil
		case strings.HasPrefix(name, "amq."):
			return v.reserved(kindExchange, name), nil
		}
		if a, ok := d.args.get("alternate-exchange"); ok && v.b.version.newer {
			if a.kind != argText {
				return no(400, "invalid type '"+a.kind+"' for arg 'alternate-exchange'"), nil
			}
			if fault := s.permit(kindExchange, name, permissionRead); fault != nil {
				return answer{}, fault
			}
			if fault := s.permit(kindExchange, a.value.(string), permissionWrite); fault != nil {
				return answer{}, fault
			}
		}
	}
	if _, _, text := v.declareExchange(d); text != "" {
		return no(409, text), nil
	}
	return answer{status: 204}, nil
}

// atom is the name of an exchange type as Erlang prints it.
func atom(kind string) string {
	if strings.Contains(kind, "-") {
		return "'" + kind + "'"
	}
	return kind
}

func (v *version) hasExchangeType(kind string) bool {
	return kind == typeModulus && v.newer || slices.Contains([]string{typeDirect, typeFanout, typeTopic, typeHeaders, typeRandom}, kind)
}

// declareExchange finds or makes an exchange. The text is RabbitMQ's refusal.
func (v *vhost) declareExchange(d exchangeDeclaration) (x *exchange, is bool, text string) {
	x = v.exchanges[d.name]
	if x == nil {
		x = &exchange{name: d.name, kind: d.kind, durable: d.durable, autoDelete: d.autoDelete, internal: d.internal, args: d.args}
		v.addExchange(x)
		return x, true, ""
	}
	what := v.what(kindExchange, d.name)
	for _, f := range [][3]string{
		{"type", atom(x.kind), atom(d.kind)}, {"durable", strconv.FormatBool(x.durable), strconv.FormatBool(d.durable)},
		{"auto_delete", strconv.FormatBool(x.autoDelete), strconv.FormatBool(d.autoDelete)},
		{"internal", strconv.FormatBool(x.internal), strconv.FormatBool(d.internal)},
	} {
		if f[1] != f[2] {
			return nil, false, inequivalent(f[0], what, "'"+f[2]+"'", "'"+f[1]+"'")
		}
	}
	if text, differs := x.args.differs(d.args, what, []string{"alternate-exchange"}); differs {
		return nil, false, text
	}
	return x, false, ""
}

func (s *Session) deleteExchange(name string) (answer, *Fault) {
	v := s.conn.vhost
	switch {
	case hasLineBreak(name):
		return badName(name), nil
	case name == "":
		return notTheDefault, nil
	case strings.HasPrefix(name, "amq."):
		return v.reserved(kindExchange, name), nil
	}
	if fault := s.permit(kindExchange, name, permissionConfigure); fault != nil {
		return answer{}, fault
	}
	if x := v.exchanges[name]; x != nil {
		v.deleteExchange(x)
	}
	return answer{status: 204}, nil
}

// ends are the ends of a binding, as a request names them.
type ends struct {
	source, queue, exchange string
	toExchange              bool
	key                     string
	args                    table
}

func (e ends) destination() (kind, name string) {
	if e.toExchange {
		return kindExchange, e.exchange
	}
	return kindQueue, e.queue
}

// checkEnds checks names and permissions of a binding.
func (s *Session) checkEnds(e ends) (*answer, *Fault) {
	kind, name := e.destination()
	if e.source == "" || e.toExchange && name == "" {
		return &notTheDefault, nil
	}
	for _, n := range []string{e.source, name} {
		if hasLineBreak(n) {
			a := badName(n)
			return &a, nil
		}
	}
	if fault := s.permit(kind, name, permissionWrite); fault != nil {
		return nil, fault
	}
	if fault := s.permit(kindExchange, e.source, permissionRead); fault != nil {
		return nil, fault
	}
	return nil, s.permitTopics(s.conn.vhost.exchanges[e.source], []string{e.key}, permissionRead)
}

func (s *Session) postBinding(body any) (answer, *Fault) {
	var e ends
	problem, fault := fields(body, map[string]any{
		"source": &e.source, "destination_queue": &e.queue, "destination_exchange": &e.exchange, "binding_key": &e.key, "arguments": &e.args,
	})
	if fault != nil {
		return answer{}, fault
	}
	if problem != "" {
		return no(400, prefixed("bad binding field", problem)), nil
	}
	has := func(key string) bool { _, ok := body.(frames.Map).Get(key); return ok }
	if !has("source") || !has("binding_key") || !has("arguments") || !has("destination_queue") && !has("destination_exchange") {
		return answer{}, internalError("{badmatch,%v}", body)
	}
	e.toExchange = !has("destination_queue")
	if a, fault := s.checkEnds(e); a != nil || fault != nil {
		return orNothing(a), fault
	}
	if text := s.conn.vhost.bind(e, s.conn); text != "" {
		return no(400, text), nil
	}
	return answer{status: 204}, nil
}

func orNothing(a *answer) answer {
	if a == nil {
		return answer{}
	}
	return *a
}

// bind adds a binding. The text is RabbitMQ's refusal.
func (v *vhost) bind(e ends, by *Connection) string {
	b := &binding{source: v.exchanges[e.source], key: e.key, args: e.args}
	kind, name := e.destination()
	switch {
	case b.source == nil:
		return "no " + v.what(kindExchange, e.source)
	case e.toExchange:
		b.target = v.exchanges[name]
	default:
		b.queue = v.queues[name]
	}
	if b.target == nil && b.queue == nil {
		return "no " + v.what(kind, name)
	}
	if b.queue != nil && b.queue.exclusive != nil && b.queue.exclusive != by {
		return lockedText(v.what(kind, name))
	}
	if a, ok := e.args.get("x-match"); ok && b.source.kind == typeHeaders {
		if a.kind != argText {
			return fmt.Sprintf("Invalid x-match field type %s (value %s); expected longstr", a.kind, a)
		}
		if !slices.Contains([]string{"all", "any", "all-with-x", "any-with-x"}, a.value.(string)) {
			return fmt.Sprintf("Invalid x-match field value <<%q>>; expected all, any, all-with-x, or any-with-x", a.value)
		}
	}
	v.addBinding(b)
	return ""
}

var bindingSegment = regexp.MustCompile(`^src=([0-9A-Za-z\-._~%]+);dst([eq])=([0-9A-Za-z\-._~%]+);key=([0-9A-Za-z\-._~%]*);args=([0-9A-Za-z\-_]*)$`)

func (s *Session) deleteBinding(segment string) (answer, *Fault) {
	m := bindingSegment.FindStringSubmatch(segment)
	if m == nil {
		return no(400, "bad binding path segment '"+segment+"'"), nil
	}
	var e ends
	e.toExchange = m[2] == "e"
	for _, part := range []struct {
		from string
		to   *string
	}{{m[1], &e.source}, {m[3], &e.queue}, {m[4], &e.key}} {
		text, err := decode(part.from)
		if err != nil {
			return answer{}, internalError("badarg: %q", part.from)
		}
		*part.to = text
	}
	e.exchange = e.queue
	if a, fault := s.checkEnds(e); a != nil || fault != nil {
		return orNothing(a), fault
	}
	for _, b := range s.conn.vhost.between(e) {
		if b.key == e.key && b.args.hash() == m[5] {
			s.conn.vhost.removeBinding(b)
			break
		}
	}
	return answer{status: 204}, nil
}

func (s *Session) getBindings(query url.Values) (answer, *Fault) {
	e := ends{source: query.Get("src"), key: query.Get("key"), queue: query.Get("dstq"), exchange: query.Get("dste"), toExchange: query.Has("dste")}
	if !e.toExchange && !query.Has("dstq") {
		if !s.conn.b.version.newer {
			return answer{}, internalError("badarg\n[{io_lib,format,%q}]", query.Encode())
		}
		return no(400, "missing 'dste' or 'dstq' in query: "+query.Encode()), nil
	}
	if s.conn.b.version.newer {
		if a, fault := s.checkEnds(e); a != nil || fault != nil {
			return orNothing(a), fault
		}
	}
	list := frames.List{}
	kind, name := e.destination()
	for _, b := range s.conn.vhost.between(e) {
		if b.key != e.key {
			continue
		}
		list = append(list, frames.Map{
			{Key: "source", Value: e.source},
			{Key: "destination_" + kind, Value: name},
			{Key: "binding_key", Value: b.key},
			{Key: "arguments", Value: b.args.amqp()},
			{Key: "location", Value: "/bindings/src=" + quote(e.source) + ";dst" + kind[:1] + "=" + quote(name) + ";key=" + quote(b.key) + ";args=" + b.args.hash()},
		})
	}
	return answer{200, list}, nil
}

var unquoted = strings.NewReplacer("+", "%20", "*", "%2A")

// quote encodes a part of a binding's location: all but the unreserved characters.
func quote(s string) string {
	return unquoted.Replace(url.QueryEscape(s))
}

// between are the bindings between two ends.
func (v *vhost) between(e ends) []*binding {
	x := v.exchanges[e.source]
	if x == nil {
		return nil
	}
	var found []*binding
	kind, name := e.destination()
	for _, b := range x.bindings {
		if k, n := b.destination(); k == kind && n == name {
			found = append(found, b)
		}
	}
	return found
}

// hash tells bindings apart that differ in their arguments alone.
func (t table) hash() string {
	if len(t) == 0 {
		return ""
	}
	h := fnv.New32a()
	_, _ = fmt.Fprintf(h, "%v", t)
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}
