package desk

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/message"
)

// A line is at most about as long as base64 makes it, or as readable text is in JSON, and has the whole message.
func TestALineIsNotMuchLongerThanItsMessage(t *testing.T) {
	t.Parallel()
	const size = 100_000
	for name, body := range map[string]string{
		"zeros":    strings.Repeat("\x00", size),
		"binary":   strings.Repeat("\x00\x01\x02ab\x03", size/6),
		"text":     strings.Repeat("one line\r\n\tand another\n", size/22),
		"colors":   strings.Repeat("\x1b[31mred\x1b[0m on a long line of a terminal\n", size/50),
		"not text": strings.Repeat("\xff\xfe", size/2),
	} {
		payload, err := message.Append(nil, &client.Message{Data: [][]byte{[]byte(body)}})
		require.NoError(t, err)
		l := open(payload)
		line, err := l.line("dead")
		require.NoError(t, err)
		assert.Less(t, len(line), 3*size/2, name)
		assert.Equal(t, name == "text" || name == "colors", bytes.Contains(line, []byte(`{"text":`)), name)
		in, err := readLine(line)
		require.NoError(t, err, name)
		assert.Equal(t, payload, in.payload, name)
	}
}
