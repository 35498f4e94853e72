package declare

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/queuearg"
	"github.com/hopback/hopback/internal/values"
)

// maxArgumentKey is what an AMQP 0-9-1 field name can hold, the form in which
// the broker keeps arguments.
const maxArgumentKey = 255

// maxArgumentDepth bounds lists within lists, and so a list that holds itself.
const maxArgumentDepth = 8

// valueRemedy is the answer to a value of the wrong type. Maps aren't in it on
// purpose: nothing in RabbitMQ reads one, and the broker doesn't sort what is
// within, so that the same binding declared twice would be two bindings.
const valueRemedy = "use a string, a bool, an integer, a float, or a list of these"

// normal returns v in the one form in which it is sent and compared: string,
// bool, int64, float64, nil or []any of these. It copies lists, so that what is
// sent shares nothing with the caller's value.
func normal(at argument.Path, v any, depth int) (any, error) {
	bad := func(code argument.Code, problem, remedy string) error {
		return argument.At(at, code, v, problem, remedy)
	}
	switch v := v.(type) {
	case nil, bool:
		return v, nil
	case string:
		if !utf8.ValidString(v) {
			return nil, bad(argument.CodeMalformed, "isn't valid UTF-8", "encode it as UTF-8")
		}
		return v, nil
	case []byte:
		return nil, bad(argument.CodeWrongType, "is binary", "use a string")
	}
	rv := reflect.ValueOf(v)
	switch rv.Kind() {
	case reflect.String, reflect.Bool:
		return nil, bad(argument.CodeWrongType, fmt.Sprintf("is a %T", v), "convert it: string(v) or bool(v)")
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if rv.Type().PkgPath() != "" {
			// A time.Duration would arrive as nanoseconds.
			return nil, bad(argument.CodeWrongType, fmt.Sprintf("is a %T", v), "convert it to an integer in the broker's unit, such as d.Milliseconds()")
		}
		return rv.Int(), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if rv.Uint() > math.MaxInt64 {
			return nil, bad(argument.CodeOutOfRange, "is too large", "use an integer up to 9223372036854775807")
		}
		return int64(rv.Uint()), nil
	case reflect.Float32, reflect.Float64:
		if f := rv.Float(); !math.IsNaN(f) && !math.IsInf(f, 0) {
			return f, nil
		}
		return nil, bad(argument.CodeOutOfRange, "isn't a finite number", "use a finite number")
	case reflect.Slice:
		if depth >= maxArgumentDepth {
			return nil, bad(argument.CodeTooLong, "is nested too deeply", fmt.Sprintf("nest lists at most %d deep", maxArgumentDepth))
		}
		list := make([]any, rv.Len())
		for i := range list {
			n, err := normal(at.Index(i), rv.Index(i).Interface(), depth+1)
			if err != nil {
				return nil, err
			}
			list[i] = n
		}
		return list, nil
	}
	return nil, bad(argument.CodeWrongType, fmt.Sprintf("is a %T", v), valueRemedy)
}

