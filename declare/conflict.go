package declare

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/internal/values"
)

// Conflict is one difference between a declaration and an existing resource.
type Conflict struct {
	// Argument is the name of the setting, such as "x-message-ttl", "type", or "durable".
	Argument string `json:"argument"`
	// Wanted is the declared setting, and Found the existing one.
	Wanted Setting `json:"wanted"`
	Found  Setting `json:"found"`
}

// String returns the conflict on one line.
func (c Conflict) String() string {
	return fmt.Sprintf("%s: the broker has %s, declared is %s", c.Argument, c.Found, c.Wanted)
}

// Setting is the value of an argument or of a field such as "durable".
type Setting struct {
	// Value is the value as text, such as "1000". It is empty if Set is false.
	Value string `json:"value"`
	// Type is the type of the value, such as "integer" or "string". If only the broker's error
	// text names it, it is the broker's word, such as "long" or "longstr". It may be empty.
	Type string `json:"type,omitempty"`
	// Set reports whether there is a value.
	Set bool `json:"set"`
}

// String returns the value, quoted and cut to 1,000 bytes, or "none".
func (s Setting) String() string {
	if !s.Set {
		return "none"
	}
	return fmt.Sprintf("%q", values.Cut(s.Value, textLimit))
}

// parseConflict reads RabbitMQ's text for a 409, which has been the same since
// the days of AMQP 0-9-1:
//
//	inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '2000' but current is '1000'
//	inequivalent arg 'x-expires' for queue 'q' in vhost '/': received none but current is the value '5' of type 'long'
//
// Names and values aren't escaped, so a hostile one can make a text ambiguous.
// Then the first reading that fits is taken; Error.Text has it all.
func parseConflict(text string) (Conflict, bool) {
	rest, ok := strings.CutPrefix(text, "inequivalent arg '")
	if !ok {
		return Conflict{}, false
	}
	arg, rest, ok := strings.Cut(rest, "' for ")
	if !ok || arg == "" {
		return Conflict{}, false
	}
	const received, current = "': received ", " but current is "
	// The bounds keep a hostile text from costing more than a glance.
	for range maxReadings {
		if _, rest, ok = strings.Cut(rest, received); !ok {
			break
		}
		at := 0
		for range maxReadings {
			i := strings.Index(rest[at:], current)
			if i < 0 {
				break
			}
			at += i
			wanted, ok1 := parseSetting(rest[:at])
			found, ok2 := parseSetting(rest[at+len(current):])
			if ok1 && ok2 {
				if arg == "type" {
					wanted, found = wanted.plain(), found.plain()
				}
				return Conflict{Argument: arg, Wanted: wanted, Found: found}, true
			}
			at += len(current)
		}
	}
	return Conflict{}, false
}

// maxReadings is how many places are tried at which an ambiguous text may be
// split.
const maxReadings = 8

// parseSetting reads "none", "'v'" or "the value 'v' of type 't'".
func parseSetting(s string) (Setting, bool) {
	if s == "none" {
		return Setting{}, true
	}
	if v, ok := quoted(s); ok {
		return Setting{Value: v, Set: true}, true
	}
	s, ok := strings.CutPrefix(s, "the value ")
	if !ok {
		return Setting{}, false
	}
	i := strings.LastIndex(s, " of type ")
	if i < 0 {
		return Setting{}, false
	}
	v, ok1 := quoted(s[:i])
	t, ok2 := quoted(s[i+len(" of type "):])
	return Setting{Value: v, Type: t, Set: true}, ok1 && ok2
}

// plain is an exchange type without the quotes in which Erlang prints one that has a dash.
func (s Setting) plain() Setting {
	if v, ok := quoted(s.Value); ok {
		s.Value = v
	}
	return s
}

func quoted(s string) (string, bool) {
	if len(s) < 2 || s[0] != '\'' || s[len(s)-1] != '\'' {
		return "", false
	}
	return s[1 : len(s)-1], true
}
