package desk

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
)

// Group counts similar dead letters: those with the same queue, reason, error type, and error
// text. Numbers, IDs, and addresses in the error text don't separate groups.
type Group struct {
	// ID identifies the group in 12 hexadecimal digits. It is the same in every survey.
	ID string `json:"id"`
	// Queue is the queue that the messages were dead-lettered from.
	Queue  string        `json:"queue,omitempty"`
	Reason client.Reason `json:"reason,omitempty"`
	// ErrorType is the Go type of the error. It is empty for types of the standard library that
	// only hold a text or another error, such as *errors.errorString.
	ErrorType string `json:"error_type,omitempty"`
	// Text is the error text with "#" in place of the parts that differ between messages:
	// words with digits (numbers, hexadecimal IDs, UUIDs, IP addresses, times) and email
	// addresses. All white space is one space. It has at most 200 bytes of UTF-8.
	Text string `json:"text,omitempty"`
	// In is the dead-letter or parking queue that the messages are in now. Only a Survey sets
	// it.
	In string `json:"in,omitempty"`
	// Count is the number of messages.
	Count uint64 `json:"count"`
	// Oldest and Newest are when the first and the last of them were dead-lettered.
	Oldest time.Time `json:"oldest,omitzero"`
	Newest time.Time `json:"newest,omitzero"`
	// Arrivals are the times at which they were dead-lettered.
	Arrivals *Arrivals `json:"arrivals,omitempty"`
	// Example is the ID of one of the messages.
	Example string `json:"example,omitempty"`
}

// groupBytes is the size of a Group's ID.
const groupBytes = 6

// maxFingerprint is how many bytes of an error text separate groups.
const maxFingerprint = 200

func groupOf(queue string, reason client.Reason, errorType, text string) Group {
	g := Group{Queue: queue, Reason: reason, ErrorType: shownType(errorType), Text: fingerprint(text)}
	h := sha256.New()
	for _, s := range []string{g.Queue, string(g.Reason), errorType, g.Text} { // the stored type, so that IDs stay the same
		_, _ = h.Write([]byte(s))
		_, _ = h.Write([]byte{0})
	}
	g.ID = hex.EncodeToString(h.Sum(nil)[:groupBytes])
	g.Queue, g.Reason, g.ErrorType = cut(g.Queue, maxPropertyText), client.Reason(cut(string(g.Reason), maxPropertyText)), cut(g.ErrorType, maxPropertyText)
	return g
}

// shownType is the type of an error as people know it: nothing for the types of Go's standard library
// that only hold a text or another error, and the public name of a type of hopback's.
func shownType(name string) string {
	switch name {
	case "*errors.errorString", "*errors.joinError", "*fmt.wrapError", "*fmt.wrapErrors":
		return ""
	case "*failure.PanicError":
		return "*client.PanicError"
	case "*failure.Error":
		return "*client.Error"
	}
	return name
}

func (l *deadLetter) group() Group {
	return groupOf(l.death.Queue, l.death.Reason, l.death.ErrorType, l.death.Error)
}

// fingerprint returns an error's text with "#" in place of the parts that differ between
// messages: words with digits (numbers, hexadecimal IDs, UUIDs, IP addresses, times) and email
// addresses. It collapses white space to single spaces. The result is at most 200 bytes of
// valid UTF-8.
func fingerprint(text string) string {
	const far = 8 * maxFingerprint
	text = cut(text, far)
	var b strings.Builder
	for i := 0; i < len(text) && b.Len() <= maxFingerprint; {
		n := 0
		for i+n < len(text) && inWord(text[i+n]) {
			n++
		}
		if n == 0 {
			c := text[i]
			i++
			switch {
			case c == ' ' || c == '\t' || c == '\n' || c == '\r':
				if s := b.String(); s != "" && !strings.HasSuffix(s, " ") {
					b.WriteByte(' ')
				}
			default:
				b.WriteByte(c)
			}
			continue
		}
		word := text[i : i+n]
		i += n
		// A full stop or a colon at the end belongs to the sentence.
		tail := len(word)
		for tail > 0 && strings.IndexByte(".:-", word[tail-1]) >= 0 {
			tail--
		}
		b.WriteString(normal(word[:tail]))
		b.WriteString(word[tail:])
	}
	return strings.TrimSpace(cut(b.String(), maxFingerprint))
}

// inWord reports whether c is part of a word, an address, or an ID.
func inWord(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= 0x80 || strings.IndexByte("_-.:@+%", c) >= 0
}

func normal(word string) string {
	at := strings.IndexByte(word, '@')
	switch {
	case strings.ContainsAny(word, "0123456789"):
		// "http2.Error" and "E1042" lose their numbers, too: they look like IDs.
		return "#"
	case at > 0 && strings.IndexByte(word[at:], '.') > 0:
		return "#"
	case len(word) >= 16 && strings.Trim(word, "abcdefABCDEF-") == "":
		return "#"
	}
	return word
}
