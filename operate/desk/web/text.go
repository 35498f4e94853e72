package web

import (
	"cmp"
	"errors"
	"fmt"
	"html/template"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hopback/hopback/operate/desk"
)

// funcs are the functions of the templates.
func (h *Handler) funcs() template.FuncMap {
	return template.FuncMap{
		"n": number, "text": clean, "line": func(s string) string { return clean(cutAt(s, 300)) }, "when": when, "iso": iso, "ago": ago, "took": took, "size": size, "rate": rate,
		"file":  func(name string) string { return name + "?v=" + h.static[name].version },
		"plain": plainError, "many": many, "published": publishedTo, "pair": func(a, b string) [2]string { return [2]string{a, b} }, "add": func(a, b int) int { return a + b }, "has": strings.Contains,
	}
}

// number is v in digits, in groups of three.
func number(v any) string {
	var s string
	switch v := v.(type) {
	case int:
		s = strconv.Itoa(v)
	case uint64:
		s = strconv.FormatUint(v, 10)
	case uint32:
		s = strconv.FormatUint(uint64(v), 10)
	default:
		return fmt.Sprint(v)
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// many is a number with its noun.
func many(v any, one string) string {
	s := number(v)
	if s == "1" {
		return s + " " + one
	}
	return s + " " + one + "s"
}

// clean replaces the characters of a text that would change how it is displayed: control
// characters, and those that reverse the direction of writing.
func clean(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, unsafe) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size <= 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unsafe(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += size
	}
	return b.String()
}

func unsafe(r rune) bool {
	return r != '\n' && r != '\t' && (unicode.Is(unicode.C, r) || r == '\u2028' || r == '\u2029')
}

// short cuts a text of a message to the length that is kept.
func short(s string) string { return cutAt(s, 500) }

// cutAt is s, cut to n bytes at most.
func cutAt(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// fit is s, cut to n characters at most.
func fit(s string, n int) string {
	r := []rune(clean(s))
	if len(r) <= n {
		return string(r)
	}
	return string(r[:n-1]) + "…"
}

func when(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

func iso(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// ago is how long ago t was, in one unit.
func ago(t time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	d := time.Since(t)
	switch {
	case d < -time.Minute:
		return "in the future"
	case d < 10*time.Second:
		return "just now"
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return fmt.Sprintf("%s days ago", number(int(d.Hours()/24)))
}

func took(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

func size(n int) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

func rate(f float64) string {
	switch {
	case !(f > 0) || math.IsInf(f, 0):
		return "0"
	case f < 10:
		return strconv.FormatFloat(f, 'f', 1, 64)
	}
	return number(int(min(f, 1e12)))
}

// plainError is an error for people.
func plainError(err error) string {
	if err == nil {
		return ""
	}
	return clean(cutAt(strings.ReplaceAll(err.Error(), "hopback: ", ""), 2000))
}

// query is the part of a link after the question mark, made of pairs, without those whose value
// is empty. Escaping makes it safe.
func query(pairs ...string) template.URL {
	v := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			v.Set(pairs[i], pairs[i+1])
		}
	}
	return template.URL(v.Encode())
}

// errorLine is the text of an error for people. The page shows the error's type next to it.
func errorLine(text, kind, reason string) string {
	return cmp.Or(text, kind, reason, "unknown error")
}

func trimGroup(g *desk.Group) { g.ErrorType, g.Queue = short(g.ErrorType), short(g.Queue) }

func trimQueue(q *desk.QueueSurvey) { q.Unread = cutAt(q.Unread, 2000) }

// trimSummary cuts the texts of a summary: the message's sender may have written megabytes.
func trimSummary(s *desk.Summary) {
	for _, p := range []*string{&s.MessageID, &s.Queue, &s.Error, &s.ErrorType, &s.Exchange, &s.RoutingKey, &s.Worker, &s.ContentType, &s.Unreadable} {
		*p = strings.Clone(cutAt(*p, 2000))
	}
	if m := s.LastReplay; m != nil {
		m.ID, m.By = short(m.ID), short(m.By)
	}
}

// maxSection is how much of a message's properties and annotations is shown.
const maxSection = 64 << 10

func trimDeadLetter(l *desk.DeadLetter) {
	trimSummary(&l.Summary)
	for _, p := range []*[]byte{(*[]byte)(&l.Properties), (*[]byte)(&l.ApplicationProperties), (*[]byte)(&l.Annotations), (*[]byte)(&l.Footer)} {
		if len(*p) > maxSection {
			*p = []byte(strings.Clone(cutAt(string(*p), maxSection)))
		}
	}
	if len(l.Body) > maxShown {
		l.Body, l.BodyCut = strings.Clone(strings.TrimSuffix(cutAt(l.Body, maxShown), "…")), true
	}
	for i := range l.History { // package desk bounds their number
		h := &l.History[i]
		h.Queue, h.Reason, h.Text = short(h.Queue), short(h.Reason), cutAt(h.Text, 2000)
	}
}

// maxShown bounds what is shown of a body. The whole body can be downloaded.
const maxShown = 64 << 10

// sideEffects returns the side effects that kept a queue from being read.
func sideEffects(err error) *desk.SideEffectsError {
	var t *desk.SideEffectsError
	errors.As(err, &t)
	return t
}
