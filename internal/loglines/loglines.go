// Package loglines combines log lines that repeat: one of a kind in a while, with the number of the others.
package loglines

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// RepeatsEvery is the time between two lines about messages of one kind.
const RepeatsEvery = 10 * time.Second

// maxKinds is how many kinds Repeats keeps at a time. Lines beyond that differ by level and
// message only.
const maxKinds = 64

// Attributes of a line that combines several.
const (
	attrMore = "more" // how many messages it stands for
	attrIn   = "in"   // within which time
)

// Repeats is a slog.Handler that limits lines about single messages, so that 5,000 failing
// messages don't write 5,000 lines. A line is about a single message if it has one of the attributes
// message_id, offset, and key. The first line of each kind is written at once. Those that follow within RepeatsEvery
// are counted, and one line has their number: the same message, with the attributes that they have
// in common, and more and in. Each line is written, or counted in a later one.
//
//   - A kind is level, message, queue, address, reason, strategy, and the error, all without
//     numbers and quoted texts.
//   - Lines at debug level are all written: who reads them looks for single messages.
//   - Flush writes the counts at once. Call it when no more lines are expected.
type Repeats struct {
	to    slog.Handler
	all   *kinds
	attrs []slog.Attr // of WithAttrs, as far as they tell kinds apart
	group bool        // after WithGroup, nothing is limited: attributes have other names
}

// kinds are what a Repeats and those derived from it share.
type kinds struct {
	mu    sync.Mutex
	known map[string]*kind
}

// kind has the lines that one line was written for within RepeatsEvery.
type kind struct {
	since time.Time
	timer *time.Timer
	more  int
	last  slog.Record  // the last of them
	attrs []slog.Attr  // of last, those that all have
	to    slog.Handler // of last
}

// NewRepeats returns a Repeats that writes to h.
func NewRepeats(h slog.Handler) *Repeats {
	return &Repeats{to: h, all: &kinds{known: map[string]*kind{}}}
}

func (r *Repeats) Enabled(ctx context.Context, l slog.Level) bool { return r.to.Enabled(ctx, l) }

func (r *Repeats) WithAttrs(attrs []slog.Attr) slog.Handler {
	derived := *r
	derived.to = r.to.WithAttrs(attrs)
	derived.attrs = slices.Clip(r.attrs)
	for _, a := range attrs {
		if distinguishes(a.Key) {
			derived.attrs = append(derived.attrs, a)
		}
	}
	return &derived
}

func (r *Repeats) WithGroup(name string) slog.Handler {
	derived := *r
	derived.to, derived.group = r.to.WithGroup(name), true
	return &derived
}

// Handle writes the line, or counts it.
func (r *Repeats) Handle(ctx context.Context, line slog.Record) error {
	if line.Level < slog.LevelInfo || r.group || !aboutOneMessage(line) || !r.all.counted(r, line) {
		return r.to.Handle(ctx, line)
	}
	return nil
}

// Flush writes what has been counted.
func (r *Repeats) Flush() {
	k := r.all
	k.mu.Lock()
	ended := slices.SortedFunc(maps.Values(k.known), func(a, b *kind) int { return a.since.Compare(b.since) })
	clear(k.known)
	var write []func()
	for _, of := range ended {
		of.timer.Stop()
		if of.more > 0 {
			write = append(write, of.line())
		}
	}
	k.mu.Unlock()
	for _, w := range write {
		w()
	}
}

func aboutOneMessage(line slog.Record) (is bool) {
	line.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "message_id", "offset", "key":
			is = true
		}
		return !is
	})
	return is
}

// distinguishes reports whether lines that differ in this attribute are of different kinds.
func distinguishes(attr string) bool {
	switch attr {
	case "queue", "work_queue", "to", "reason", "strategy", "error", "panic", "instead":
		return true
	}
	return false
}

