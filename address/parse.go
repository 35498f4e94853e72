package address

import (
	"strings"

	"github.com/hopback/hopback/argument"
)

// Parse parses a percent-encoded address, such as "/queues/a%2Fb". Use it for addresses from
// configuration or messages; in code, use [Queue] and [Exchange]. The error is an
// *[argument.Error]. [Address.Build] accepts the result and returns its canonical form.
//
//   - Write a slash in a name as "%2F". Percent-encode all characters that RFC 3986 doesn't
//     allow in a path segment, such as spaces and non-ASCII letters.
//   - "+" is a plus sign.
//   - "/exchanges/x/" is the same as "/exchanges/x", with the empty routing key.
func Parse(s string) (Address, error) {
	if rest, ok := strings.CutPrefix(s, queuePrefix); ok {
		return parseQueue(s, rest)
	}
	if rest, ok := strings.CutPrefix(s, exchangePrefix); ok {
		return parseExchange(s, rest)
	}
	if s == "" {
		return Address{}, argument.At(argument.Root("address"), argument.CodeMissing, nil, "is empty", spell)
	}
	if hint := v1Hint(s); hint != "" {
		return Address{}, argument.At(argument.Root("address"), argument.CodeMalformed, s, "is an address of the format v1, which RabbitMQ 4 has deprecated", hint)
	}
	return Address{}, argument.At(argument.Root("address"), argument.CodeMalformed, s, "names neither a queue nor an exchange", spell)
}

const spell = `write "/queues/<queue>", "/exchanges/<exchange>/<routing key>" or "/exchanges/<exchange>", each part percent-encoded`

func parseQueue(s, rest string) (Address, error) {
	if strings.Contains(rest, "/") {
		return Address{}, argument.At(argument.Root("address"), argument.CodeMalformed, s, "has a slash too many",
			`write a slash within the queue's name as "%2F"`)
	}
	name, err := unescape(queueName, rest)
	if err != nil {
		return Address{}, err
	}
	return valid(Queue(name))
}

func parseExchange(s, rest string) (Address, error) {
	xpart, kpart, _ := strings.Cut(rest, "/")
	if strings.Contains(kpart, "/") {
		return Address{}, argument.At(argument.Root("address"), argument.CodeMalformed, s, "has a slash too many",
			`write a slash within the exchange's name or the routing key as "%2F"`)
	}
	name, err := unescape(exchangeName, xpart)
	if err != nil {
		return Address{}, err
	}
	key, err := unescape(routingKey, kpart)
	if err != nil {
		return Address{}, err
	}
	return valid(Exchange(name, key))
}

func valid(a Address) (Address, error) {
	if err := a.Validate(); err != nil {
		return Address{}, err
	}
	return a, nil
}

// v1Hint returns how to write an address of format v1 in format v2, or "" if s doesn't look like
// one.
func v1Hint(s string) string {
	for _, v1 := range []struct{ prefix, remedy string }{
		{"/queue/", `write "/queues/<queue>", the name percent-encoded`},
		{"/amq/queue/", `write "/queues/<queue>", the name percent-encoded`},
		{"/exchange/", `write "/exchanges/<exchange>/<routing key>", each part percent-encoded`},
		{"/topic/", `write "/exchanges/amq.topic/<routing key>", the key percent-encoded`},
	} {
		if strings.HasPrefix(s, v1.prefix) {
			return v1.remedy
		}
	}
	if !strings.HasPrefix(s, "/") {
		return `if it is a queue's name, use address.Queue or write "/queues/<queue>"`
	}
	return ""
}
