package retry

import (
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/anew"
)

// Revisions before v0.1 wrote the history of a message in single annotations, unless it was a
// copy. Nothing else in this package knows about that.

// readOlder adds what such a revision has written to m.
func (t *compactHistory) readOlder(m *client.Message) {
	text := func(key string, to *string) {
		if s, ok := m.Annotations[key].(string); ok {
			*to = s
		}
	}
	number := func(key string, to *int64) {
		if at := millis(m.Annotations[key]); !at.IsZero() {
			*to = at.UnixMilli()
		}
	}
	text(anew.Older.ErrorType, &t.Type)
	text(anew.Older.Worker, &t.Worker)
	text(anew.Older.Attempts, &t.Attempts)
	number(anew.Older.First, &t.First)
	number(anew.Older.Last, &t.Last)
	number(anew.Older.Asked, &t.Asked)
	number(anew.Older.Left, &t.Left)
}

// overwriteOlder adds to the annotations for m what makes its older ones nothing.
func overwriteOlder(annotations map[string]any, m *client.Message) {
	for _, key := range anew.OlderKeys {
		if m.Annotations[key] != nil {
			annotations[key] = int64(0)
		}
	}
}
