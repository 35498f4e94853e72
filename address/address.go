package address

import (
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

// What the errors of this package are about.
var (
	// The arguments that this package's errors name.
	queueName    = argument.Root("queue name")
	exchangeName = argument.Root("exchange name")
	routingKey   = argument.Root("routing key")
)

type kind uint8

const (
	kindNone kind = iota
	kindQueue
	kindExchange
)

const (
	queuePrefix    = "/queues/"
	exchangePrefix = "/exchanges/"
)

// Address names a queue, or an exchange with a routing key. It is a small comparable value; two
// addresses are equal if they name the same thing.
//
// The zero Address names nothing: [Address.IsZero] reports it, and [Address.Build] returns an
// error.
type Address struct {
	kind kind
	name string
	key  string
}

// Queue returns the address of a queue, to send to or to receive from. The name is plain text,
// not percent-encoded. [Address.Validate] and [Address.Build] check it.
func Queue(name string) Address { return Address{kind: kindQueue, name: name} }

// Exchange returns the address of an exchange, with the routing key of messages sent to it. Both
// are plain text, not percent-encoded. The key may be empty. [Address.Validate] and
// [Address.Build] check them.
func Exchange(name, routingKey string) Address {
	return Address{kind: kindExchange, name: name, key: routingKey}
}

// IsZero reports whether a is the zero Address, which names nothing.
func (a Address) IsZero() bool { return a == Address{} }

// IsQueue reports whether a names a queue.
func (a Address) IsQueue() bool { return a.kind == kindQueue }

// IsExchange reports whether a names an exchange.
func (a Address) IsExchange() bool { return a.kind == kindExchange }

// QueueName returns the queue's name, not percent-encoded. It is empty if a doesn't name a
// queue.
func (a Address) QueueName() string {
	if a.kind != kindQueue {
		return ""
	}
	return a.name
}

// ExchangeName returns the exchange's name, not percent-encoded. It is empty if a doesn't name
// an exchange.
func (a Address) ExchangeName() string {
	if a.kind != kindExchange {
		return ""
	}
	return a.name
}

// RoutingKey returns the routing key, not percent-encoded. It is empty if there is none.
func (a Address) RoutingKey() string { return a.key }

// Build returns the address in the percent-encoded form that the broker expects, such as
// "/queues/a%2Fb". The error is an *[argument.Error], as from [Address.Validate].
func (a Address) Build() (string, error) {
	if err := a.Validate(); err != nil {
		return "", err
	}
	return a.encode(), nil
}

// String returns the address for people and logs. It works for invalid addresses, too, and
// always percent-encodes them, so they can't break a log line. The zero Address is "(no
// address)".
func (a Address) String() string {
	if a.kind == kindNone {
		return "(no address)"
	}
	return a.encode()
}

func (a Address) encode() string {
	prefix := queuePrefix
	if a.kind == kindExchange {
		prefix = exchangePrefix
	}
	b := make([]byte, 0, len(prefix)+len(a.name)+len(a.key)+8)
	b = append(b, prefix...)
	b = appendEscaped(b, a.name)
	if a.key != "" {
		b = append(b, '/')
		b = appendEscaped(b, a.key)
	}
	return string(b)
}

// Validate returns an *[argument.Error] if the broker or other tools can't use a. It doesn't
// check whether the queue or exchange exists.
func (a Address) Validate() error {
	switch a.kind {
	case kindQueue:
		return brokername.Check(queueName, a.name)
	case kindExchange:
		if a.name == "" || a.name == "amq.default" {
			// Both spellings are refused: 4.0 and 4.3 answer
			// bad_address_string to /exchanges//key and to
			// /exchanges/amq.default/key.
			return argument.At(exchangeName, argument.CodeUnsupported, a.name, "is the default exchange, which the broker doesn't allow in an address",
				"name the queue that the routing key stands for: address.Queue(routingKey)")
		}
		if err := brokername.Check(exchangeName, a.name); err != nil {
			return err
		}
		return brokername.CheckKey(routingKey, a.key)
	default:
		return argument.At(argument.Root("address"), argument.CodeMissing, nil, "is the zero Address, which names nothing",
			"make one with address.Queue, address.Exchange or address.Parse")
	}
}
