// Package queuearg has the queue arguments that RabbitMQ 4.0 to 4.4 reads.
package queuearg

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

const (
	// MaxMillis is ten years, the longest time to live that the broker accepts: more is
	// refused with value_too_large.
	MaxMillis = 315_360_000_000
	// MaxSegmentSize is the largest segment of a stream that the broker accepts.
	MaxSegmentSize = 3_000_000_000
	// MinFilterSize and MaxFilterSize bound the filter that each chunk carries.
	MinFilterSize, MaxFilterSize = 16, 255
)

// The types of queues, as x-queue-type names them.
const (
	Quorum  = "quorum"
	Classic = "classic"
	Stream  = "stream"
)

// Argument is an argument that RabbitMQ 4.0 to 4.4 reads. The broker accepts any name and any
// value, and silently uses its default if it can't read the value. So arguments are checked here.
type Argument struct {
	// Types of queues that read it.
	Types []string
	// wrong says what is wrong with a value, in the form of normal; "" if nothing.
	wrong func(v any) string
	// Since is the first 4.x that reads it; 0 for all.
	Since int
	// Required is whether it is refused where the broker is older: without it the queue would be
	// another one than the caller relies on.
	Required bool
	// Policy is whether a policy can set it, and so change it in place.
	Policy bool
}

// Known is taken from the capabilities that the queue types of RabbitMQ
// 4.0.5, 4.3.6, and a preview of 4.4 report, and x-quorum-target-group-size from the module that
// grows quorum queues.
var Known = map[string]Argument{
	"x-queue-type":              {Types: []string{Quorum, Classic, Stream}, wrong: oneOf(Quorum, Classic, Stream)},
	"x-message-ttl":             {Types: []string{Quorum, Classic}, wrong: between(0, MaxMillis), Policy: true},
	"x-expires":                 {Types: []string{Quorum, Classic}, wrong: between(1, MaxMillis), Policy: true},
	"x-max-length":              {Types: []string{Quorum, Classic}, wrong: atLeast(0), Policy: true},
	"x-max-length-bytes":        {Types: []string{Quorum, Classic, Stream}, wrong: atLeast(0), Policy: true},
	"x-overflow":                {Types: []string{Quorum, Classic}, wrong: oneOf("drop-head", "reject-publish", "reject-publish-dlx"), Policy: true},
	"x-dead-letter-exchange":    {Types: []string{Quorum, Classic}, wrong: isText, Policy: true},
	"x-dead-letter-routing-key": {Types: []string{Quorum, Classic}, wrong: isText, Policy: true},
	"x-single-active-consumer":  {Types: []string{Quorum, Classic}, wrong: isBool},
	"x-queue-leader-locator":    {Types: []string{Quorum, Classic, Stream}, wrong: oneOf("client-local", "balanced"), Policy: true},

	"x-dead-letter-strategy":          {Types: []string{Quorum}, wrong: oneOf("at-most-once", "at-least-once"), Policy: true},
	"x-delivery-limit":                {Types: []string{Quorum}, wrong: atLeast(-1), Policy: true},
	"x-quorum-initial-group-size":     {Types: []string{Quorum}, wrong: atLeast(1)},
	"x-quorum-target-group-size":      {Types: []string{Quorum}, wrong: atLeast(1), Policy: true},
	"x-member-placement-tag":          {Types: []string{Quorum}, wrong: notEmpty, Since: 4, Required: true, Policy: true},
	"x-max-in-memory-length":          {Types: []string{Quorum}, wrong: atLeast(0), Policy: true}, // read, and without effect in 4.x
	"x-max-in-memory-bytes":           {Types: []string{Quorum}, wrong: atLeast(0), Policy: true},
	"x-consumer-timeout":              {Types: []string{Quorum}, wrong: atLeast(1), Since: 3, Policy: true},
	"x-consumer-disconnected-timeout": {Types: []string{Quorum}, wrong: atLeast(1), Since: 3, Policy: true},
	"x-delayed-retry-type":            {Types: []string{Quorum}, wrong: oneOf("disabled", "all", "failed", "returned"), Since: 3, Policy: true},
	"x-delayed-retry-min":             {Types: []string{Quorum}, wrong: atLeast(1), Since: 3, Policy: true},
	"x-delayed-retry-max":             {Types: []string{Quorum}, wrong: atLeast(1), Since: 3, Policy: true},

	"x-max-priority":         {Types: []string{Classic}, wrong: between(0, 255)},
	"x-queue-mode":           {Types: []string{Classic}, wrong: oneOf("default", "lazy"), Policy: true}, // read, and without effect in 4.x
	"x-queue-version":        {Types: []string{Classic}, wrong: between(1, 2), Policy: true},
	"x-queue-master-locator": {Types: []string{Classic}, wrong: oneOf("client-local", "min-masters", "random"), Policy: true},

	"x-max-age":                       {Types: []string{Stream}, wrong: isAge, Policy: true},
	"x-stream-max-segment-size-bytes": {Types: []string{Stream}, wrong: between(1, MaxSegmentSize), Policy: true},
	"x-stream-filter-size-bytes":      {Types: []string{Stream}, wrong: between(MinFilterSize, MaxFilterSize), Policy: true},
	"x-initial-cluster-size":          {Types: []string{Stream}, wrong: atLeast(1), Policy: true},
}

// Wrong says what is wrong with an argument of a queue of a type, and what to do. The
// problem is "" if nothing is wrong. unknown says that only the name is.
func Wrong(queueType, key string, v any) (problem, remedy string, unknown bool) {
	a, known := Known[key]
	if !known {
		return "isn't an argument of RabbitMQ 4, so it has no effect", "check its spelling, or leave it out", true
	}
	if !slices.Contains(a.Types, queueType) {
		return fmt.Sprintf("has no effect on a %s queue, only on type %s", queueType, strings.Join(a.Types, " or ")), "leave it out, or use that type", true
	}
	if problem := a.wrong(v); problem != "" {
		return problem + ": the broker silently ignores it", "write it with the type and value that the broker reads", false
	}
	return "", "", false
}

func isText(v any) string {
	if _, ok := v.(string); ok {
		return ""
	}
	return "is " + TypeName(v) + ", and should be a string"
}

func notEmpty(v any) string {
	if v == "" {
		return "is empty, and should be the key of a node tag"
	}
	return isText(v)
}

func isBool(v any) string {
	if _, ok := v.(bool); ok {
		return ""
	}
	return "is " + TypeName(v) + ", and should be a bool"
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
			return "is " + TypeName(v) + ", and should be an integer"
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
	return "should be a number followed by Y, M, D, h, m, or s"
}

// TypeName is what people call the type of a value in the form of normal.
func TypeName(v any) string {
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
