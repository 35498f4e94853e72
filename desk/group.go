package desk

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/hopback/hopback/client"
)

// Group counts dead letters of one kind: the same queue, reason, error type and error text. Numbers, ids and addresses in the error's text don't count.
type Group struct {
	// ID is 12 hexadecimal digits. It is the same in every survey.
	ID string `json:"id"`
	// Queue is the queue that the messages died in.
	Queue     string        `json:"queue,omitempty"`
	Reason    client.Reason `json:"reason,omitempty"`
	ErrorType string        `json:"error_type,omitempty"`
	// Text is the error's text with "#" in place of the parts that differ between messages:
	// words that contain digits (numbers, hexadecimal ids, UUIDs, IP addresses, times) and
	// e-mail addresses. White space is one space. It has at most 200 bytes of UTF-8.
	Text string `json:"text,omitempty"`
	// In is the dead-letter or parking queue that has the messages. It is set in a Survey.
	In string `json:"in,omitempty"`
	// Count is the number of messages.
	Count uint64 `json:"count"`
	// Oldest and Newest are the earliest and the latest time at which one of them was
	// dead-lettered.
	Oldest time.Time `json:"oldest,omitzero"`
	Newest time.Time `json:"newest,omitzero"`
	// Example is the ID of one of them.
	Example string `json:"example,omitempty"`
}

// groupBytes is the size of a Group's ID.
const groupBytes = 6

// maxFingerprint is how much of an error's text tells groups apart.
const maxFingerprint = 200

func groupOf(queue string, reason client.Reason, errorType, text string) Group {
	g := Group{Queue: queue, Reason: reason, ErrorType: errorType, Text: fingerprint(text)}
	h := sha256.New()
	for _, s := range []string{g.Queue, string(g.Reason), g.ErrorType, g.Text} {
		_, _ = h.Write([]byte(s))
		_, _ = h.Write([]byte{0})
	}
	g.ID = hex.EncodeToString(h.Sum(nil)[:groupBytes])
	return g
}

func (l *deadLetter) group() Group {
	return groupOf(l.death.Queue, l.death.Reason, l.death.ErrorType, l.death.Error)
}

// fingerprint returns an error's text with "#" in place of the parts that differ between
// messages: words that contain digits (numbers, hexadecimal ids, UUIDs, IP addresses,
// times) and e-mail addresses. It collapses white space to single spaces. The result is at
// most 200 bytes of valid UTF-8.
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

// inWord says whether c is part of a word, an address or an id.
func inWord(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c >= 0x80 || strings.IndexByte("_-.:@+%", c) >= 0
}

func normal(word string) string {
	at := strings.IndexByte(word, '@')
	switch {
	case strings.ContainsAny(word, "0123456789"):
		// "http2.Error" and "E1042" lose their numbers, too: nobody can tell them from ids.
		return "#"
	case at > 0 && strings.IndexByte(word[at:], '.') > 0:
		return "#"
	case len(word) >= 16 && strings.Trim(word, "abcdefABCDEF-") == "":
		return "#"
	}
	return word
}
