package retry

import (
	"fmt"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
)

// maxToken is client's.
const maxToken = 512

// tokenOf is what a waiting message can be claimed by: its message-id.
func tokenOf(m *client.Message) (string, bool) {
	if m.Properties == nil {
		return "", false
	}
	var id string
	switch v := m.Properties.MessageID.(type) {
	case string:
		id = v
	case fmt.Stringer: // a UUID
		id = v.String()
	}
	return id, id != "" && len(id) <= maxToken && utf8.ValidString(id)
}
