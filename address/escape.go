package address

import (
	"strings"

	"github.com/hopback/hopback/argument"
)

const hexDigits = "0123456789ABCDEF"

// Escape percent-encodes one part of an address or of a management path: every
// byte but letters, digits and "-", ".", "_", "~" (RFC 3986, unreserved).
//
// Neither url.PathEscape nor url.QueryEscape will do: the first leaves "+",
// "=", "&" and ":" alone, the second turns a space into "+", which RabbitMQ
// keeps as a plus sign.
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

// unescape decodes one part; "+" stays a plus sign, as on the broker.
func unescape(what, part string) (string, error) {
	if !strings.Contains(part, "%") {
		return part, nil
	}
	b := make([]byte, 0, len(part))
	for i := 0; i < len(part); i++ {
		if part[i] != '%' {
			b = append(b, part[i])
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

func malformed(what, part string) error {
	return argument.New(what, part, "has a malformed percent sequence",
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
