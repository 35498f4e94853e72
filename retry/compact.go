package retry

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

// compactHistory is the JSON object of annotation.History.
type compactHistory struct {
	Queue    string  `json:"queue"`
	Error    string  `json:"error"`
	Type     string  `json:"type"`
	First    int64   `json:"first"` // times are milliseconds since 1970
	Last     int64   `json:"last"`
	Delay    int64   `json:"delay"` // milliseconds, as the next ones
	Asked    int64   `json:"asked"`
	Left     int64   `json:"left"`
	Base     int64   `json:"base"` // see baseOf
	Worker   string  `json:"worker"`
	Exchange *string `json:"exchange"` // nil if unknown; "" is the default exchange
	Key      *string `json:"key"`
	Attempts string  `json:"-"` // the member "attempts" is this list as JSON itself
}

// maxCompact is longer than any history that this package writes. A longer one is
// ignored.
const maxCompact = 32 << 10

// readCompact reads a history that anybody may have written. Members that are missing or
// have a wrong type are left zero.
func readCompact(s string) (t compactHistory) {
	if len(s) > maxCompact {
		return t
	}
	raw := struct {
		*compactHistory
		Attempts json.RawMessage `json:"attempts"`
	}{compactHistory: &t}
	err := json.Unmarshal([]byte(s), &raw)
	t.Attempts = string(raw.Attempts)
	if err == nil {
		return t
	}
	// A value of a wrong type has left an empty string behind.
	for _, origin := range []**string{&t.Exchange, &t.Key} {
		if *origin != nil && **origin == "" {
			*origin = nil
		}
	}
	return t
}

// historyOf returns m's history. The annotations that other packages write, too, are newer
// than annotation.History, but for the origin, which a replay has copied out of it.
func historyOf(m *client.Message) (t compactHistory) {
	if s, ok := m.Annotations[annotation.History].(string); ok {
		t = readCompact(s)
	}
	text := func(to *string, key string) {
		if s, ok := m.Annotations[key].(string); ok {
			*to = s
		}
	}
	text(&t.Queue, annotation.Queue)
	text(&t.Error, client.AnnotationError)
	for i, to := range [...]**string{&t.Exchange, &t.Key} {
		if s, ok := m.Annotations[originOf[i].own].(string); ok && *to == nil {
			*to = &s
		}
	}
	if ms, ok := m.Annotations[annotation.Delay].(int64); ok {
		t.Delay = ms
	}
	t.readOlder(m)
	return t
}

// origin returns the value for originOf[i].
func (t *compactHistory) origin(i int) *string {
	if i == 0 {
		return t.Exchange
	}
	return t.Key
}

// compact returns a as annotation.History holds it. If the message hasn't failed, it
// keeps its last failure. The error's text is left out where client.AnnotationError has it.
func (a *account) compact(delay time.Duration, notified bool) string {
	text, kind, last := a.text, a.kind, a.last
	if kind == "" {
		before := historyOf(a.message)
		text, kind, last = before.Error, before.Type, before.Last
	}
	var stack [512]byte
	b := append(stack[:0], '{')
	b = appendText(b, "queue", a.queue)
	if (text != "" || kind != "") && !notified {
		b = appendText(b, "error", text)
	}
	if text != "" || kind != "" {
		b = appendText(b, "type", kind)
	}
	b = appendNumber(b, "first", a.first)
	b = appendNumber(b, "last", last)
	b = appendNumber(b, "delay", delay.Milliseconds())
	b = appendNumber(b, "asked", a.asked)
	b = appendNumber(b, "left", a.left)
	b = appendNumber(b, "base", int64(a.was.base))
	if a.worker != "" {
		b = appendText(b, "worker", a.worker)
	}
	if a.attempts != "" {
		b = append(appendName(b, "attempts"), a.attempts...)
	}
	for i, name := range [...]string{"exchange", "key"} {
		if a.origin[i].known {
			b = appendText(b, name, a.origin[i].text)
		}
	}
	return string(append(b, '}'))
}

func appendName(b []byte, name string) []byte {
	if len(b) > 1 {
		b = append(b, ',')
	}
	b = append(b, '"')
	b = append(b, name...)
	return append(b, '"', ':')
}

func appendNumber(b []byte, name string, n int64) []byte {
	if n == 0 {
		return b
	}
	return strconv.AppendInt(appendName(b, name), n, 10)
}

// appendText appends a string of valid UTF-8.
func appendText(b []byte, name, s string) []byte {
	return appendQuoted(appendName(b, name), s)
}

// appendQuoted appends a string of valid UTF-8 as JSON.
func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	from := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[from:i]...)
		from = i + 1
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, '\\', 'n')
		default:
			const hex = "0123456789abcdef"
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}

// brief is a history for a message that has no room for more.
func brief(first, asked, left int64) string {
	b := appendNumber([]byte{'{'}, "first", first)
	return string(append(appendNumber(appendNumber(b, "asked", asked), "left", left), '}'))
}
