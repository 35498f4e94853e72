package declare

import (
	"errors"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
)

// ExchangeType is how an exchange routes. For an exchange type of a plugin, write its name, such
// as "x-consistent-hash".
type ExchangeType string

// The exchange types of RabbitMQ 4.
const (
	// ExchangeDirect routes to the bindings whose key is the message's routing key.
	ExchangeDirect ExchangeType = "direct"
	// ExchangeFanout routes to all bindings.
	ExchangeFanout ExchangeType = "fanout"
	// ExchangeTopic routes by patterns of words between dots: "*" matches one word, "#" any
	// number of them.
	ExchangeTopic ExchangeType = "topic"
	// ExchangeHeaders routes by application properties: see [Binding].
	ExchangeHeaders ExchangeType = "headers"
	// ExchangeModulusHash routes each message to one of its bindings, chosen by a hash of the
	// routing key, so messages with equal keys reach the same queue. Binding keys don't matter,
	// and a queue with two bindings gets twice its share. If a binding is added or removed, nearly
	// every key moves to another queue. It needs RabbitMQ 4.3. Earlier brokers have it in the
	// plugin rabbitmq_sharding, with another hash function, and refuse it otherwise: the error of
	// [Apply] is [ErrInvalid].
	ExchangeModulusHash ExchangeType = "x-modulus-hash"
)

// Exchange is an exchange to declare. It is always durable, because a durable queue without its
// exchange receives nothing after a restart of the broker.
type Exchange struct {
	// Name is 1 to 255 bytes of UTF-8 without line breaks. It can't start with "amq.". Required.
	Name string

	// Type is how the exchange routes. Default: [ExchangeDirect].
	Type ExchangeType

	// AlternateExchange is the exchange that receives messages that match no binding. Without it,
	// the publisher gets the outcome released for such messages. You can declare it later.
	// Default: none.
	AlternateExchange string

	// AutoDelete deletes the exchange when its last binding is removed. Default: false.
	AutoDelete bool

	// Internal refuses publishers: only other exchanges can send to it. Default: false.
	Internal bool

	// Arguments are for arguments without a field, such as those of a plugin's type. Values are
	// strings, bools, integers, floats, or lists of these. The map is neither changed nor kept.
	// If the exchange exists, RabbitMQ compares only the alternate exchange.
	Arguments map[string]any
}

// Validate returns all errors in x, joined; each one is an *[argument.Error].
func (x Exchange) Validate() error {
	_, errs := x.declaration()
	return errors.Join(errs...)
}

func (x Exchange) path() argument.Path { return names.Label("Exchange", x.Name) }

func (x Exchange) declaration() (map[string]any, []error) {
	c := &collector{at: x.path(), args: map[string]any{}}
	c.fail(names.CheckOwn(c.at.Field("Name"), x.Name, "choose another name; the broker declares its own exchanges, and bindings can name them"))
	typ := x.Type
	if typ == "" {
		typ = ExchangeDirect
	}
	c.fail(names.Check(c.at.Field("Type"), string(typ)))
	if x.AlternateExchange != "" {
		c.fail(names.Check(c.at.Field("AlternateExchange"), x.AlternateExchange))
		c.args["alternate-exchange"] = x.AlternateExchange
	}
	c.errs = append(c.errs, addNormal(c.args, c.at.Field("Arguments"), x.Arguments, func(at argument.Path, key string, v any) error {
		if key == "alternate-exchange" {
			return belongsIn(c.at.Field("AlternateExchange"), at, v)
		}
		return nil
	})...)
	return map[string]any{
		"type":        string(typ),
		"durable":     true,
		"auto_delete": x.AutoDelete,
		"internal":    x.Internal,
		"arguments":   c.args,
	}, c.errs
}
