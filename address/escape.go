package address

import (
	"fmt"
	"strings"

	"github.com/hopback/hopback/argument"
)

const (
	hexDigits = "0123456789ABCDEF"

	// subDelims may stand unencoded in a part besides the unreserved
	// characters: RFC 3986's sub-delims, ":" and "@".
	subDelims = "!$&'()*+,;=:@"
)

// Escape percent-encodes one segment of an address or of a management path: every byte except
// letters, digits, "-", ".", "_", and "~" (RFC 3986, unreserved). [Address.Build] does this for
// you.
//
// url.PathEscape doesn't encode "+", "=", "&", and ":". url.QueryEscape encodes a space as "+",
// which RabbitMQ reads as a plus sign.
func Escape(part string) string {
	return string(appendEscaped(make([]byte, 0, len(part)), part))
}

func appendEscaped(b []byte, part string) []byte {
	for i := range len(part) {
		if c := part[i]; unreserved(c) {
			b = append(b, c)
		} else {
			b = append(b, '%', hexDigits[c>>4], hexDigits[c&0x0f])
		}
	}
	return b
}

func unreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		c == '-' || c == '.' || c == '_' || c == '~'
}

// unescape decodes one segment. "+" stays a plus sign, as on the broker. It accepts the raw
// characters that the broker accepts (RFC 3986, pchar), and no others.
func unescape(what argument.Path, part string) (string, error) {
	b := make([]byte, 0, len(part))
	for i := 0; i < len(part); i++ {
		if c := part[i]; c != '%' {
			if !unreserved(c) && strings.IndexByte(subDelims, c) < 0 {
				return "", argument.At(what, argument.CodeMalformed, part, "has a character that must be percent-encoded",
					fmt.Sprintf("write it as \"%%%02X\", or build the address with address.Queue or address.Exchange", c))
			}
			b = append(b, c)
			continue
		}
		if i+2 >= len(part) {
			return "", malformed(what, part)
		}
		hi, ok1 := hexValue(part[i+1])
		lo, ok2 := hexValue(part[i+2])
		if !ok1 || !ok2 {
			return "", malformed(what, part)
		}
		b = append(b, hi<<4|lo)
		i += 2
	}
	return string(b), nil
}

func malformed(what argument.Path, part string) error {
	return argument.At(what, argument.CodeMalformed, part, "has a malformed percent sequence",
		`write a percent sign as "%25", or build the address with address.Queue or address.Exchange`)
}

func hexValue(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}
