// Package names checks names, keys and paths.
package names

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
)

const reserved = "amq."

// Check refuses the names that the broker refuses, and those that end the
// management session or reach nothing: invalid UTF-8 and "..", and ".".
func Check(what, name string) error {
	switch {
	case name == "":
		return argument.New(what, nil, "is empty", "give a name")
	case name == "." || name == "..":
		// The broker normalises a request's path after decoding it, so "." and
		// ".." vanish from it however they are encoded.
		return argument.New(what, name, "is a step in a path to the broker's management node", "choose another name")
	case len(name) > address.MaxName:
		return argument.New(what, name, fmt.Sprintf("has %d bytes", len(name)), fmt.Sprintf("use at most %d bytes", address.MaxName))
	case !utf8.ValidString(name):
		return argument.New(what, name, "isn't valid UTF-8", "encode names as UTF-8")
	case strings.ContainsAny(name, "\r\n"):
		return argument.New(what, name, "has a line break", "remove the carriage return or line feed")
	}
	return nil
}

// CheckOwn is Check for something that is to be declared or deleted:
// the broker keeps the prefix "amq." for itself.
func CheckOwn(what, name, remedy string) error {
	if err := Check(what, name); err != nil {
		return err
	}
	if strings.HasPrefix(name, reserved) {
		return argument.New(what, name, `begins with "amq.", which the broker keeps for itself`, remedy)
	}
	return nil
}

// CheckKey refuses the routing keys that the broker refuses.
func CheckKey(what, key string) error {
	switch {
	case len(key) > address.MaxRoutingKey:
		return argument.New(what, key, fmt.Sprintf("has %d bytes", len(key)), fmt.Sprintf("use at most %d bytes", address.MaxRoutingKey))
	case !utf8.ValidString(key):
		return argument.New(what, key, "isn't valid UTF-8", "encode keys as UTF-8")
	}
	return nil
}

// Label names a value in an error, such as QuorumQueue("orders").
func Label(kind, name string) string {
	const limit = 64
	if len(name) > limit {
		return fmt.Sprintf("%s(%.*q…)", kind, limit, name)
	}
	return fmt.Sprintf("%s(%q)", kind, name)
}

// QueuePath is the path of a queue at the management node.
func QueuePath(name string) string { return "/queues/" + address.Escape(name) }

// ExchangePath is the path of an exchange at the management node.
func ExchangePath(name string) string { return "/exchanges/" + address.Escape(name) }

// Reserved reports whether an exchange is the default one or one of those that every
// virtual host has from its birth.
func Reserved(exchange string) bool { return exchange == "" || strings.HasPrefix(exchange, reserved) }
