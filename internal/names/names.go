// Package names checks names, keys and paths.
package names

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/brokername"
)

const reserved = "amq."

// Check refuses the names that the broker refuses, and those that end the
// management session or reach nothing: invalid UTF-8 and "..", and ".".
func Check(at argument.Path, name string) error {
	if name == "." || name == ".." {
		// The broker normalises a request's path after decoding it, so "." and
		// ".." vanish from it however they are encoded.
		return argument.At(at, argument.CodeReserved, name, "is special in the broker's management paths", "choose another name")
	}
	return brokername.Check(at, name)
}

// CheckOwn is Check for a resource that is to be declared or deleted: the broker reserves the
// prefix "amq.".
func CheckOwn(at argument.Path, name, remedy string) error {
	if err := Check(at, name); err != nil {
		return err
	}
	if strings.HasPrefix(name, reserved) {
		return argument.At(at, argument.CodeReserved, name, `starts with "amq.", which the broker reserves`, remedy)
	}
	return nil
}

// CheckKey refuses the routing keys that the broker refuses.
func CheckKey(at argument.Path, key string) error { return brokername.CheckKey(at, key) }

// Label is the path of a value in an error, such as QuorumQueue("orders").
func Label(kind, name string) argument.Path {
	const limit = 64
	if len(name) > limit {
		return argument.Root(fmt.Sprintf("%s(%.*q…)", kind, limit, name))
	}
	return argument.Root(fmt.Sprintf("%s(%q)", kind, name))
}

// QueuePath is the path of a queue at the management node.
func QueuePath(name string) string { return "/queues/" + address.Escape(name) }

// ExchangePath is the path of an exchange at the management node.
func ExchangePath(name string) string { return "/exchanges/" + address.Escape(name) }

// Reserved reports whether an exchange is the default one or one of those that every new virtual
// host has.
func Reserved(exchange string) bool { return exchange == "" || strings.HasPrefix(exchange, reserved) }
