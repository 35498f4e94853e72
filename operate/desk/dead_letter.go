package desk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// Summary describes a message in a [List]. A field is zero if the message doesn't have it.
type Summary struct {
	// ID identifies the message in its queue, in 24 hexadecimal digits. It is a hash of the
	// whole message without its delivery counts, so every scan returns the same ID. Two
	// messages have the same ID only if everything else is equal: header, annotations,
	// properties, body, and where and when they were dead-lettered.
	ID string `json:"id"`
	// Position is the message's position in the scan, from 0.
	Position int `json:"position"`
	// MessageID is the message-id. If it is a UUID, a number, or bytes, it is written as text. In a
	// List, this and all other texts have at most 1,000 bytes, and Error client.ErrorTextLimit.
	MessageID string `json:"message_id,omitempty"`
	// Queue is the queue that the message was dead-lettered from.
	Queue string `json:"queue,omitempty"`
	// The fields from Reason to Worker are those of [retry.DeadLetter]. ErrorType is empty for types
	// of the standard library that only hold a text or another error.
	Reason       client.Reason `json:"reason,omitempty"`
	Error        string        `json:"error,omitempty"`
	ErrorType    string        `json:"error_type,omitempty"`
	Retries      int           `json:"retries"`
	FirstFailure time.Time     `json:"first_failure,omitzero"`
	LastFailure  time.Time     `json:"last_failure,omitzero"`
	Exchange     string        `json:"exchange,omitempty"`
	RoutingKey   string        `json:"routing_key,omitempty"`
	Worker       string        `json:"worker,omitempty"`
	// DeadLetteredAt is when the broker last dead-lettered the message, in whole seconds on
	// some versions of RabbitMQ. If the broker recorded no time or one before LastFailure, it
	// is LastFailure.
	DeadLetteredAt time.Time `json:"dead_lettered_at,omitzero"`
	// Group is the ID of the Group that the message belongs to.
	Group string `json:"group"`
	// Replays is how often the message was replayed. LastReplay is the last replay, or nil.
	Replays    int         `json:"replays"`
	LastReplay *ReplayMark `json:"last_replay,omitempty"`
	// ContentType is the property content-type. Size is the size of the encoded message in
	// bytes, and Priority its priority, 4 by default.
	ContentType string `json:"content_type,omitempty"`
	Size        int    `json:"size"`
	Priority    uint8  `json:"priority"`
	// HiddenHeaders reports whether the message may have headers that RabbitMQ hides: see
	// [WarningHeaders].
	HiddenHeaders bool `json:"hidden_headers,omitempty"`
	// PropertyTexts are the first 100 application properties, with their values as
	// Filter.Properties compares them. It is nil unless ListConfig.PropertyTexts is set. It leaves
	// out names longer than 1,000 bytes, and cuts longer values.
	PropertyTexts map[string]string `json:"property_texts,omitempty"`
	// Unreadable says why the message can't be decoded. It is empty if it can. An unreadable
	// message can be shown, exported, and discarded, but not replayed.
	Unreadable string `json:"unreadable,omitempty"`
}

// ReplayMark is the last replay of a message. ID and By are those of its [ReplayConfig].
type ReplayMark struct {
	ID string    `json:"id"`
	By string    `json:"by,omitempty"`
	At time.Time `json:"at,omitzero"`
}

// deadLetter is a message in the form that this package works on. It is decoded in parts,
// since most messages of a scan are read once and forgotten.
type deadLetter struct {
	payload  []byte
	sections []frames.Section
	bad      error // why it can't be decoded

	header      *frames.MessageHeader
	annotations frames.Map
	properties  *frames.Properties
	application frames.Map
	body        []frames.Section // data, sequences or a value
	footer      *frames.Section

	// m has the annotations and application properties, for package retry.
	m     *client.Message
	death retry.DeadLetter

	last time.Time // see died; zero if it isn't known yet
}

