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

// ListConfig configures [Desk.List]. Queue is required.
type ListConfig struct {
	// Queue is the queue to list. Any queue but a stream works.
	Queue string
	// Filter selects the messages. Default: all messages.
	Filter Filter
	// Skip and Limit select a page of the matching messages: Skip leaves out that many from
	// the queue's head, and Limit is the size of the page. Limit can be up to 10,000.
	// Default: 50. Every page is a new scan from the queue's head.
	Skip, Limit int
	// Count makes List read to the queue's end, so that Matched counts every match. Default:
	// List stops after the page and the match that follows it.
	Count bool
	// PropertyTexts fills in Summary.PropertyTexts.
	PropertyTexts bool
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnFound, if not nil, is called with the page as soon as it is complete, and before List
	// returns. It must not block.
	//
	//   - During the call the messages are still held, and other consumers don't get them.
	//   - Afterwards List returns the messages in order, which can take minutes: see the
	//     package's documentation.
	//   - It is called at most once. If the connection is lost after the call, List scans
	//     again, and may return another page.
	//   - It isn't called if List fails before the page is complete.
	OnFound func(List)
	// OnProgress, if not nil, is called a few times a second, also after OnFound. It must not
	// block.
	OnProgress func(Progress)
}

// List is a page of messages.
type List struct {
	SideEffects SideEffects `json:"side_effects"`
	Messages    []Summary   `json:"messages"`
	// Seen is the number of messages read. Matched is how many of them match.
	Seen    uint64 `json:"seen"`
	Matched uint64 `json:"matched"`
	// More reports whether more messages match after this page.
	More bool `json:"more"`
	// Unread says why messages may be missing: when List reached the queue's end, other consumers
	// were there, or messages waited for their delivery time. It is empty if List read every
	// message, if it didn't read to the end, and if WarningConsumers and WarningWaiting are
	// accepted.
	Unread string `json:"unread,omitempty"`
}

// maxPage bounds ListConfig.Limit, and with it the memory of a List.
const maxPage = 10_000

// List scans a queue from its head and returns a page of the messages that match. The
// messages stay in the queue, in order. The page has no bodies: use [Desk.Show] to read one
// message completely. The errors:
//
//   - [*argument.Error]: a field of cfg is invalid.
//   - [*SideEffectsError]: reading has side effects that cfg.Accept doesn't list.
//   - [declare.ErrNotFound]: the queue doesn't exist.
//   - [*client.Error]: the broker can't be reached or refuses, as in [client.Conn.Consume].
//     List reconnects a few times before it returns [client.ErrConnectionLost].
//   - [context.DeadlineExceeded]: reading the queue takes more than 15 minutes. The List has
//     what was read.
//   - ctx's cause, if ctx ends.
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
				m := l.summary(position).bounded()
				if cfg.PropertyTexts {
					m.PropertyTexts = l.propertyTexts()
				}
				list.Messages = append(list.Messages, m)
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
	// Durable, TTL (in milliseconds), and DeliveryCount are from the message's header.
	Durable       bool   `json:"durable"`
	TTL           uint32 `json:"ttl,omitempty"`
	DeliveryCount uint32 `json:"delivery_count,omitempty"`
	// Properties, ApplicationProperties, Annotations, and Footer are in the JSON form of
	// [Desk.Export], which keeps every AMQP type.
	Properties            json.RawMessage `json:"properties,omitempty"`
	ApplicationProperties json.RawMessage `json:"application_properties,omitempty"`
	Annotations           json.RawMessage `json:"annotations,omitempty"`
	Footer                json.RawMessage `json:"footer,omitempty"`
	// Body is the body as text, in the form that BodyForm names:
	//
	//   - "json": indented JSON.
	//   - "text": valid UTF-8 without control characters.
	//   - "hex": a hexadecimal dump of bytes.
	//   - "typed": an amqp-value or amqp-sequence, as Export writes it.
	//
	// Body has at most the first 1 MiB of the body, or the first 256 KiB as "hex". BodySize
	// is the size of the whole body in bytes. BodyCut reports whether Body is incomplete; the
	// BodySize of a "typed" body is then too small.
	Body     string `json:"body"`
	BodyForm string `json:"body_form"`
	BodySize int    `json:"body_size"`
	BodyCut  bool   `json:"body_cut,omitempty"`
	// RawBody is the whole body if it is bytes or text, and nil otherwise. If the message
	// can't be decoded, RawBody is the encoded message.
	RawBody []byte `json:"-"`
	// History is what happened to the message, oldest event first, with each failed attempt
	// that the message records: see [retry.AttemptsOf].
	History []HistoryEvent `json:"history"`
}