// addNormal puts args, normalized, into into, and reports every key or value that can't be sent.
// refuse may add a rule for a key.
func addNormal(into map[string]any, at argument.Path, args map[string]any, refuse func(at argument.Path, key string, v any) error) []error {
	var errs []error
	for _, key := range values.SortedKeys(args) {
		at := at.Key(key)
		v, err := normal(at, args[key], 0)
		if err == nil {
			err = checkArgumentKey(at, key)
		}
		if err == nil {
			err = refuse(at, key, v)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		into[key] = v
	}
	return errs
}

func checkArgumentKey(at argument.Path, key string) error {
	switch {
	case key == "":
		return argument.At(at, argument.CodeMissing, nil, "has an empty key", "use the name of the argument")
	case len(key) > maxArgumentKey:
		return argument.At(at, argument.CodeTooLong, nil, fmt.Sprintf("has a key that is %d bytes long", len(key)), fmt.Sprintf("use at most %d bytes", maxArgumentKey))
	case !utf8.ValidString(key):
		return argument.At(at, argument.CodeMalformed, nil, "has a key that isn't valid UTF-8", "encode it as UTF-8")
	}
	return nil
}

// typedQueueArguments are the arguments that have a field, which checks them: the broker silently
// accepts many of them with a wrong type and treats them as something else.
var typedQueueArguments = map[string]map[string]string{
	queuearg.Quorum: {
		"x-delivery-limit":                "DeliveryLimit",
		"x-dead-letter-exchange":          "DeadLetter",
		"x-dead-letter-routing-key":       "DeadLetter",
		"x-dead-letter-strategy":          "DeadLetter",
		"x-message-ttl":                   "MessageTTL",
		"x-expires":                       "Expires",
		"x-max-length":                    "MaxLength",
		"x-max-length-bytes":              "MaxLengthBytes",
		"x-overflow":                      "Overflow",
		"x-single-active-consumer":        "SingleActiveConsumer",
		"x-quorum-initial-group-size":     "InitialGroupSize",
		"x-quorum-target-group-size":      "TargetGroupSize",
		"x-member-placement-tag":          "PlacementTag",
		"x-queue-leader-locator":          "LeaderLocator",
		"x-consumer-timeout":              "ConsumerTimeout",
		"x-consumer-disconnected-timeout": "ConsumerDisconnectedTimeout",
		"x-delayed-retry-type":            "DelayedRetry",
		"x-delayed-retry-min":             "DelayedRetry",
		"x-delayed-retry-max":             "DelayedRetry",
	},
	queuearg.Classic: {
		"x-dead-letter-exchange":    "DeadLetter",
		"x-dead-letter-routing-key": "DeadLetter",
		"x-message-ttl":             "MessageTTL",
		"x-expires":                 "Expires",
		"x-max-length":              "MaxLength",
		"x-max-length-bytes":        "MaxLengthBytes",
		"x-overflow":                "Overflow",
		"x-max-priority":            "MaxPriority",
		"x-single-active-consumer":  "SingleActiveConsumer",
		"x-queue-leader-locator":    "LeaderLocator",
		"x-queue-version":           "Version",
	},
	queuearg.Stream: {
		"x-max-age":                       "MaxAge",
		"x-max-length-bytes":              "MaxLengthBytes",
		"x-stream-max-segment-size-bytes": "MaxSegmentSize",
		"x-stream-filter-size-bytes":      "FilterSize",
		"x-initial-cluster-size":          "InitialClusterSize",
		"x-queue-leader-locator":          "LeaderLocator",
	},
}

// refuseQueueArgument refuses what has a field, what has no effect, and what the broker would
// misread.
func refuseQueueArgument(queueType string, queue, at argument.Path, key string, v any) error {
	if key == "x-queue-type" {
		return argument.At(at, argument.CodeReserved, v, "can't be an argument: the type of the queue sets it", "use QuorumQueue, ClassicQueue, Stream, or RawQueue")
	}
	if field, ok := typedQueueArguments[queueType][key]; ok {
		return belongsIn(queue.Field(field), at, v)
	}
	if !strings.HasPrefix(key, "x-") {
		return argument.At(at, argument.CodeMalformed, v, `doesn't start with "x-", so the broker would ignore it`, "use the spelling of the broker's documentation")
	}
	if _, known := queuearg.Known[key]; !known {
		return nil // it may be a plugin's, or a later broker's
	}
	if problem, remedy, _ := queuearg.Wrong(queueType, key, v); problem != "" {
		return argument.At(at, argument.CodeUnsupported, v, problem, remedy)
	}
	return nil
}

// belongsIn refuses an argument that has a field.
func belongsIn(field, at argument.Path, v any) error {
	return argument.At(at, argument.CodeConflict, v, "can't be set here: it belongs in", "set that instead").And(field)
}
