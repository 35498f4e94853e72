// Package brokername checks the names and routing keys that RabbitMQ takes. Packages
// address and declare share it.
package brokername

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
)

const (
	// Max is the longest name of a queue or an exchange, in bytes.
	Max = 255
	// MaxKey is the longest routing key, in bytes.
	MaxKey = 4096
)

// Check refuses names that are empty, too long, no UTF-8, or on two lines.
func Check(at argument.Path, name string) error {
	switch {
	case name == "":
		return argument.At(at, argument.CodeMissing, nil, "is empty", "give a name of at least one character")
	case len(name) > Max:
		return argument.At(at, argument.CodeTooLong, name, fmt.Sprintf("has %d bytes", len(name)), fmt.Sprintf("use at most %d bytes", Max))
	case !utf8.ValidString(name):
		return argument.At(at, argument.CodeMalformed, name, "isn't valid UTF-8", "encode names as UTF-8")
	case strings.ContainsAny(name, "\r\n"):
		return argument.At(at, argument.CodeMalformed, name, "has a line break", "remove the carriage return or line feed")
	}
	return nil
}

// CheckKey refuses routing keys that are too long or no UTF-8.
func CheckKey(at argument.Path, key string) error {
	switch {
	case len(key) > MaxKey:
		return argument.At(at, argument.CodeTooLong, key, fmt.Sprintf("has %d bytes", len(key)), fmt.Sprintf("use at most %d bytes", MaxKey))
	case !utf8.ValidString(key):
		return argument.At(at, argument.CodeMalformed, key, "isn't valid UTF-8", "encode routing keys as UTF-8")
	}
	return nil
}
