package engine

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/hopback/hopback/internal/frames"
)

// answer is the status and body of the reply to a request.
type answer struct {
	status int
	body   any
}

func no(status int, text string) answer { return answer{status, text} }

// Request answers a request to /management. A fault is what RabbitMQ does instead of
// answering: it ends the session.
func (s *Session) Request(request *frames.Message) (*frames.Message, *Fault) {
	method, path, body, ok := readRequest(request)
	b := s.conn.b
	b.lock()
	defer b.unlock()
	if s.over {
		return nil, nil
	}
	if !ok {
		return nil, s.fail(internalError("{badmatch,{rabbit_amqp_management,handle_request}}"))
	}
	a, fault := s.handle(method, path, body)
	if fault != nil {
		if !s.over {
			s.fail(fault)
		}
		return nil, fault
	}
	value, err := frames.AppendValue(nil, frames.Described{Descriptor: uint64(0x77), Value: a.body})
	if err != nil {
		return nil, s.fail(internalError("%v", err))
	}
	return &frames.Message{
		Properties:            &frames.Properties{Subject: frames.Some(strconv.Itoa(a.status)), CorrelationID: request.Properties.MessageID},
		ApplicationProperties: frames.Map{{Key: "http:response", Value: "1.1"}},
		Body:                  value,
	}, nil
}

func readRequest(m *frames.Message) (method, path string, body any, ok bool) {
	if m == nil || m.Properties == nil {
		return "", "", nil, false
	}
	path, ok = m.Properties.To.(string)
	if replyTo, _ := m.Properties.ReplyTo.(string); !ok || !m.Properties.Subject.Set || replyTo != "$me" {
		return "", "", nil, false
	}
	v, _, err := frames.ReadValue(m.Body)
	d, ok := v.(frames.Described)
	if err != nil || !ok || d.Descriptor != uint64(0x77) && d.Descriptor != frames.Symbol("amqp:amqp-value:*") {
		return "", "", nil, false
	}
	return m.Properties.Subject.Value, path, d.Value, true
}

// handle does what a request asks for.
func (s *Session) handle(method, target string, body any) (answer, *Fault) {
	path, query, _ := strings.Cut(target, "?")
	segments := pathSegments(path)
	if segments == nil {
		return answer{}, internalError("{badmatch,%q}", path)
	}
	kind, name := segments[0], ""
	if len(segments) > 1 && kind != "bindings" {
		var err error
		if name, err = decode(segments[1]); err != nil || !validText(name) {
			return answer{}, internalError("badarg: %q", segments[1])
		}
	}
	empty := body == nil
	switch op := method + " " + kind + " " + strconv.Itoa(len(segments)); {
	case op == "GET queues 2" && empty:
		return s.getQueue(name)
	case op == "PUT queues 2":
		return s.putQueue(name, body)
	case op == "DELETE queues 2" && empty:
		return s.deleteQueue(name)
	case op == "DELETE queues 3" && segments[2] == "messages" && empty:
		return s.purgeQueue(name)
	case op == "PUT exchanges 2":
		return s.putExchange(name, body)
	case op == "DELETE exchanges 2" && empty:
		return s.deleteExchange(name)
	case op == "POST bindings 1":
		return s.postBinding(body)
	case op == "DELETE bindings 2" && empty:
		return s.deleteBinding(segments[1])
	case op == "GET bindings 1" && empty:
		values, err := url.ParseQuery(query)
		if err != nil {
			return no(400, "failed to dissect query '"+query+"': "+err.Error()), nil
		}
		if values.Has("src") && values.Has("key") {
			return s.getBindings(values)
		}
	case op == "PUT auth 2" && segments[1] == "tokens" && s.conn.b.version.newer:
		if _, ok := body.([]byte); ok {
			return answer{status: 204}, nil
		}
	}
	return answer{}, internalError("function_clause\n[{rabbit_amqp_management,handle_http_req,[<<%q>>,%q]}]", method, segments)
}

var dots = strings.NewReplacer("%2E", ".", "%2e", ".")

// pathSegments are the segments of a path, normalized as RabbitMQ does it: a dot is a dot, and
// the segments . and .. have their meaning.
func pathSegments(path string) []string {
	if !strings.HasPrefix(path, "/") {
		return nil
	}
	path = dots.Replace(path)
	var segments []string
	all := strings.Split(path[1:], "/")
	for i, s := range all {
		switch s {
		case ".", "..":
			if s == ".." && len(segments) > 0 {
				segments = segments[:len(segments)-1]
			}
			if i == len(all)-1 {
				segments = append(segments, "")
			}
		default:
			segments = append(segments, s)
		}
	}
	return segments
}

// fields reads the map of a request's body. Each known field has its own type.
func fields(body any, into map[string]any) (problem string, fault *Fault) {
	m, ok := body.(frames.Map)
	if !ok {
		return "", internalError("function_clause\na body that isn't a map")
	}
	for _, e := range m {
		key, ok := e.Key.(string)
		bad := "{" + term(e.Key) + "," + term(e.Value) + "}"
		if !ok {
			return bad, nil
		}
		switch to := into[key].(type) {
		case *bool:
			if *to, ok = e.Value.(bool); !ok {
				return bad, nil
			}
		case *string:
			if *to, ok = e.Value.(string); !ok {
				return bad, nil
			}
		case *table:
			args, ok := e.Value.(frames.Map)
			if !ok {
				return "", internalError("function_clause\narguments that aren't a map")
			}
			for _, a := range args {
				switch name := a.Key.(type) {
				case string:
					*to = append(*to, argument091(name, a.Value))
				case frames.Symbol:
					*to = append(*to, argument091(string(name), a.Value))
				default:
					return fmt.Sprintf("unsupported argument %v", a.Key), nil
				}
			}
			*to = to.sorted()
		default:
			return bad, nil
		}
	}
	return "", nil
}

// prefixed has what before a problem, unless it speaks for itself.
func prefixed(what, problem string) string {
	if strings.HasPrefix(problem, "unsupported argument") {
		return problem
	}
	return what + " " + problem
}

func hasLineBreak(name string) bool { return strings.ContainsAny(name, "\r\n") }

func badName(name string) answer {
	return no(400, "Bad name '"+name+"': line feed and carriage return characters not allowed")
}

func (v *vhost) reserved(kind, name string) answer {
	return no(403, v.what(kind, name)+" starts with reserved prefix 'amq.'")
}

var notTheDefault = no(403, "operation not permitted on the default exchange")
