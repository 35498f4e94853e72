package address

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
)

const (
	// MaxName is the longest name of a queue or an exchange, in bytes after
	// decoding. AMQP 0-9-1, the definitions file and the HTTP API can't carry a
	// longer one. The AMQP 1.0 side of the broker doesn't check, so such a
	// queue would exist and be out of reach for every other tool.
	MaxName = 255

	// MaxRoutingKey is the longest routing key, in bytes after decoding. It is
	// ours, so that an address always fits into one frame; the broker routed
	// keys of 50,000 bytes. Mind that AMQP 0-9-1 can carry only 255: keep to
	// that where one of its clients consumes the message or makes the binding.
	MaxRoutingKey = 4096
)

type kind uint8

const (
	none kind = iota
	queue
	exchange
)

const (
	queuePrefix    = "/queues/"
	exchangePrefix = "/exchanges/"
)

// Address names a queue, or an exchange with a routing key. It is a small
// comparable value; two addresses are equal when they name the same thing.
//
// The zero Address names nothing: IsZero reports it and Build refuses it.
type Address struct {
	kind kind
	name string
	key  string
}

// Queue is the address of a queue, to send to or to receive from. Names are
// plain text, not percent-encoded. The name is checked by Validate and Build.
func Queue(name string) Address { return Address{kind: queue, name: name} }

// Exchange is the address of an exchange and the routing key that messages sent
// there carry; both are plain text, not percent-encoded. An empty routing key
// is allowed. They are checked by Validate and Build.
func Exchange(name, routingKey string) Address {
	return Address{kind: exchange, name: name, key: routingKey}
}

// IsZero reports whether a is the zero Address, which names nothing.
func (a Address) IsZero() bool { return a == Address{} }

// IsQueue reports whether a names a queue.
func (a Address) IsQueue() bool { return a.kind == queue }

// IsExchange reports whether a names an exchange.
func (a Address) IsExchange() bool { return a.kind == exchange }

// QueueName is the queue's name, decoded; empty when a doesn't name a queue.
func (a Address) QueueName() string {
	if a.kind != queue {
		return ""
	}
	return a.name
}

// ExchangeName is the exchange's name, decoded; empty when a doesn't name an
// exchange.
func (a Address) ExchangeName() string {
	if a.kind != exchange {
		return ""
	}
	return a.name
}

// RoutingKey is the routing key, decoded; empty when there is none.
func (a Address) RoutingKey() string { return a.key }

// Build returns the address as the broker reads it, percent-encoded. A failure
// is an *[argument.Error], as from Validate.
func (a Address) Build() (string, error) {
	if err := a.Validate(); err != nil {
		return "", err
	}
	return a.encode(), nil
}

// String is the address for people and logs. It never fails: what Build would
// refuse is shown, percent-encoded, all the same, so that nothing in it can
// break a log line. The zero Address is "(no address)".
func (a Address) String() string {
	if a.kind == none {
		return "(no address)"
	}
	return a.encode()
}

func (a Address) encode() string {
	prefix := queuePrefix
	if a.kind == exchange {
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

// Validate reports why the broker, or the tools around it, couldn't use a; nil
// when they can. A failure is an *[argument.Error]. It doesn't ask whether the
// queue or exchange exists.
func (a Address) Validate() error {
	switch a.kind {
	case queue:
		return checkName("queue name", a.name)
	case exchange:
		if a.name == "" || a.name == "amq.default" {
			// Both spellings are refused: 4.0 and 4.3 answer
			// bad_address_string to /exchanges//key and to
			// /exchanges/amq.default/key.
			return argument.New("exchange name", a.name, "is the default exchange, which the broker doesn't allow in an address",
				"name the queue that the routing key stands for: address.Queue(routingKey)")
		}
		if err := checkName("exchange name", a.name); err != nil {
			return err
		}
		return checkKey("routing key", a.key)
	default:
		return argument.New("address", nil, "is the zero Address, which names nothing",
			"make one with address.Queue, address.Exchange or address.Parse")
	}
}

func checkName(what, name string) error {
	switch {
	case name == "":
		return argument.New(what, nil, "is empty", "give it at least one character")
	case len(name) > MaxName:
		return argument.New(what, name, fmt.Sprintf("has %d bytes", len(name)), fmt.Sprintf("use at most %d bytes", MaxName))
	case !utf8.ValidString(name):
		return argument.New(what, name, "isn't valid UTF-8", "encode names as UTF-8")
	case strings.ContainsAny(name, "\r\n"):
		return argument.New(what, name, "has a line break", "remove the carriage return or line feed")
	}
	return nil
}

func checkKey(what, key string) error {
	switch {
	case len(key) > MaxRoutingKey:
		return argument.New(what, key, fmt.Sprintf("has %d bytes", len(key)), fmt.Sprintf("use at most %d bytes", MaxRoutingKey))
	case !utf8.ValidString(key):
		return argument.New(what, key, "isn't valid UTF-8", "encode routing keys as UTF-8")
	}
	return nil
}
