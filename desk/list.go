package desk

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/frames"
)

// ListConfig selects the messages of a List. Queue is required.
type ListConfig struct {
	Queue  string
	Filter Filter
	// Skip and Limit choose a page of the messages that match. Skip counts from the queue's
	// head. Limit is at most 10,000. Default: 50. Every page is a new walk from the queue's
	// head.
	Skip, Limit int
	// Count walks on to the queue's end, so Matched counts every match.
	Count bool
	// Accept lists the caveats that the caller accepts. See [Caveat].
	Accept []WarningCode
	// Found, if not nil, is called with the page as soon as it is complete, at most once and
	// before List returns. At that time the messages are still held, and other consumers
	// don't get them. List goes on to give them back in order, which can take minutes: see
	// the package's documentation. If the connection is lost meanwhile, List begins again,
	// and may return another page. Found isn't called if List fails before the page is
	// complete. It must not block.
	OnFound func(List)
	// Progress, if not nil, is called a few times a second, also after Found. It must not
	// block.
	OnProgress func(Progress)
}

// List is a page of messages.
type List struct {
	SideEffects SideEffects `json:"terms"`
	Messages    []Summary   `json:"messages"`
	// Seen is the number of messages read. Matched is how many of them match.
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// More reports whether further messages match, behind this page.
	More bool `json:"more"`
	// Unread is why messages may be missing: others consumed from the queue when its end was
	// reached. Empty if every message was read, if List didn't go to the end, and if
	// WarningConsumers is accepted.
	Unread string `json:"unread,omitempty"`
}

// maxPage bounds ListConfig.Limit, and with it the memory of a List.
const maxPage = 10_000

// List walks a queue from its head and returns a page of the messages that match. The
// messages stay in the queue, in order. A List has no bodies: see [Desk.Show]. The errors:
//
//	*argument.Error           cfg can't be used
//	*SideEffectsError               reading would change something, and that isn't accepted
//	declare.ErrNotFound        the queue doesn't exist
//	*client.Error             as Conn.Consume has them; ErrConnectionLost after several tries
//	context.DeadlineExceeded  the queue is too large to be read in 15 minutes; the List has
//	                          what was read
func (d *Desk) List(ctx context.Context, cfg ListConfig) (List, error) {
	at := argument.Root("ListConfig")
	switch {
	case cfg.Skip < 0:
		return List{}, argument.At(at.Field("Skip"), argument.CodeOutOfRange, cfg.Skip, "is negative", "leave it out")
	case cfg.Limit < 0 || cfg.Limit > maxPage:
		return List{}, argument.At(at.Field("Limit"), argument.CodeOutOfRange, cfg.Limit, "is out of range", fmt.Sprintf("use 1 to %d, or 0 for the default of 50", maxPage))
	case cfg.Limit == 0:
		cfg.Limit = 50
	}
	if err := cfg.Filter.check(); err != nil {
		return List{}, err
	}
	notify := notifier{notify: cfg.OnProgress}
	t, leave, err := d.enter(ctx, cfg.Queue, cfg.Accept, &notify)
	if err != nil {
		return List{}, err
	}
	defer leave()
	list := List{SideEffects: t}
	match := cfg.Filter.matcher()
	reset := func() { list.Seen, list.Matched, list.More, list.Messages = 0, 0, false, []Summary{} }
	peek := peeking{reset: reset, accept: cfg.Accept, unread: &list.Unread, passed: func(seen uint64) { notify.now(Progress{Seen: seen, Matched: list.Matched, Of: t.Messages}) }}
	if cfg.OnFound != nil {
		peek.found = func() {
			found := list
			found.Messages = slices.Clone(list.Messages) // the caller's own
			cfg.OnFound(found)
		}
	}
	peek.visit = func(v dedicated.Delivery, l *deadLetter) error {
		position := int(list.Seen)
		list.Seen++
		if match.matches(l) {
			list.Matched++
			switch {
			case list.Matched <= uint64(cfg.Skip):
			case len(list.Messages) < cfg.Limit:
				list.Messages = append(list.Messages, l.summary(position))
			default:
				list.More = true
				if !cfg.Count {
					return errStop
				}
			}
		}
		notify.now(Progress{Seen: list.Seen, Matched: list.Matched, Of: t.Messages})
		return nil
	}
	err = d.peek(ctx, cfg.Queue, peek)
	return list, err
}