// open decodes a message. It never fails: bad says why a message can't be decoded.
func open(payload []byte) *deadLetter {
	l := &deadLetter{payload: payload, m: &client.Message{Value: amqp.Null{}}}
	if l.bad = l.read(); l.bad == nil {
		l.death = retry.DeadLetterOf(l.m)
	}
	return l
}

func (l *deadLetter) read() (err error) {
	if l.sections, err = frames.SplitSections(l.payload); err != nil {
		return err
	}
	head := 0 // bytes before the body
	for _, s := range l.sections {
		if s.Code < frames.SectionData {
			head += len(s.Raw)
			continue
		}
		if s.Code == frames.SectionFooter {
			f := s
			l.footer = &f
			continue
		}
		l.body = append(l.body, s)
	}
	m, err := frames.DecodeMessage(l.payload[:head])
	if err != nil {
		return err
	}
	l.header, l.annotations, l.properties, l.application = m.Header, m.Annotations, m.Properties, m.ApplicationProperties
	if len(l.annotations) > 0 {
		l.m.Annotations = make(map[any]any, len(l.annotations))
		for _, e := range l.annotations {
			if k, ok := text(e.Key); ok {
				l.m.Annotations[k] = plain(e.Value)
			}
		}
	}
	if history := historyOf(l.annotations); history != nil {
		l.m.Annotations[annotation.Deaths] = history
	}
	if len(l.application) > 0 {
		l.m.ApplicationProperties = make(map[string]any, len(l.application))
		for _, e := range l.application {
			if k, ok := text(e.Key); ok {
				l.m.ApplicationProperties[k] = plain(e.Value)
			}
		}
	}
	return nil
}

func text(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case frames.Symbol:
		return string(v), true
	}
	return "", false
}

// plain is a value as go-amqp decodes it, for the types that package retry reads.
func plain(v any) any {
	switch v := v.(type) {
	case frames.Symbol:
		return string(v)
	case frames.Timestamp:
		return v.Time()
	case frames.UUID:
		return amqp.UUID(v)
	}
	return v
}

// annotation is a text among the annotations.
func (l *deadLetter) annotation(key string) string {
	s, _ := l.m.Annotations[key].(string)
	return s
}

// counts are the annotations that RabbitMQ changes with each delivery.
var counts = map[string]bool{"x-acquired-count": true, "x-delivery-count": true}

// id is the message's ID.
func (l *deadLetter) id() string {
	h := l.hash()
	return hex.EncodeToString(h[:])
}

// hash covers everything that stays the same from one scan to the next.
func (l *deadLetter) hash() [12]byte {
	h := sha256.New()
	for _, s := range l.sections {
		if s.Code >= frames.SectionProperties {
			_, _ = h.Write(s.Raw)
		}
	}
	if l.bad != nil {
		_, _ = h.Write(l.payload)
	}
	if m := l.header; m != nil {
		fmt.Fprintf(h, "\x00%t\x00%d\x00%d\x00%t", m.Durable, l.priority(), m.TTL.Value, m.TTL.Set)
	}
	// The broker encodes annotations itself, in no guaranteed order.
	pairs := make([]string, 0, len(l.annotations))
	for _, a := range l.annotations {
		if k, ok := text(a.Key); ok && counts[k] {
			continue
		}
		pair, err := frames.AppendValue(nil, frames.List{a.Key, a.Value})
		if err != nil {
			pair = fmt.Append(nil, a.Key, a.Value)
		}
		pairs = append(pairs, string(pair))
	}
	slices.Sort(pairs)
	for _, pair := range pairs {
		_, _ = h.Write([]byte(pair))
	}
	d := l.died()
	fmt.Fprintf(h, "\x00%s\x00%d\x00%d\x00%d", l.death.Queue, millis(d), l.death.Retries, l.replays())
	return [12]byte(h.Sum(nil)[:12])
}

func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// deaths are the dead-letterings that RabbitMQ recorded, the latest first.
func (l *deadLetter) deaths() []annotation.DeadLettering {
	return annotation.DeadLetterings(nil, l.m.Annotations)
}