// counted counts the line, unless it is the first of its kind.
func (k *kinds) counted(r *Repeats, line slog.Record) bool {
	var common []slog.Attr
	line.Attrs(func(a slog.Attr) bool {
		if distinguishes(a.Key) {
			common = append(common, a)
		}
		return true
	})
	key := keyOf(line, r.attrs, common)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.known[key] == nil && len(k.known) >= maxKinds {
		common, key = nil, keyOf(line, nil, nil)
	}
	if of := k.known[key]; of != nil {
		of.more, of.last, of.attrs, of.to = of.more+1, line, common, r.to
		return true
	}
	of := &kind{since: time.Now()}
	of.timer = time.AfterFunc(RepeatsEvery, func() { k.over(key, of) })
	k.known[key] = of
	return false
}

// over ends a period of a kind. If lines were counted in it, the next one begins.
func (k *kinds) over(key string, of *kind) {
	k.mu.Lock()
	if k.known[key] != of { // flushed
		k.mu.Unlock()
		return
	}
	if of.more == 0 {
		delete(k.known, key)
		k.mu.Unlock()
		return
	}
	write := of.line()
	of.timer.Reset(RepeatsEvery)
	k.mu.Unlock()
	write()
}

// line returns a function that writes how many lines were counted, and starts counting again.
func (of *kind) line() (write func()) {
	now := time.Now()
	line := slog.NewRecord(now, of.last.Level, of.last.Message, of.last.PC)
	line.AddAttrs(of.attrs...)
	line.Add(attrMore, of.more, attrIn, now.Sub(of.since).Round(time.Millisecond))
	to := of.to
	of.since, of.more, of.last, of.attrs = now, 0, slog.Record{}, nil
	// No ctx: that of a message has its trace, and this line isn't about one message. There is
	// nobody to whom an error of the user's log handler could be returned.
	return func() { _ = to.Handle(context.Background(), line) }
}

// keyOf returns the text that lines of one kind have in common.
func keyOf(line slog.Record, all ...[]slog.Attr) string {
	key := []byte(line.Level.String() + "\x00" + line.Message)
	for _, attrs := range all {
		for _, a := range attrs {
			key = append(append(append(key, 0), a.Key...), '=')
			key = appendClass(key, a.Value.Resolve().String())
		}
	}
	return string(key)
}

// classLength is how much of a text tells kinds apart.
const classLength = 300

// appendClass appends text without what differs between errors of the same cause: words with
// digits, and quoted texts.
func appendClass(key []byte, text string) []byte {
	text = text[:min(len(text), classLength)]
	var quote rune
	for word := range strings.FieldsSeq(text) {
		if quote == 0 {
			key = append(key, ' ')
		}
		if quote == 0 && strings.ContainsFunc(word, unicode.IsDigit) && !strings.ContainsAny(word, quotes) {
			key = append(key, '#')
			continue
		}
		for _, c := range word {
			switch {
			case quote != 0:
				if c == quote {
					quote = 0
				}
			case strings.ContainsRune(quotes, c):
				quote = c
				key = append(key, '#')
			default:
				key = utf8.AppendRune(key, c)
			}
		}
	}
	return key
}

const quotes = "\"`"

// Outage decides which of the failures of an outage are worth a line: the first, one after a minute,
// and one whenever the outage lasts twice as long as at the line before, but at least one an hour.
// The zero Outage hasn't begun. The end of an outage is the zero Outage again.
type Outage struct{ since, next time.Time }

// Pauses between lines about one outage.
const (
	minOutagePause = time.Minute
	maxOutagePause = time.Hour
)

// Due reports whether a failure at this time is worth a line.
func (o *Outage) Due(now time.Time) bool {
	switch {
	case o.since.IsZero():
		o.since, o.next = now, now.Add(minOutagePause)
		return true
	case now.Before(o.next):
		return false
	}
	for !now.Before(o.next) {
		o.next = o.next.Add(min(o.next.Sub(o.since), maxOutagePause))
	}
	return true
}

// Level is slog.LevelWarn for a failure that is Due, and else slog.LevelDebug.
func (o *Outage) Level(now time.Time) slog.Level {
	if o.Due(now) {
		return slog.LevelWarn
	}
	return slog.LevelDebug
}
