package officialclient

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// This file turns what a handler returned into what is to be sent, by the rules
// of package client's own consumer.

type action uint8

const (
	accept action = iota
	release
	modify
	forward
)

// resolution is what is to become of a delivery, checked: nothing in it can
// poison the message or end the link.
type resolution struct {
	do          action
	failed      bool // modify
	dead        bool // modify
	annotations map[string]any
	copy        client.Forward // forward
	// refused is why the handler's outcome couldn't be carried out as it was, and
	// is replaced by this one.
	refused error
}

var failedDelivery = resolution{do: modify, failed: true}

func resolve(err error) resolution {
	switch o := client.OutcomeOf(err).(type) {
	case nil:
		return resolution{do: accept}
	case client.Requeue:
		if o.Failed {
			return failedDelivery
		}
		return resolution{do: release}
	case client.DeadLetter:
		return deadLetter(o)
	case client.Modify:
		if err := checkAnnotations(o.Annotations); err != nil {
			r := failedDelivery
			r.refused = err
			return r
		}
		return resolution{do: modify, failed: o.Failed, dead: o.DeadLetter, annotations: o.Annotations}
	case client.Forward:
		err := client.Validate(o.Message)
		if err == nil {
			_, err = o.To.Build()
		}
		if err != nil {
			return unforwardable(o, err)
		}
		return resolution{do: forward, copy: o}
	}
	r := failedDelivery
	r.refused = argument.New("outcome", fmt.Sprintf("%T", err), "is none of package client's", "return one of client's outcomes, not a type that embeds one")
	return r
}

func deadLetter(o client.DeadLetter) resolution {
	own := map[string]any{}
	if o.Reason != "" {
		own[client.AnnotationReason] = clip(string(o.Reason), 255)
	}
	if o.Err != nil {
		own[client.AnnotationError] = client.ErrorText(o.Err)
	}
	all := make(map[string]any, len(o.Annotations)+len(own))
	for k, v := range o.Annotations {
		all[k] = v
	}
	for k, v := range own {
		all[k] = v
	}
	if err := checkAnnotations(all); err != nil {
		return resolution{do: modify, dead: true, annotations: own, refused: err}
	}
	return resolution{do: modify, dead: true, annotations: all}
}

func unforwardable(o client.Forward, err error) resolution {
	if o.Else != nil {
		return resolve(o.Else)
	}
	r := deadLetter(client.DeadLetter{Reason: client.ReasonUnforwardable, Err: errors.Join(err, o.Err), Annotations: o.Annotations})
	r.refused = err
	return r
}

// goesBack is a failed delivery that tells why its copy couldn't be stored.
func goesBack(o client.Forward, err error) resolution {
	r := deadLetter(client.DeadLetter{Reason: client.ReasonUnforwardable, Err: errors.Join(err, o.Err), Annotations: o.Annotations})
	r.dead, r.failed = false, true
	return r
}

// maxSettlementBytes keeps a settlement well within one frame (131,072 bytes by
// default on RabbitMQ): one that doesn't fit closes the connection.
const maxSettlementBytes = 60_000

// maxNesting also ends a value that holds itself.
const maxNesting = 32

// checkAnnotations refuses annotations of a modified message that poison it
// (RabbitMQ 4.0 and 4.3 crash the session of everyone who is delivered a null or
// a float), that end the session, or that the official client panics on.
func checkAnnotations(annotations map[string]any) error {
	size := 0
	for k, v := range annotations {
		if !strings.HasPrefix(k, "x-") || !utf8.ValidString(k) || len(k) > 255 {
			return argument.New("annotations key", clip(k, 64), `doesn't begin with "x-", is over 255 bytes, or is not valid UTF-8`, `use a key such as "x-opt-tenant"`)
		}
		n, err := annotationSize(fmt.Sprintf("annotations[%q]", clip(k, 64)), v, 0)
		if err != nil {
			return err
		}
		if size += n + len(k); size > maxSettlementBytes {
			return argument.New("annotations", size, fmt.Sprintf("hold more than %d bytes", maxSettlementBytes), "put less into them: a settlement must fit into one frame")
		}
	}
	return nil
}

func annotationSize(name string, v any, depth int) (size int, err error) {
	const remedy = "use string, bool, int, int64, []any or map[string]any of these"
	if depth > maxNesting {
		return 0, argument.New(name, nil, fmt.Sprintf("is nested deeper than %d", maxNesting), "flatten it")
	}
	add := func(e any) error {
		n, err := annotationSize(name, e, depth+1)
		size += n
		return err
	}
	switch v := v.(type) {
	case string:
		if !utf8.ValidString(v) {
			return 0, argument.New(name, v, "is not valid UTF-8", "use a valid string")
		}
		return len(v) + 5, nil
	case bool, int, int64, int32, uint32, uint64, time.Time:
		return 9, nil
	case []any:
		size = 9
		for _, e := range v {
			if err := add(e); err != nil || size > maxSettlementBytes {
				return size, err
			}
		}
		return size, nil
	case map[string]any:
		size = 9
		for k, e := range v {
			if err := add(k); err != nil {
				return 0, err
			}
			if err := add(e); err != nil || size > maxSettlementBytes {
				return size, err
			}
		}
		return size, nil
	case nil, float32, float64:
		return 0, argument.New(name, fmt.Sprintf("%T", v), "would poison the message: RabbitMQ can't deliver it again", remedy)
	}
	return 0, argument.New(name, fmt.Sprintf("%T", v), "is of a type that RabbitMQ doesn't keep in a modified message", remedy)
}

// clip cuts s to at most limit bytes without cutting a character, and makes it
// valid UTF-8.
func clip(s string, limit int) string {
	if len(s) > limit {
		n := limit
		for n > 0 && n > limit-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}