// died is when the message was last dead-lettered.
func (l *deadLetter) died() time.Time {
	if !l.last.IsZero() {
		return l.last
	}
	if l.last = l.deadLetteredAt(); l.last.Before(l.death.LastFailure) {
		l.last = l.death.LastFailure
	}
	return l.last
}

func (l *deadLetter) replays() int {
	n, _ := l.m.Annotations[annotation.Replays].(int64)
	return int(min(max(n, 0), 1<<30))
}

// replay is the message's last replay.
func (l *deadLetter) replay() *ReplayMark {
	if l.replays() == 0 {
		return nil
	}
	at, _ := l.m.Annotations[annotation.ReplayedAt].(int64)
	m := &ReplayMark{ID: l.annotation(annotation.Replay), By: l.annotation(annotation.ReplayedBy)}
	if at > 0 && at < 253402300799999 {
		m.At = time.UnixMilli(at).UTC()
	}
	return m
}

func (l *deadLetter) messageID() string {
	if l.properties == nil {
		return ""
	}
	return idText(l.properties.MessageID)
}

func idText(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return strings.ToValidUTF8(v, "?")
	case uint64:
		return strconv.FormatUint(v, 10)
	case frames.UUID:
		return amqp.UUID(v).String()
	case []byte:
		return hex.EncodeToString(v)
	}
	return fmt.Sprint(v)
}

// summary is the message's entry in a list.
func (l *deadLetter) summary(position int) Summary {
	d := l.death
	s := Summary{
		ID: l.id(), Position: position, MessageID: l.messageID(), Queue: d.Queue,
		Reason: d.Reason, Error: d.Error, ErrorType: shownType(d.ErrorType), Retries: d.Retries,
		FirstFailure: d.FirstFailure.UTC(), LastFailure: d.LastFailure.UTC(), Exchange: d.Exchange, RoutingKey: d.RoutingKey, Worker: d.Worker,
		DeadLetteredAt: l.died().UTC(), Group: l.group().ID, Replays: l.replays(), LastReplay: l.replay(), HiddenHeaders: l.mayHideHeaders(), Size: len(l.payload), Priority: l.priority(),
	}
	if l.properties != nil {
		s.ContentType = string(l.properties.ContentType.Value)
	}
	if l.bad != nil {
		s.Unreadable = l.bad.Error()
	}
	return s
}

func (l *deadLetter) priority() uint8 {
	if l.header == nil {
		return 4
	}
	return l.header.Priority.Or(4)
}

// bytes is the body if it is bytes or text.
func (l *deadLetter) bytes() (b []byte, ok bool) {
	for _, s := range l.body {
		v, err := s.Value()
		if err != nil {
			return nil, false
		}
		switch v := v.(type) {
		case []byte:
			if b == nil {
				b = v[:len(v):len(v)]
			} else {
				b = append(b, v...)
			}
		case string:
			return []byte(v), s.Code == frames.SectionValue
		default:
			return nil, false
		}
	}
	return b, len(l.body) > 0
}

// bounded cuts what a sender may have made as long as a message: a page has thousands of them.
func (s Summary) bounded() Summary {
	for _, text := range []*string{&s.MessageID, &s.Queue, &s.ErrorType, &s.Exchange, &s.RoutingKey, &s.Worker, &s.ContentType, (*string)(&s.Reason)} {
		*text = cut(*text, maxPropertyText)
	}
	s.Error = cut(s.Error, client.ErrorTextLimit)
	if s.LastReplay != nil {
		s.LastReplay.ID, s.LastReplay.By = cut(s.LastReplay.ID, maxPropertyText), cut(s.LastReplay.By, maxPropertyText)
	}
	return s
}

// cut shortens s to at most n bytes of valid UTF-8. The result doesn't keep the rest in memory.
func cut(s string, n int) string {
	if len(s) > n {
		s = strings.Clone(s[:n])
		for len(s) > 0 {
			if r, size := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || size > 1 {
				break
			}
			s = s[:len(s)-1]
		}
	}
	return strings.ToValidUTF8(s, "?")
}
