package declare

import (
	"context"
	"errors"

	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/internal/values"
)

// QueueInfo is the state of a queue.
type QueueInfo struct {
	Name  string `json:"name"`
	VHost string `json:"vhost,omitempty"`
	// Type is "quorum", "classic", or "stream".
	Type       string `json:"type"`
	Durable    bool   `json:"durable"`
	AutoDelete bool   `json:"auto_delete"`
	Exclusive  bool   `json:"exclusive"`
	// Leader is the node that leads the queue. It is empty while there is none. Replicas are the
	// nodes that have a copy, up or down.
	Leader   string   `json:"leader,omitempty"`
	Replicas []string `json:"replicas,omitempty"`
	// Messages is the number of ready messages. It doesn't include messages that consumers hold,
	// that wait for at-least-once dead-lettering, or that are delayed (4.3).
	Messages uint64 `json:"messages"`
	// Consumers is the number of consumers.
	Consumers uint64 `json:"consumers"`
	// Arguments are the queue's arguments. Values are strings, bools, int64, float64, nil, and
	// lists of these.
	Arguments map[string]any `json:"arguments"`

	// Only check.Read with the HTTP API sets the following fields. Counts are some seconds old.
	// Counted is false until the broker has first collected them.
	Counted bool `json:"counted,omitempty"`
	// Online lists the replicas that are up. State is "running" in normal operation.
	Online []string `json:"online,omitempty"`
	State  string   `json:"state,omitempty"`
	// MessagesUnacknowledged are delivered to consumers and not settled. MessagesDeadLettering
	// wait for at-least-once dead-lettering. MessagesDelayed wait for their delivery time (4.3).
	MessagesUnacknowledged uint64 `json:"messages_unacknowledged,omitempty"`
	MessagesDeadLettering  uint64 `json:"messages_dead_lettering,omitempty"`
	MessagesDelayed        uint64 `json:"messages_delayed,omitempty"`
}

// Inspect returns the state of a queue. If the queue doesn't exist, the error matches
// [ErrNotFound].
func Inspect(ctx context.Context, r Requester, queue string) (QueueInfo, error) {
	if err := errors.Join(checkRequester(r), names.Check(queueName, queue)); err != nil {
		return QueueInfo{}, err
	}
	resource, path := Resource{kindQueue, queue}, names.QueuePath(queue)
	status, reply, err := request(ctx, r, opInspect, resource, "GET", path, nil)
	if err != nil {
		return QueueInfo{}, err
	}
	info, missing := parseQueueInfo(reply)
	if missing != "" {
		return QueueInfo{}, badReply(opInspect, resource, "GET", path, status, "no "+missing)
	}
	return info, nil
}

// parseQueueInfo reads a reply; missing is the name of a required field that the reply lacks.
// Fields that are only missing while a queue has no leader aren't required.
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

// Bindings lists the bindings that have the same Source, destination, and Key as of, with any
// Match, Headers, and Arguments. AMQP has no wider listing. If an end doesn't exist, the result is
// empty, without an error.
func Bindings(ctx context.Context, r Requester, of Binding) ([]Binding, error) {
	c := &collector{at: of.path()}
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

// foundBinding is what distinguishes bindings with the same ends and key.
type foundBinding struct {
	arguments map[string]any
	location  string
}

// binding splits the arguments into headers and others, as in a declaration.
func (f foundBinding) binding(of Binding) Binding {
	b := Binding{Source: of.Source, Queue: of.Queue, Exchange: of.Exchange, Key: of.Key}
	var match string
	match, b.Headers, b.Arguments = values.SplitBinding(f.arguments)
	b.Match = Match(match)
	return b
}

func listBindings(ctx context.Context, r Requester, op string, of Binding) ([]foundBinding, error) {
	resource, path := Resource{kindBinding, of.describe()}, of.listPath()
	status, reply, err := request(ctx, r, op, resource, "GET", path, nil)
	if err != nil {
		return nil, err
	}
	list, ok := reply.([]any)
	if !ok && reply != nil {
		return nil, badReply(op, resource, "GET", path, status, "no list of bindings")
	}
	found := make([]foundBinding, 0, len(list))
	for _, entry := range list {
		m := replyMap(entry)
		if m == nil {
			return nil, badReply(op, resource, "GET", path, status, "an entry that isn't a binding")
		}
		location, _ := replyString(m["location"])
		found = append(found, foundBinding{replyArguments(m["arguments"]), location})
	}
	return found, nil
}
