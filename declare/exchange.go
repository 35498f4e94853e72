package declare

import (
	"errors"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare/internal/names"
)

// ExchangeType is how an exchange routes. Types of plugins, such as
// "x-consistent-hash", are written as they are.
type ExchangeType string

// The types that every broker has.
const (
	// ExchangeDirect routes to the bindings whose key is the message's routing key.
	ExchangeDirect ExchangeType = "direct"
	// ExchangeFanout routes to all bindings.
	ExchangeFanout ExchangeType = "fanout"
	// ExchangeTopic routes by patterns: words between dots, "*" for one, "#" for any
	// number of them.
	ExchangeTopic ExchangeType = "topic"
	// ExchangeHeaders routes by application properties, see [Binding].
	ExchangeHeaders ExchangeType = "headers"
)

// Exchange is an exchange to declare. It is always durable: a queue that survives
// a restart of the broker gets nothing without its exchange.
type Exchange struct {
	// Name is 1 to 255 bytes of UTF-8 without line breaks. It can't begin with
	// "amq.".
	Name string

	// Type is how the exchange routes. Empty means [Direct].
	Type ExchangeType

	// AlternateExchange receives what no binding matches. Without it the publisher
	// gets such messages back as released. It may be declared later.
	AlternateExchange string

	// AutoDelete deletes the exchange when its last binding goes.
	AutoDelete bool

	// Internal refuses publishers: only other exchanges may send to it.
	Internal bool

	// Arguments are for what has no field, such as those of a plugin's type.
	// Values are strings, bools, integers, floats or lists of these. The map is
	// neither changed nor kept. RabbitMQ compares only the alternate exchange when
	// the exchange exists already.
	Arguments map[string]any
}

// Validate reports everything that is wrong with x, joined; each part is an
// *[argument.Error].
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
