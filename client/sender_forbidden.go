package client

import (
	"errors"
	"strings"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/address"
)

// access is what a link may have sent against a missing permission. RabbitMQ checks the permission for
// a topic, and for the exchange of a message that names its own, with each message, and ends the
// session over the first that lacks it. It has read none of the messages behind that one.
type access struct {
	known bool
	text  string // the broker's; empty: the link ended for another reason
	seq   int64  // of the first message that it names; 0: none
}

// learn is called with the first message of a link that gets no answer, before that one is taken out
// of the unanswered ones, with mu held.
func (a *answers) learn(err error) {
	if a.access.known {
		return
	}
	a.access.known = true
	remote, ok := errors.AsType[*amqp.Error](err)
	if !ok || remote == nil || remote.Condition != amqp.ErrCondUnauthorizedAccess {
		return
	}
	a.access.text = remote.Description
	for x := a.oldest; x != nil; x = x.next {
		if names(remote.Description, a.s.target, x.msg) {
			a.access.seq = x.out.seq
			return
		}
	}
}

// forbidden reports whether the link ended since the user may not publish this message, or one with
// the same address.
func (a *answers) forbidden(x *sent) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.access.seq > 0 && x.out.seq >= a.access.seq && names(a.access.text, a.s.target, x.msg)
}

// unread reports whether the broker has certainly not read the message, since it ended the session
// over an earlier one.
func (a *answers) unread(x *sent) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.access.seq > 0 && x.out.seq > a.access.seq
}

// names reports whether RabbitMQ's text about a missing permission names what m was published to
// (TestAPublishThatATopicPermissionForbids). The names in it are the sender's, and not escaped.
func names(text, target string, m *amqp.Message) bool {
	if target == "" {
		target = addressOf(m)
	}
	to, err := address.Parse(target)
	if err != nil {
		return false
	}
	exchange := to.ExchangeName()
	if to.IsQueue() {
		exchange = "amq.default"
	}
	in := "exchange '" + exchange + "' in vhost '"
	if strings.HasPrefix(text, "write access to "+in) || strings.HasPrefix(text, "forbidden to publish to internal "+in) {
		return true
	}
	for _, key := range append(ccOf(m), to.RoutingKey()) {
		if strings.HasPrefix(text, "write access to topic '"+key+"' in "+in) {
			return true
		}
	}
	return false
}

// ccOf are the message's additional routing keys.
func ccOf(m *amqp.Message) []string {
	const cc = "x-cc"
	list, ok := m.Annotations[cc].([]any)
	if !ok {
		list, _ = m.Annotations[amqp.Symbol(cc)].([]any)
	}
	keys := make([]string, 0, len(list)+1)
	for _, key := range list {
		if text, ok := key.(string); ok {
			keys = append(keys, text)
		}
	}
	return keys
}
