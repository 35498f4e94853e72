package desk

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// Edit changes a message before it is replayed. ReplayConfig.Edit gets one for each selected
// message. Sections that it doesn't change are sent byte for byte.
type Edit struct {
	// Summary describes the message before the edit.
	Summary Summary

	body        []byte
	isBytes     bool
	bodySet     bool
	contentType *string
	set         map[string]any
}

// Body returns the bytes of the body, or false if the body isn't bytes or text. Don't change
// the bytes: pass a changed copy to [Edit.SetBody].
func (e *Edit) Body() ([]byte, bool) { return e.body, e.isBytes }

// SetBody replaces the body with b, as one data section. It doesn't change the content type.
func (e *Edit) SetBody(b []byte) { e.body, e.isBytes, e.bodySet = b, true, true }

// SetContentType sets the property content-type: ASCII of at most 255 bytes.
func (e *Edit) SetContentType(s string) { e.contentType = &s }

// SetProperty sets an application property. v is a string, bool, int64, or float64; nil removes
// the property. The key can have up to 255 bytes.
func (e *Edit) SetProperty(key string, v any) {
	if e.set == nil {
		e.set = map[string]any{}
	}
	e.set[key] = v
}

// Validate returns an [*argument.Error] if a value that was set can't be sent. A replay calls it
// after ReplayConfig.Edit. If it fails, the message stays in the queue and counts as failed.
func (e *Edit) Validate() error {
	at := argument.Root("Edit")
	if t := e.contentType; t != nil && (len(*t) > maxShort || strings.ContainsFunc(*t, func(r rune) bool { return r < ' ' || r > '~' })) {
		return argument.At(at.Field("ContentType"), argument.CodeUnsupported, *t, "isn't ASCII of at most 255 bytes, which AMQP requires for a content-type", "use a media type such as application/json")
	}
	for k, v := range maps.All(e.set) {
		switch {
		case k == "" || len(k) > maxShort || !utf8.ValidString(k):
			return argument.At(at.Field("Property"), argument.CodeUnsupported, k, "isn't valid UTF-8 of 1 to 255 bytes, so it can't be the name of an application property", "use another name")
		case v == nil:
			continue
		}
		switch v := v.(type) {
		case string:
			if !utf8.ValidString(v) {
				return argument.At(at.Field("Property"), argument.CodeUnsupported, k, "would get a value that isn't valid UTF-8", "use valid UTF-8")
			}
		case bool, int64, float64:
		default:
			return argument.At(at.Field("Property"), argument.CodeUnsupported, k, fmt.Sprintf("would get a %T", v), "use a string, bool, int64, or float64")
		}
	}
	return nil
}

// maxShort is how many bytes a name can have if AMQP 0-9-1 consumers are to read it, too.
const maxShort = 255

// unsendable is why a message can't be replayed.
type unsendable struct{ err error }

func (u *unsendable) Error() string { return u.err.Error() }

func (u *unsendable) Unwrap() error { return u.err }

// edited is an Edit of the message.
func (l *deadLetter) edited(position int) *Edit {
	e := &Edit{Summary: l.summary(position)}
	e.body, e.isBytes = l.bytes()
	return e
}

// renewed is the message that a replay sends: the message as first published, plus the marks
// of the replay. The body, the properties, and the footer are the bytes of the original.
func (l *deadLetter) renewed(mark ReplayMark, e *Edit) ([]byte, error) {
	if l.bad != nil {
		return nil, &unsendable{l.bad}
	}
	// Package retry decides what stays and what goes.
	c := evidence(retry.Names{}).Copy(l.m)
	out := frames.Message{
		Header: &frames.MessageHeader{Durable: true, Priority: frames.Some(l.priority())},
	}
	kept := map[string]bool{}
	for _, a := range l.annotations {
		k, ok := text(a.Key)
		if _, keep := c.Annotations[k]; ok && keep && !ours[k] {
			out.Annotations = append(out.Annotations, a)
			kept[k] = true
		}
	}
	for k, v := range c.Annotations {
		// What only the compact form had.
		if s, ok := v.(string); ok && !kept[k.(string)] && !ours[k.(string)] {
			out.Annotations = out.Annotations.Set(frames.Symbol(k.(string)), s)
		}
	}
	out.Annotations = append(out.Annotations, l.marks(mark)...)
	b, err := out.Append(nil)
	if err != nil {
		return nil, &unsendable{err}
	}
	application := l.application
	changed := false
	for i := 0; i < len(application); i++ {
		if k, ok := text(application[i].Key); ok {
			if _, stays := c.ApplicationProperties[k]; !stays {
				if !changed {
					application, changed = append(frames.Map(nil), application...), true
				}
				application = append(application[:i], application[i+1:]...)
				i--
			}
		}
	}
	if b, err = l.appendProperties(b, application, changed, e); err != nil {
		return nil, &unsendable{err}
	}
	if e != nil && e.bodySet {
		if b, err = frames.AppendValue(b, frames.Described{Descriptor: uint64(frames.SectionData), Value: append([]byte{}, e.body...)}); err != nil {
			return nil, &unsendable{err}
		}
	} else {
		for _, s := range l.body {
			b = append(b, s.Raw...)
		}
	}
	if l.footer != nil {
		b = append(b, l.footer.Raw...)
	}
	return b, nil
}