// The values of DeadLetter.BodyForm.
const (
	bodyJSON  = "json"  // indented
	bodyText  = "text"  // valid UTF-8 without control characters
	bodyHex   = "hex"   // a hexadecimal dump of bytes
	bodyTyped = "typed" // an amqp-value or amqp-sequence, as Export writes it
)

const maxShown = 1 << 20

// ShowConfig configures [Desk.Show]. Queue and ID are required.
type ShowConfig struct {
	// Queue is the queue that has the message.
	Queue string
	// ID is the ID of a [Summary], or a message-id.
	ID string
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnFound, if not nil, is called with the message as soon as it is read, at most once and
	// before Show returns. The rules of ListConfig.OnFound apply. The DeadLetter shares its
	// slices with Show's result.
	OnFound func(DeadLetter)
	// OnProgress, if not nil, is called a few times a second, also after OnFound. It must not
	// block.
	OnProgress func(Progress)
}

// Show returns the first message of a queue whose ID or message-id is cfg.ID. It scans the
// queue up to that message and changes none. If there is no such message, the error is a
// [*NoMessageError]. The other errors are those of [Desk.List].
func (d *Desk) Show(ctx context.Context, cfg ShowConfig) (DeadLetter, error) {
	if cfg.ID == "" {
		return DeadLetter{}, argument.At(argument.Root("ShowConfig").Field("ID"), argument.CodeMissing, nil, "is empty", "use the ID of a Summary, or a message-id")
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

// NoMessageError means that Show found no message with this ID or message-id.
type NoMessageError struct {
	Queue, ID string
	// Seen is the number of messages that Show read.
	Seen int
	// Unread says why the message may still be there: other consumers are on the queue, or
	// messages wait in it for their delivery time. It is empty if Show read every message.
	Unread string
}

func (e *NoMessageError) Error() string {
	if e.Unread != "" {
		return fmt.Sprintf("hopback: no message in the queue %q has the ID or message-id %.100q, of %s read; %s", e.Queue, e.ID, many(uint64(e.Seen), "message", "messages"), e.Unread)
	}
	return fmt.Sprintf("hopback: no message in the queue %q has the ID or message-id %.100q, of %s read", e.Queue, e.ID, many(uint64(e.Seen), "message", "messages"))
}

const (
	// maxProperties bounds Summary.PropertyTexts, and maxPropertyText each name and value, in bytes.
	maxProperties   = 100
	maxPropertyText = 1000
)

// propertyTexts are the application properties for people. A name that is too long isn't cut:
// nobody could filter by it.
func (l *deadLetter) propertyTexts() map[string]string {
	texts := make(map[string]string, min(len(l.application), maxProperties))
	for _, e := range l.application {
		name, ok := text(e.Key)
		if !ok || len(name) > maxPropertyText || len(texts) == maxProperties {
			continue
		}
		texts[name] = cut(propertyText(e.Value), maxPropertyText)
	}
	return texts
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
		w.RawBody = append([]byte{}, raw...) // the payload's buffer is reused
	}
	return w
}

// shownBody is the body as people read it.
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
	// A dump is about five times as long.
	if len(b) > maxShown/4 {
		b, short = b[:maxShown/4], true
	}
	return hex.Dump(b), bodyHex, size, short
}
