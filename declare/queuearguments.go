package declare

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The types of queues, as x-queue-type names them.
const (
	typeQuorum  = "quorum"
	typeClassic = "classic"
	typeStream  = "stream"
)

// queueArgument is an argument that RabbitMQ 4.0 to 4.3 knows. The broker takes
// any name and any value without a word, and means its default by what it can't
// read; so they are checked here.
type queueArgument struct {
	// types of queues that read it.
	types []string
	// wrong says what is wrong with a value, in the form of normal; "" if nothing.
	wrong func(v any) string
	// since is the first 4.x that reads it; 0 for all.
	since int
	// policy is whether a policy can set it, and so change it in place.
	policy bool
}

// queueArguments is taken from the capabilities that the queue types of RabbitMQ
// 4.0.5 and 4.3.6 report, and x-quorum-target-group-size from the module that
// grows quorum queues.
var queueArguments = map[string]queueArgument{
	"x-queue-type":              {types: []string{typeQuorum, typeClassic, typeStream}, wrong: oneOf(typeQuorum, typeClassic, typeStream)},
	"x-message-ttl":             {types: []string{typeQuorum, typeClassic}, wrong: between(0, maxMillis), policy: true},
	"x-expires":                 {types: []string{typeQuorum, typeClassic}, wrong: between(1, maxMillis), policy: true},
	"x-max-length":              {types: []string{typeQuorum, typeClassic}, wrong: atLeast(0), policy: true},
	"x-max-length-bytes":        {types: []string{typeQuorum, typeClassic, typeStream}, wrong: atLeast(0), policy: true},
	"x-overflow":                {types: []string{typeQuorum, typeClassic}, wrong: oneOf(string(DropHead), string(RejectPublish), string(RejectPublishDLX)), policy: true},
	"x-dead-letter-exchange":    {types: []string{typeQuorum, typeClassic}, wrong: isText, policy: true},
	"x-dead-letter-routing-key": {types: []string{typeQuorum, typeClassic}, wrong: isText, policy: true},
	"x-single-active-consumer":  {types: []string{typeQuorum, typeClassic}, wrong: isBool},
	"x-queue-leader-locator":    {types: []string{typeQuorum, typeClassic, typeStream}, wrong: oneOf(string(ClientLocal), string(Balanced)), policy: true},

	"x-dead-letter-strategy":          {types: []string{typeQuorum}, wrong: oneOf("at-most-once", "at-least-once"), policy: true},
	"x-delivery-limit":                {types: []string{typeQuorum}, wrong: atLeast(-1), policy: true},
	"x-quorum-initial-group-size":     {types: []string{typeQuorum}, wrong: atLeast(1)},
	"x-quorum-target-group-size":      {types: []string{typeQuorum}, wrong: atLeast(1), policy: true},
	"x-max-in-memory-length":          {types: []string{typeQuorum}, wrong: atLeast(0), policy: true}, // read, and without effect in 4.x
	"x-max-in-memory-bytes":           {types: []string{typeQuorum}, wrong: atLeast(0), policy: true},
	"x-consumer-timeout":              {types: []string{typeQuorum}, wrong: atLeast(1), since: 3, policy: true},
	"x-consumer-disconnected-timeout": {types: []string{typeQuorum}, wrong: atLeast(1), since: 3, policy: true},
	"x-delayed-retry-type":            {types: []string{typeQuorum}, wrong: oneOf("disabled", string(RetryAll), string(RetryFailed), string(RetryReturned)), since: 3, policy: true},
	"x-delayed-retry-min":             {types: []string{typeQuorum}, wrong: atLeast(1), since: 3, policy: true},
	"x-delayed-retry-max":             {types: []string{typeQuorum}, wrong: atLeast(1), since: 3, policy: true},

	"x-max-priority":         {types: []string{typeClassic}, wrong: between(0, 255)},
	"x-queue-mode":           {types: []string{typeClassic}, wrong: oneOf("default", "lazy"), policy: true}, // read, and without effect in 4.x
	"x-queue-version":        {types: []string{typeClassic}, wrong: between(1, 2), policy: true},
	"x-queue-master-locator": {types: []string{typeClassic}, wrong: oneOf("client-local", "min-masters", "random"), policy: true},

	"x-max-age":                       {types: []string{typeStream}, wrong: isAge, policy: true},
	"x-stream-max-segment-size-bytes": {types: []string{typeStream}, wrong: between(1, maxSegmentSize), policy: true},
	"x-stream-filter-size-bytes":      {types: []string{typeStream}, wrong: between(minFilterSize, maxFilterSize), policy: true},
	"x-initial-cluster-size":          {types: []string{typeStream}, wrong: atLeast(1), policy: true},
}

// wrongArgument says what is wrong with an argument of a queue of a type, and
// what to do: "" when nothing is. unknown is whether only its name is.
func wrongArgument(queueType, key string, v any) (problem, remedy string, unknown bool) {
	a, known := queueArguments[key]
	if !known {
		return "is none that RabbitMQ 4 knows, so it does nothing", "check its spelling, or leave it out", true
	}
	if !slices.Contains(a.types, queueType) {
		return fmt.Sprintf("does nothing at a %s queue, but at one of the type %s", queueType, strings.Join(a.types, " or ")), "leave it out, or take that type", true
	}
	if problem := a.wrong(v); problem != "" {
		return problem + ", which the broker takes without a word and doesn't act on", "write it with the type and value that the broker reads", false
	}
	return "", "", false
}

func isText(v any) string {
	if _, ok := v.(string); ok {
		return ""
	}
	return "is " + typeName(v) + ", and should be a string"
}

func isBool(v any) string {
	if _, ok := v.(bool); ok {
		return ""
	}
	return "is " + typeName(v) + ", and should be a bool"
}

func oneOf(words ...string) func(any) string {
	return func(v any) string {
		if problem := isText(v); problem != "" {
			return problem
		}
		if slices.Contains(words, v.(string)) {
			return ""
		}
		return "should be one of " + strings.Join(words, ", ")
	}
}

func atLeast(least int64) func(any) string {
	return func(v any) string {
		n, ok := v.(int64)
		switch {
		case !ok:
			return "is " + typeName(v) + ", and should be an integer"
		case n < least:
			return fmt.Sprintf("should be at least %d", least)
		}
		return ""
	}
}

func between(least, most int64) func(any) string {
	return func(v any) string {
		if problem := atLeast(least)(v); problem != "" {
			return problem
		}
		if v.(int64) > most {
			return fmt.Sprintf("should be at most %d", most)
		}
		return ""
	}
}

var agePattern = regexp.MustCompile(`^[0-9]+[YMDhms]$`)

func isAge(v any) string {
	if problem := isText(v); problem != "" {
		return problem
	}
	if agePattern.MatchString(v.(string)) {
		return ""
	}
	return "should be a number with Y, M, D, h, m or s behind it"
}

// typeName is what people call the type of a value in the form of normal.
func typeName(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case string:
		return "a string"
	case bool:
		return "a bool"
	case int64:
		return "an integer"
	case float64:
		return "a float"
	case []any:
		return "a list"
	case map[string]any:
		return "a map"
	}
	return fmt.Sprintf("a %T", v)
}
