package declare

import (
	"context"
	"errors"
	"strings"
)

// QueueInfo is what the broker says about a queue.
type QueueInfo struct {
	Name  string `json:"name"`
	VHost string `json:"vhost,omitempty"`
	// Type is "quorum", "classic" or "stream".
	Type       string `json:"type"`
	Durable    bool   `json:"durable"`
	AutoDelete bool   `json:"auto_delete"`
	Exclusive  bool   `json:"exclusive"`
	// Leader is the node that leads the queue, and Replicas all nodes that
	// have a copy, up or down. Leader is empty while there is none.
	Leader   string   `json:"leader,omitempty"`
	Replicas []string `json:"replicas,omitempty"`
	// Messages that are ready. Left out are those that a consumer holds, those
	// that wait for at-least-once dead-lettering and, on 4.3, those that are
	// delayed: the HTTP API has them.
	Messages uint64 `json:"messages"`
	// Consumers of the queue.
	Consumers uint64 `json:"consumers"`
	// Arguments as the broker has them: strings, bools, int64, float64, nil and
	// lists of these.
	Arguments map[string]any `json:"arguments"`

	// What follows is told by the HTTP API only, see [Read]. Its counts are some
	// seconds old, and Counted is false until they were first collected.
	Counted bool `json:"counted,omitempty"`
	// Online are the replicas that are up; State is "running" if all is well.
	Online []string `json:"online,omitempty"`
	State  string   `json:"state,omitempty"`
	// MessagesUnacknowledged are held by consumers, MessagesDeadLettering wait
	// for at-least-once dead-lettering, MessagesDelayed for their time (4.3).
	MessagesUnacknowledged uint64 `json:"messages_unacknowledged,omitempty"`
	MessagesDeadLettering  uint64 `json:"messages_dead_lettering,omitempty"`
	MessagesDelayed        uint64 `json:"messages_delayed,omitempty"`
}

// Inspect asks for a queue. One that doesn't exist is [ErrNotFound].
func Inspect(ctx context.Context, r Requester, queue string) (QueueInfo, error) {
	if err := errors.Join(checkRequester(r), checkName("queue name", queue)); err != nil {
		return QueueInfo{}, err
	}
	thing, path := Thing{KindQueue, queue}, queuePath(queue)
	status, reply, err := request(ctx, r, opInspect, thing, "GET", path, nil)
	if err != nil {
		return QueueInfo{}, err
	}
	info, missing := parseQueueInfo(reply)
	if missing != "" {
		return QueueInfo{}, badReply(opInspect, thing, "GET", path, status, "no "+missing)
	}
	return info, nil
}

// parseQueueInfo reads a reply; missing names a field that every queue has and
// that wasn't there. Fields that are only missing while a queue has no leader
// may be.
func parseQueueInfo(reply any) (info QueueInfo, missing string) {
	m := replyMap(reply)
	need := func(field string, ok bool) {
		if !ok && missing == "" {
			missing = field
		}
	}
	var ok bool
	info.Name, ok = replyString(m["name"])
	need("name", ok)
	info.Type, ok = replyString(m["type"])
	need("type", ok)
	info.Messages, ok = replyUint(m["message_count"])
	need("message_count", ok)
	info.Consumers, ok = replyUint(m["consumer_count"])
	need("consumer_count", ok)
	info.VHost, _ = replyString(m["vhost"])
	info.Durable, _ = m["durable"].(bool)
	info.AutoDelete, _ = m["auto_delete"].(bool)
	info.Exclusive, _ = m["exclusive"].(bool)
	info.Leader, _ = replyString(m["leader"])
	info.Replicas = replyStrings(m["replicas"])
	info.Arguments = replyArguments(m["arguments"])
	return info, missing
}

// Bindings lists the bindings that have of's Source, destination and Key; its
// Match, Headers and Arguments don't count, and the results differ only in
// those. The broker has no wider question over AMQP. None is no error, also
// when an end doesn't exist.
func Bindings(ctx context.Context, r Requester, of Binding) ([]Binding, error) {
	c := &collector{label: of.label()}
	of.ends(c)
	if err := errors.Join(append(c.errs, checkRequester(r))...); err != nil {
		return nil, err
	}
	found, err := listBindings(ctx, r, opList, of)
	if err != nil {
		return nil, err
	}
	bindings := make([]Binding, 0, len(found))
	for _, f := range found {
		bindings = append(bindings, f.binding(of))
	}
	return bindings, nil
}

// foundBinding is what tells bindings with the same ends and key apart.
type foundBinding struct {
	arguments map[string]any
	location  string
}

// binding splits the arguments into headers and others, as they are declared.
func (f foundBinding) binding(of Binding) Binding {
	b := Binding{Source: of.Source, Queue: of.Queue, Exchange: of.Exchange, Key: of.Key}
	match, isHeaders := f.arguments["x-match"].(string)
	b.Match = Match(match)
	for k, v := range f.arguments {
		if k == "x-match" {
			continue
		}
		into := &b.Arguments
		withX := b.Match == AllWithX || b.Match == AnyWithX
		if isHeaders && (withX || !strings.HasPrefix(k, "x-")) {
			into = &b.Headers
		}
		if *into == nil {
			*into = map[string]any{}
		}
		(*into)[k] = v
	}
	return b
}

func listBindings(ctx context.Context, r Requester, op string, of Binding) ([]foundBinding, error) {
	thing, path := Thing{KindBinding, of.describe()}, of.listPath()
	status, reply, err := request(ctx, r, op, thing, "GET", path, nil)
	if err != nil {
		return nil, err
	}
	list, ok := reply.([]any)
	if !ok && reply != nil {
		return nil, badReply(op, thing, "GET", path, status, "no list of bindings")
	}
	found := make([]foundBinding, 0, len(list))
	for _, entry := range list {
		m := replyMap(entry)
		if m == nil {
			return nil, badReply(op, thing, "GET", path, status, "an entry that is no binding")
		}
		location, _ := replyString(m["location"])
		found = append(found, foundBinding{replyArguments(m["arguments"]), location})
	}
	return found, nil
}
