package engine

import "time"

// Entry is a line of the event log.
type Entry struct {
	Number uint64 // counts the log's entries, from 1
	Time   time.Time
	Kind   string // such as "published", "delivered", "accepted", "expired"
	VHost  string
	Queue  string
	// MessageID is the message's message-id, nil if it has none.
	MessageID any
}

// The kinds of entries.
const (
	logPublished    = "published"
	logDelivered    = "delivered"
	logAccepted     = "accepted"
	logReturned     = "returned"
	logDelayed      = "delayed"
	logExpired      = "expired"
	logDead         = "dead-lettered"
	logDropped      = "dropped"
	logRevoked      = "revoked"
	logHung         = "queue hangs"
	logDeclared     = "queue declared"
	logDeleted      = "queue deleted"
	logQueueExpired = "queue expired"
	logConnected    = "connected"
	logDisconnected = "disconnected"
)

// line is an Entry in the form in which it is stored.
type line struct {
	at    int64
	kind  string
	queue *queue
	id    string // the encoded message-id
}

func (b *Broker) log(q *queue, kind string, m *message) {
	if b.cfg.MaxLog < 0 {
		return
	}
	if b.lines.len() >= b.cfg.MaxLog {
		b.lines.pop()
	}
	l := line{at: b.now(), kind: kind, queue: q}
	if m != nil {
		l.id = m.id
	}
	b.lines.push(l)
	b.logged++
}

// Log returns the log's entries behind the n-th one, oldest first.
func (b *Broker) Log(n uint64) []Entry {
	b.peek()
	defer b.mu.Unlock()
	newer := 0
	if n < b.logged {
		newer = int(min(b.logged-n, uint64(b.lines.len())))
	}
	entries := make([]Entry, 0, newer)
	for i := b.lines.len() - newer; i < b.lines.len(); i++ {
		l := b.lines.at(i)
		e := Entry{Number: b.logged - uint64(b.lines.len()-1-i), Time: time.UnixMilli(l.at), Kind: l.kind}
		if l.queue != nil {
			e.VHost, e.Queue = l.queue.vhost.name, l.queue.name
		}
		if l.id != "" {
			e.MessageID = read([]byte(l.id))
		}
		entries = append(entries, e)
	}
	return entries
}
