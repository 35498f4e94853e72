package retry

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/hopback/hopback/client"
)

// compactHistory is the JSON object of AnnotationHistory.
type compactHistory struct {
	Queue    string  `json:"queue"`
	Error    string  `json:"error"`
	Type     string  `json:"type"`
	First    int64   `json:"first"` // times are milliseconds since 1970
	Last     int64   `json:"last"`
	Delay    int64   `json:"delay"` // milliseconds, as the next ones
	Asked    int64   `json:"asked"`
	Left     int64   `json:"left"`
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

// historyOf returns m's history. Single annotations win over the compact form.
func historyOf(m *client.Message) (t compactHistory) {
	if s, ok := m.Annotations[AnnotationHistory].(string); ok {
		t = readCompact(s)
	}
	text := func(to *string, key string) {
		if s, ok := m.Annotations[key].(string); ok {
			*to = s
		}
	}
	number := func(to *int64, key string) {
		if at := millis(m.Annotations[key]); !at.IsZero() {
			*to = at.UnixMilli()
		}
	}
	origin := func(to **string, key string) {
		if s, ok := m.Annotations[key].(string); ok {
			*to = &s
		}
	}
	text(&t.Queue, AnnotationQueue)
	text(&t.Error, client.AnnotationError)
	text(&t.Type, AnnotationErrorType)
	text(&t.Worker, AnnotationWorker)
	text(&t.Attempts, AnnotationAttempts)
	number(&t.First, AnnotationFirstFailure)
	number(&t.Last, AnnotationLastFailure)
	origin(&t.Exchange, AnnotationExchange)
	origin(&t.Key, AnnotationRoutingKey)
	span := func(to *int64, key string) {
		if ms, ok := m.Annotations[key].(int64); ok {
			*to = ms
		}
	}
	span(&t.Delay, AnnotationDelay)
	span(&t.Asked, AnnotationDelayAsked)
	span(&t.Left, AnnotationDelayLeft)
	return t
}

// origin returns the value for originOf[i].
func (t *compactHistory) origin(i int) *string {
	if i == 0 {
		return t.Exchange
	}
	return t.Key
}

// compact returns a as AnnotationHistory holds it. If the message hasn't failed, it
// keeps m's last failure.
func (a *account) compact(m *client.Message, delay time.Duration) string {
	text, last := a.text, a.last
	kind, _ := a.kind.(string)
	if a.kind == nil {
		before := historyOf(m)
		text, kind, last = before.Error, before.Type, before.Last
	}
	worker, _ := a.worker.(string)
	var stack [512]byte
	b := append(stack[:0], '{')
	b = appendText(b, "queue", a.queue)
	if text != "" || kind != "" {
		b = appendText(b, "error", text)
		b = appendText(b, "type", kind)
	}
	b = appendNumber(b, "first", a.first)
	b = appendNumber(b, "last", last)
	b = appendNumber(b, "delay", delay.Milliseconds())
	b = appendNumber(b, "asked", a.asked)
	b = appendNumber(b, "left", a.left)
	if worker != "" {
		b = appendText(b, "worker", worker)
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
