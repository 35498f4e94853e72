package failure

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Clip cuts s to at most limit bytes without cutting a character, and makes it
// valid UTF-8.
func Clip(s string, limit int) string {
	if len(s) > limit {
		n := limit
		for n > 0 && n > limit-utf8.UTFMax && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	if utf8.ValidString(s) {
		return s
	}
	// A replacement character is three bytes where one was bad.
	s = strings.ToValidUTF8(s, "?")
	return s
}

func Quote(s string) string { return fmt.Sprintf("%q", Clip(s, 64)) }

func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
