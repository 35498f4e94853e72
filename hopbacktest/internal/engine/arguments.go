package engine

import (
	"fmt"
	"slices"
	"strconv"
)

// The arguments that queues have, by type and version. What no type has is ignored; what
// another type has is refused.
var (
	argumentsQuorum40 = []string{
		"x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy", "x-expires", "x-max-length",
		"x-max-length-bytes", "x-max-in-memory-length", "x-max-in-memory-bytes", "x-overflow", "x-single-active-consumer",
		"x-queue-type", "x-quorum-initial-group-size", "x-delivery-limit", "x-message-ttl", "x-queue-leader-locator",
	}
	argumentsQuorum43 = slices.Concat(argumentsQuorum40, []string{
		"x-consumer-disconnected-timeout", "x-consumer-timeout", "x-delayed-retry-type", "x-delayed-retry-min", "x-delayed-retry-max",
	})
	argumentsQuorum44 = slices.Concat(argumentsQuorum43, []string{"x-member-placement-tag"})
	argumentsClassic  = []string{
		"x-expires", "x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-length", "x-max-length-bytes",
		"x-max-priority", "x-overflow", "x-queue-mode", "x-queue-version", "x-single-active-consumer", "x-queue-type",
		"x-queue-master-locator", "x-queue-leader-locator",
	}
	argumentsStream = []string{
		"x-max-length-bytes", "x-queue-type", "x-max-age", "x-stream-max-segment-size-bytes", "x-stream-filter-size-bytes",
		"x-initial-cluster-size", "x-queue-leader-locator",
	}
)

func (v *version) arguments(kind string) []string {
	switch {
	case kind == typeClassic:
		return argumentsClassic
	case kind == typeStream:
		return argumentsStream
	case v.newest:
		return argumentsQuorum44
	case v.newer:
		return argumentsQuorum43
	}
	return argumentsQuorum40
}

// checks are what RabbitMQ asks of arguments' values, in its order. The texts are the terms
// that it prints.
var checks = []struct {
	name  string
	check func(a argument, all table) string
}{
	{"x-expires", func(a argument, _ table) string {
		if a.value == int64(0) {
			return "{value_zero,0}"
		}
		return checkExpiry(a)
	}},
	{"x-message-ttl", func(a argument, _ table) string { return checkExpiry(a) }},
	{"x-dead-letter-exchange", checkText},
	{"x-dead-letter-routing-key", func(a argument, all table) string {
		if a.kind == argText {
			if _, ok := all.get("x-dead-letter-exchange"); !ok {
				return "routing_key_but_no_dlx_defined"
			}
		}
		return checkText(a, all)
	}},
	{"x-dead-letter-strategy", oneOf("invalid_dlx_strategy", "at-most-once", "at-least-once")},
	{"x-max-length", checkNatural},
	{"x-max-length-bytes", checkNatural},
	{"x-max-in-memory-length", checkNatural},
	{"x-max-in-memory-bytes", checkNatural},
	{"x-max-priority", func(a argument, all table) string {
		if text := checkNatural(a, all); text != "" {
			return text
		}
		if a.value.(int64) > 255 {
			return fmt.Sprintf("{max_value_exceeded,%d}", a.value)
		}
		return ""
	}},
	{"x-overflow", oneOf("invalid_overflow", "drop-head", "reject-publish", "reject-publish-dlx")},
	{"x-queue-mode", func(a argument, all table) string {
		if text := checkText(a, all); text != "" {
			return text
		}
		if mode := a.value.(string); mode != "default" && mode != "lazy" {
			return fmt.Sprintf("%q", "unsupported queue mode '"+mode+"'")
		}
		return ""
	}},
	{"x-queue-version", func(a argument, all table) string {
		if text := checkNatural(a, all); text != "" {
			return text
		}
		if n := a.value.(int64); n != 1 && n != 2 {
			return fmt.Sprintf("%q", "unsupported queue version '"+strconv.FormatInt(n, 10)+"'")
		}
		return ""
	}},
	{"x-single-active-consumer", func(a argument, _ table) string {
		if a.kind != argBool {
			return "{unacceptable_type," + a.kind + "}"
		}
		return ""
	}},
	{"x-consumer-timeout", checkNatural},
	{"x-consumer-disconnected-timeout", checkNatural},
	{"x-quorum-initial-group-size", checkSize},
	{"x-max-age", checkAge},
	{"x-stream-max-segment-size-bytes", checkNatural},
	{"x-stream-filter-size-bytes", checkNatural},
	{"x-initial-cluster-size", checkSize},
	{"x-queue-leader-locator", oneOf("invalid_queue_locator_arg", "client-local", "balanced")},
	{"x-member-placement-tag", func(a argument, all table) string {
		if a.value == "" {
			return "invalid_member_placement_tag_arg"
		}
		return checkText(a, all)
	}},
}

