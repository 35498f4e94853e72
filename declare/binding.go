package declare

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/names"
)

// Match is how a headers exchange compares the headers of a [Binding] with a message.
type Match string

const (
	// MatchAll requires every header to match. The broker ignores headers whose name starts with
	// "x-". It is the default.
	MatchAll Match = "all"
	// MatchAny requires one header to match. The broker ignores headers whose name starts with
	// "x-".
	MatchAny Match = "any"
	// MatchAllWithX is like MatchAll, but includes "x-" headers: a message's annotations.
	MatchAllWithX Match = "all-with-x"
	// MatchAnyWithX is like MatchAny, but includes "x-" headers.
	MatchAnyWithX Match = "any-with-x"
)

// Binding routes messages from an exchange to a queue or to another exchange. Two bindings are
// the same if all their fields are equal.
type Binding struct {
	// Source is the name of the exchange. It can't be the default exchange, which routes to every
	// queue by the queue's name. Required.
	Source string `json:"source"`

	// Queue or Exchange is the name of the destination. Set exactly one of them.
	Queue    string `json:"queue,omitempty"`
	Exchange string `json:"exchange,omitempty"`

	// Key is the routing key for a direct exchange, and a pattern for a topic exchange. Fanout
	// and headers exchanges ignore it.
	Key string `json:"key"`

	// Match and Headers are for a headers exchange. An empty Match with Headers means [MatchAll].
	// MatchAll without Headers matches every message. A header with the value nil matches every
	// message that has the header. Integers match integers of any width; a number doesn't match
	// its text.
	Match   Match          `json:"match,omitempty"`
	Headers map[string]any `json:"headers,omitempty"`

	// Arguments are further arguments of the binding. Values are strings, bools, integers,
	// floats, or lists of these. Headers and Arguments are neither changed nor kept.
	Arguments map[string]any `json:"arguments,omitempty"`
}

// Validate returns all errors in b, joined; each one is an *[argument.Error].
func (b Binding) Validate() error {
	_, errs := b.declaration()
	return errors.Join(errs...)
}

func (b Binding) path() argument.Path { return argument.Root("Binding(" + b.describe() + ")") }

// describe returns the binding on one line.
func (b Binding) describe() string {
	const limit = 64
	dest := fmt.Sprintf("queue %.*q", limit, b.Queue)
	if b.Queue == "" {
		dest = fmt.Sprintf("exchange %.*q", limit, b.Exchange)
	}
	s := fmt.Sprintf("%.*q to %s, key %.*q", limit, b.Source, dest, limit, b.Key)
	if b.Match != "" || len(b.Headers) > 0 {
		s += fmt.Sprintf(", %d headers", len(b.Headers))
	}
	return s
}

func (b Binding) declaration() (map[string]any, []error) {
	c := &collector{at: b.path()}
	b.ends(c)
	args, errs := b.arguments(c.at)
	c.errs = append(c.errs, errs...)
	body := map[string]any{
		"source":      b.Source,
		"binding_key": b.Key,
		"arguments":   args,
	}
	if b.Queue != "" {
		body["destination_queue"] = b.Queue
	} else {
		body["destination_exchange"] = b.Exchange
	}
	return body, c.errs
}

// ends checks what names a binding: source, destination and key.
func (b Binding) ends(c *collector) {
	if b.Source == "" {
		c.bad("Source", argument.CodeMissing, nil, "is the default exchange, which can't have bindings", "set the name of an exchange; the default exchange routes to every queue by name without a binding")
	} else {
		c.fail(names.Check(c.at.Field("Source"), b.Source))
	}
	switch {
	case b.Queue == "" && b.Exchange == "":
		c.bad("Queue", argument.CodeMissing, nil, "is empty, and so is", "set the name of the destination queue or exchange").And(c.path("Exchange"))
	case b.Queue != "" && b.Exchange != "":
		c.bad("Queue", argument.CodeConflict, b.Queue, "is set, and so is", "set one of them; two destinations need two bindings").And(c.path("Exchange"))
	case b.Queue != "":
		c.fail(names.Check(c.at.Field("Queue"), b.Queue))
	default:
		c.fail(names.Check(c.at.Field("Exchange"), b.Exchange))
	}
	c.fail(names.CheckKey(c.at.Field("Key"), b.Key))
}

// arguments merges Match, Headers and Arguments as the broker wants them.
func (b Binding) arguments(at argument.Path) (map[string]any, []error) {
	c := &collector{at: at, args: map[string]any{}}
	match := b.Match
	if match == "" && len(b.Headers) > 0 {
		match = MatchAll
	}
	switch match {
	case "":
	case MatchAny, MatchAnyWithX:
		if len(b.Headers) == 0 {
			c.bad("Headers", argument.CodeMissing, nil, "is empty, and "+string(match)+" without headers matches no message", "add a header, or use declare.MatchAll to match every message")
		}
		fallthrough
	case MatchAll, MatchAllWithX:
		c.args["x-match"] = string(match)
	default:
		c.bad("Match", argument.CodeUnknown, string(match), "is unknown", "use declare.MatchAll, declare.MatchAny, declare.MatchAllWithX, or declare.MatchAnyWithX")
	}
	withX := match == MatchAllWithX || match == MatchAnyWithX
	c.errs = append(c.errs, addNormal(c.args, at.Field("Headers"), b.Headers, func(at argument.Path, key string, v any) error {
		switch {
		case key == "x-match":
			return belongsIn(c.path("Match"), at, v)
		case !withX && strings.HasPrefix(key, "x-"):
			return argument.At(at, argument.CodeConflict, v, fmt.Sprintf("starts with \"x-\", and the broker ignores such headers with %s", match), "use declare.MatchAllWithX or declare.MatchAnyWithX")
		}
		return nil
	})...)
	c.errs = append(c.errs, addNormal(c.args, at.Field("Arguments"), b.Arguments, func(at argument.Path, key string, v any) error {
		if key == "x-match" {
			return belongsIn(c.path("Match"), at, v)
		}
		if _, twice := b.Headers[key]; twice {
			return argument.At(at, argument.CodeConflict, v, "is in both maps: it is also", "keep one of them").And(c.path("Headers").Key(key))
		}
		return nil
	})...)
	return c.args, c.errs
}

// listPath asks for the bindings with b's source, destination, and key, with any arguments. The
// broker has no wider question: all three are required.
func (b Binding) listPath() string {
	dest := "&dste=" + address.Escape(b.Exchange)
	if b.Queue != "" {
		dest = "&dstq=" + address.Escape(b.Queue)
	}
	return "/bindings?src=" + address.Escape(b.Source) + dest + "&key=" + address.Escape(b.Key)
}

// deletePath is the path of the binding without arguments. With arguments the
// path has a hash of them that only the broker can compute.
func (b Binding) deletePath() string {
	dest := ";dste=" + address.Escape(b.Exchange)
	if b.Queue != "" {
		dest = ";dstq=" + address.Escape(b.Queue)
	}
	return "/bindings/src=" + address.Escape(b.Source) + dest + ";key=" + address.Escape(b.Key) + ";args="
}
