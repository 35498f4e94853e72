// Package utf8text decodes documents that Windows wrote.
package utf8text

import (
	"bytes"
	"encoding/binary"
	"unicode/utf16"
)

// Decode returns a document in UTF-8, without a byte order mark. encoding says what it was before, and is
// "" for what every broker reads. On Windows a redirection or an editor makes the others. RabbitMQ
// reads none of them, except that the HTTP API of 4.3 accepts the mark:
// TestAFileIsWhatTheBrokerReads pins it.
func Decode(text []byte) (utf8Text []byte, encoding string) {
	const mark = "\ufeff"
	if after, ok := bytes.CutPrefix(text, []byte(mark)); ok {
		return after, "UTF-8 with a byte order mark"
	}
	if len(text) < 2 {
		return text, ""
	}
	var order binary.ByteOrder = binary.LittleEndian
	switch {
	case text[0] == 0xFE && text[1] == 0xFF, text[0] == 0 && text[1] != 0:
		order = binary.BigEndian
	case text[0] == 0xFF && text[1] == 0xFE, text[0] != 0 && text[1] == 0:
	default:
		return text, ""
	}
	units := make([]uint16, len(text)/2)
	for i := range units {
		units[i] = order.Uint16(text[2*i:])
	}
	return bytes.TrimPrefix([]byte(string(utf16.Decode(units))), []byte(mark)), "UTF-16"
}
