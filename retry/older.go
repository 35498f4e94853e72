package retry

import (
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
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
	text(annotation.Older.ErrorType, &t.Type)
	text(annotation.Older.Worker, &t.Worker)
	text(annotation.Older.Attempts, &t.Attempts)
	number(annotation.Older.First, &t.First)
	number(annotation.Older.Last, &t.Last)
	number(annotation.Older.Asked, &t.Asked)
	number(annotation.Older.Left, &t.Left)
}

// overwriteOlder adds to the annotations for m what overwrites its older ones.
func overwriteOlder(annotations map[string]any, m *client.Message) {
	for _, key := range annotation.OlderKeys {
		if m.Annotations[key] != nil {
			annotations[key] = int64(0)
		}
	}
}
