package declare

import (
	"errors"

	"github.com/hopback/hopback/argument"
)

// ExchangeType is how an exchange routes. Types of plugins, such as
// "x-consistent-hash", are written as they are.
type ExchangeType string

// The types that every broker has.
const (
	// Direct routes to the bindings whose key is the message's routing key.
	Direct ExchangeType = "direct"
	// Fanout routes to all bindings.
	Fanout ExchangeType = "fanout"
	// Topic routes by patterns: words between dots, "*" for one, "#" for any
	// number of them.
	Topic ExchangeType = "topic"
	// Headers routes by application properties, see [Binding].
	Headers ExchangeType = "headers"
)

// Exchange is an exchange to declare. It is always durable: queues outlive the
// broker's restart, and without their exchange would get nothing from then on.
type Exchange struct {
	// Name of the exchange: 1 to 255 bytes of UTF-8 without line breaks, not
	// beginning with "amq.".
	Name string

	// Type is how the exchange routes; empty is [Direct], as on the broker.
	Type ExchangeType

	// AlternateExchange gets what no binding matches; without it such messages
	// are released to their publisher. It needn't exist yet.
	AlternateExchange string

	// AutoDelete deletes the exchange when its last binding goes.
	AutoDelete bool

	// Internal keeps publishers out: only other exchanges may feed it.
	Internal bool

	// Arguments are further ones, such as those of a plugin's exchange type.
	// Values are strings, bools, integers, floats or lists of these. The map is
	// never changed, and not kept. RabbitMQ doesn't compare them when the
	// exchange exists already, but for the alternate exchange.
	Arguments map[string]any
}

// Validate reports everything that is wrong with x, joined; each part is an
// *[argument.Error].
func (x Exchange) Validate() error {
	_, errs := x.declaration()
	return errors.Join(errs...)
}

func (x Exchange) label() string { return label("Exchange", x.Name) }

func (x Exchange) declaration() (map[string]any, []error) {
	c := &collector{label: x.label(), args: map[string]any{}}
	c.fail(checkOwnName(c.label+".Name", x.Name, "choose another name; the broker's own exchanges exist already, and bindings may name them"))
	typ := x.Type
	if typ == "" {
		typ = Direct
	}
	c.fail(checkName(c.label+".Type", string(typ)))
	if x.AlternateExchange != "" {
		c.fail(checkName(c.label+".AlternateExchange", x.AlternateExchange))
		c.args["alternate-exchange"] = x.AlternateExchange
	}
	c.errs = append(c.errs, addNormal(c.args, c.label+".Arguments", x.Arguments, func(what, key string, v any) error {
		if key == "alternate-exchange" {
			return argument.New(what, v, "has a field of its own", "set AlternateExchange instead")
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