// DeadLetter is one message with all its sections.
type DeadLetter struct {
	Summary
	Durable       bool   `json:"durable"`
	TTL           uint32 `json:"ttl,omitempty"` // milliseconds
	DeliveryCount uint32 `json:"delivery_count,omitempty"`
	// Properties, ApplicationProperties, Annotations and Footer are in the JSON form of an
	// Export, which keeps every AMQP type.
	Properties            json.RawMessage `json:"properties,omitempty"`
	ApplicationProperties json.RawMessage `json:"application_properties,omitempty"`
	Annotations           json.RawMessage `json:"annotations,omitempty"`
	Footer                json.RawMessage `json:"footer,omitempty"`
	// Body is the body as text, in the form that BodyForm names: "json" (indented), "text"
	// (valid UTF-8 without control characters), "hex" (a hexadecimal dump of bytes) or "typed"
	// (an amqp-value or amqp-sequence, as Export writes it). It shows at most the first
	// 1 MiB of the body, or the first 256 KiB as "hex". BodySize is the size of the whole
	// body in bytes. If BodyCut is set, Body is incomplete; the BodySize of a "typed"
	// body is then too small.
	Body     string `json:"body"`
	BodyForm string `json:"body_form"`
	BodySize int    `json:"body_size"`
	BodyCut  bool   `json:"body_cut,omitempty"`
	// RawBody is the whole body if it is bytes or text, and nil if it isn't. If the message
	// can't be decoded, it is the encoded message.
	RawBody []byte `json:"-"`
	// History is the message's history, oldest first, with each failed attempt that the message
	// records: see retry.AttemptsOf.
	History []HistoryEvent `json:"hops"`
}

// What Letter.BodyForm may be.
const (
	bodyJSON  = "json"  // indented
	bodyText  = "text"  // valid UTF-8 without control characters
	bodyHex   = "hex"   // a hexadecimal dump of bytes
	bodyTyped = "typed" // an amqp-value or amqp-sequence, as Export writes it
)

const maxShown = 1 << 20

// ShowConfig selects the message of a Show. Queue and ID are required.
type ShowConfig struct {
	Queue string
	// ID is an ID of List, or a message-id.
	ID string
	// Accept lists the caveats that the caller accepts. See [Caveat].
	Accept []WarningCode
	// Found, if not nil, is called with the message as soon as it is read, at most once and
	// before Show returns. What it means is what [ListConfig] says of its Found. The slices
	// of the Letter are also those of Show's result.
	OnFound func(DeadLetter)
	// Progress, if not nil, is called a few times a second, also after Found. It must not
	// block.
	OnProgress func(Progress)
}

// Show returns the first message of a queue whose ID or message-id is cfg.ID. It walks the
// queue up to that message and changes none. The errors are those of List, and a
// *NoMessageError if there is no such message.
func (d *Desk) Show(ctx context.Context, cfg ShowConfig) (DeadLetter, error) {
	if cfg.ID == "" {
		return DeadLetter{}, argument.At(argument.Root("ShowConfig").Field("ID"), argument.CodeMissing, nil, "is empty", "give an ID of List, or a message-id")
	}
	notify := notifier{notify: cfg.OnProgress}
	t, leave, err := d.enter(ctx, cfg.Queue, cfg.Accept, &notify)
	if err != nil {
		return DeadLetter{}, err
	}
	defer leave()
	var found *DeadLetter
	var unread string
	seen := 0
	match := Filter{IDs: []string{cfg.ID}}.matcher()
	now := func(seen uint64) {
		p := Progress{Seen: seen, Of: t.Messages}
		if found != nil {
			p.Matched = 1
		}
		notify.now(p)
	}
	peek := peeking{reset: func() { seen = 0 }, passed: now, accept: cfg.Accept, unread: &unread}
	if cfg.OnFound != nil {
		peek.found = func() {
			if found != nil {
				cfg.OnFound(*found)
			}
		}
	}
	peek.visit = func(v dedicated.Delivery, l *deadLetter) error {
		if match.matches(l) {
			found = l.whole(seen)
			return errStop
		}
		seen++
		now(uint64(seen))
		return nil
	}
	err = d.peek(ctx, cfg.Queue, peek)
	if found != nil && err == nil {
		return *found, nil
	}
	if err == nil {
		err = &NoMessageError{Queue: cfg.Queue, ID: cfg.ID, Seen: seen, Unread: unread}
	}
	return DeadLetter{}, err
}