func checkInt(a argument) string {
	if a.class() != "int" {
		return fmt.Sprintf("%q", "expected integer, got "+a.kind)
	}
	return ""
}

func checkNatural(a argument, _ table) string {
	if text := checkInt(a); text != "" {
		return text
	}
	if n := a.value.(int64); n < 0 {
		return fmt.Sprintf("{value_negative,%d}", n)
	}
	return ""
}

func checkSize(a argument, all table) string {
	if text := checkNatural(a, all); text != "" {
		return text
	}
	if a.value == int64(0) {
		return "{value_zero,0}"
	}
	return ""
}

// maxExpiry is ten years in milliseconds.
const maxExpiry = 315_360_000_000

func checkExpiry(a argument) string {
	if text := checkInt(a); text != "" {
		return text
	}
	switch n := a.value.(int64); {
	case n > maxExpiry:
		return fmt.Sprintf("{value_too_large,%d}", n)
	case n < 0:
		return fmt.Sprintf("{value_negative,%d}", n)
	}
	return ""
}

func checkText(a argument, _ table) string {
	if a.kind != argText {
		return "{unacceptable_type," + a.kind + "}"
	}
	return ""
}

func oneOf(invalid string, values ...string) func(argument, table) string {
	return func(a argument, all table) string {
		if text := checkText(a, all); text != "" {
			return text
		}
		if !slices.Contains(values, a.value.(string)) {
			return invalid
		}
		return ""
	}
}

func checkAge(a argument, all table) string {
	if text := checkText(a, all); text != "" {
		return text
	}
	s := a.value.(string)
	digits := 0
	for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
		digits++
	}
	n, err := strconv.ParseInt(s[:digits], 10, 64)
	if err != nil || n <= 0 || !slices.Contains([]string{"Y", "M", "D", "h", "m", "s"}, s[digits:]) {
		return "invalid_max_age"
	}
	return ""
}

// checkArguments returns what is wrong with a new queue's arguments, which include its type.
func (v *version) checkArguments(args table, what string) (kind, problem string) {
	a, _ := args.get("x-queue-type")
	invalid := func(name, text string) string { return "invalid arg '" + name + "' for " + what + ": " + text }
	if text := checkText(a, args); text != "" {
		return "", invalid("x-queue-type", text)
	}
	kind = a.value.(string)
	if kind != typeQuorum && kind != typeClassic && kind != typeStream {
		return "", invalid("x-queue-type", fmt.Sprintf("%q", "unsupported queue type '"+kind+"'"))
	}
	mine := v.arguments(kind)
	for _, c := range checks {
		if a, ok := args.get(c.name); ok && slices.Contains(mine, c.name) && (c.name != "x-queue-mode" || !v.newer) {
			if text := c.check(a, args); text != "" {
				return "", invalid(c.name, text)
			}
		}
	}
	for _, a := range args {
		if slices.Contains(mine, a.name) {
			continue
		}
		for _, other := range []string{typeClassic, typeQuorum, typeStream} {
			if slices.Contains(v.arguments(other), a.name) {
				return "", "invalid arg '" + a.name + "' for " + what + " of queue type rabbit_" + kind + "_queue"
			}
		}
	}
	return kind, ""
}