// appendProperties writes the properties and the application properties, byte for byte if
// nothing has changed.
func (l *deadLetter) appendProperties(b []byte, application frames.Map, changed bool, e *Edit) ([]byte, error) {
	var properties, rest []byte
	var err error
	for _, s := range l.sections {
		switch s.Code {
		case frames.SectionProperties:
			properties = s.Raw
		case frames.SectionApplicationProperties:
			if !changed && (e == nil || len(e.set) == 0) {
				rest = s.Raw
			}
		}
	}
	if e != nil && e.contentType != nil {
		p := frames.Properties{}
		if l.properties != nil {
			p = *l.properties
		}
		p.ContentType = frames.Some(frames.Symbol(*e.contentType))
		m := frames.Message{Properties: &p}
		if properties, err = m.Append(nil); err != nil {
			return nil, err
		}
	}
	if e != nil && len(e.set) > 0 {
		application = edit(application, e.set)
	}
	b = append(b, properties...)
	if rest == nil && len(application) > 0 {
		m := frames.Message{ApplicationProperties: application}
		if rest, err = m.Append(nil); err != nil {
			return nil, err
		}
	}
	return append(b, rest...), nil
}

// edit changes application properties.
func edit(m frames.Map, set map[string]any) frames.Map {
	out := append(frames.Map(nil), m...)
	for k, v := range maps.All(set) {
		if v == nil {
			kept := out[:0]
			for _, e := range out {
				if name, ok := text(e.Key); !ok || name != k {
					kept = append(kept, e)
				}
			}
			out = kept
			continue
		}
		found := false
		for i, e := range out {
			if name, ok := text(e.Key); ok && name == k {
				out[i].Value, found = v, true
			}
		}
		if !found {
			out = append(out, frames.Entry{Key: k, Value: v})
		}
	}
	return out
}

// ours are the annotations that marks overwrites.
var ours = map[string]bool{
	annotation.Replays: true, annotation.Replay: true, annotation.ReplayedBy: true, annotation.ReplayedAt: true, annotation.Lives: true,
}

// marks are the annotations that a replay adds. Their size is bounded, however often a message
// is replayed.
func (l *deadLetter) marks(mark ReplayMark) frames.Map {
	at := mark.At.UnixMilli()
	d := l.death
	this := life{
		Queue: cut(d.Queue, 255), Reason: client.Reason(cut(string(d.Reason), 100)), Error: cut(d.Error, 200), Type: cut(d.ErrorType, 100),
		Retries: d.Retries, Died: millis(l.died()), Replay: cut(mark.ID, maxWord), By: cut(mark.By, maxWord), At: at,
	}
	lives := append(l.lives(), this)
	lives = lives[max(len(lives)-maxLives, 0):]
	text, _ := json.Marshal(lives)
	for len(text) > maxLivesBytes && len(lives) > 1 {
		lives = lives[1:]
		text, _ = json.Marshal(lives)
	}
	m := frames.Map{
		{Key: frames.Symbol(annotation.Replays), Value: int64(l.replays() + 1)},
		{Key: frames.Symbol(annotation.Replay), Value: mark.ID},
		{Key: frames.Symbol(annotation.ReplayedAt), Value: at},
		{Key: frames.Symbol(annotation.Lives), Value: string(text)},
	}
	if mark.By != "" {
		m = append(m, frames.Entry{Key: frames.Symbol(annotation.ReplayedBy), Value: mark.By})
	}
	return m
}