// NoMessageError says that a queue has no message with this ID or message-id.
type NoMessageError struct {
	Queue, ID string
	Seen      int // messages that were looked at
	// Unread is why there may be such a message: others consume from the queue. Empty if every
	// message was read.
	Unread string
}

func (e *NoMessageError) Error() string {
	if e.Unread != "" {
		return fmt.Sprintf("hopback: none of the %d messages that could be read in %q has the ID or message-id %.100q; %s", e.Seen, e.Queue, e.ID, e.Unread)
	}
	return fmt.Sprintf("hopback: none of the %d messages in %q has the ID or message-id %.100q", e.Seen, e.Queue, e.ID)
}

func (l *deadLetter) whole(position int) *DeadLetter {
	w := &DeadLetter{Summary: l.summary(position), History: l.history()}
	if h := l.header; h != nil {
		w.Durable, w.TTL, w.DeliveryCount = h.Durable, h.TTL.Value, h.DeliveryCount
	}
	for _, s := range l.sections {
		var to *json.RawMessage
		switch s.Code {
		case frames.SectionProperties:
			to = &w.Properties
		case frames.SectionApplicationProperties:
			to = &w.ApplicationProperties
		case frames.SectionAnnotations:
			to = &w.Annotations
		case frames.SectionFooter:
			to = &w.Footer
		default:
			continue
		}
		if text, err := sectionJSON(s); err == nil {
			*to = text
		}
	}
	w.Body, w.BodyForm, w.BodySize, w.BodyCut = l.shownBody()
	raw, ok := l.bytes()
	if l.bad != nil {
		raw, ok = l.payload, true
	}
	if ok {
		w.RawBody = append([]byte{}, raw...) // the payload's room is used again
	}
	return w
}

// shownBody is the body for people.
func (l *deadLetter) shownBody() (text string, form string, size int, short bool) {
	b, ok := l.bytes()
	if l.bad != nil {
		b, ok = l.payload, true
	}
	if !ok {
		var parts []json.RawMessage
		for _, s := range l.body {
			size += len(s.Raw)
			if size > maxShown {
				short = true
				break
			}
			if part, err := sectionJSON(s); err == nil {
				parts = append(parts, part)
			}
		}
		out, err := json.MarshalIndent(parts, "", "  ")
		if err != nil {
			return err.Error(), bodyText, size, true
		}
		return string(out), bodyTyped, size, short
	}
	size = len(b)
	if short = size > maxShown; short {
		b = b[:maxShown]
	}
	if !short && json.Valid(b) && utf8.Valid(b) {
		var out strings.Builder
		if err := indent(&out, b); err == nil {
			return out.String(), bodyJSON, size, false
		}
	}
	t := b
	if short { // a character may be cut
		for range utf8.UTFMax - 1 {
			if utf8.Valid(t) {
				break
			}
			t = t[:len(t)-1]
		}
	}
	if utf8.Valid(t) && !strings.ContainsFunc(string(t), func(r rune) bool { return r < ' ' && r != '\n' && r != '\r' && r != '\t' || r == 0x7f }) {
		return string(t), bodyText, size, short
	}
	// A dump takes five times the room.
	if len(b) > maxShown/4 {
		b, short = b[:maxShown/4], true
	}
	return hex.Dump(b), bodyHex, size, short
}
