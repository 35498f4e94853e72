package desk

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
)

// Filter selects messages. A message must match every field that is set; within a list, one
// entry is enough. The zero Filter matches all messages. Each list can have up to 100,000
// entries.
type Filter struct {
	// IDs selects messages by the ID of their [Summary] or by message-id.
	IDs []string `json:"ids,omitempty"`
	// Groups selects messages by the ID of their [Group], 12 hexadecimal digits.
	Groups []string `json:"groups,omitempty"`
	// Queues selects messages by the queue that they were dead-lettered from.
	Queues []string `json:"queues,omitempty"`
	// Reasons selects messages by the reason why they were dead-lettered.
	Reasons []client.Reason `json:"reasons,omitempty"`
	// ErrorType is the exact Go type of the error, such as "*net.OpError".
	ErrorType string `json:"error_type,omitempty"`
	// Text is a part of the error text. Case matters.
	Text string `json:"text,omitempty"`
	// Match is a regular expression that matches a part of the error text.
	Match *regexp.Regexp `json:"-"`
	// Properties are application properties that a message must have, all of them. Values
	// are compared as text: "42" also matches the number 42.
	Properties map[string]string `json:"properties,omitempty"`
	// DeadLetteredAfter and DeadLetteredBefore select messages by the time when they were
	// dead-lettered: at DeadLetteredAfter or later, and before DeadLetteredBefore. A message
	// without a known time doesn't match.
	DeadLetteredAfter  time.Time `json:"dead_lettered_after,omitzero"`
	DeadLetteredBefore time.Time `json:"dead_lettered_before,omitzero"`
	// MinReplays and MaxReplays select messages by the number of their replays, both
	// inclusive. If MaxReplays is nil, there is no upper limit.
	MinReplays int  `json:"min_replays,omitempty"`
	MaxReplays *int `json:"max_replays,omitempty"`
}

// maxChoices bounds the lists in a Filter.
const maxChoices = 100_000

func (f *Filter) check() error {
	at := argument.Root("Filter")
	for _, c := range []struct {
		name string
		n    int
	}{{"IDs", len(f.IDs)}, {"Groups", len(f.Groups)}, {"Queues", len(f.Queues)}, {"Reasons", len(f.Reasons)}, {"Properties", len(f.Properties)}} {
		if c.n > maxChoices {
			return argument.At(at.Field(c.name), argument.CodeTooLong, c.n, "has too many entries", fmt.Sprintf("use at most %d", maxChoices))
		}
	}
	for i, g := range f.Groups {
		if b, err := hex.DecodeString(g); err != nil || len(b) != groupBytes {
			return argument.At(at.Field("Groups").Index(i), argument.CodeMalformed, g, "isn't the ID of a group", "use the ID of a Group, 12 hexadecimal digits")
		}
	}
	switch {
	case f.MinReplays < 0:
		return argument.At(at.Field("MinReplays"), argument.CodeOutOfRange, f.MinReplays, "is negative", "use 0 or more")
	case f.MaxReplays != nil && *f.MaxReplays < f.MinReplays:
		return argument.At(at.Field("MaxReplays"), argument.CodeConflict, *f.MaxReplays, "is below", "use a larger number").And(at.Field("MinReplays"))
	case !f.DeadLetteredBefore.IsZero() && !f.DeadLetteredAfter.Before(f.DeadLetteredBefore):
		return argument.At(at.Field("DeadLetteredBefore"), argument.CodeConflict, f.DeadLetteredBefore.Format(time.RFC3339), "isn't after", "use a later time").And(at.Field("DeadLetteredAfter"))
	}
	return nil
}

// everything reports whether f matches all messages.
func (f *Filter) everything() bool {
	return len(f.IDs)+len(f.Groups)+len(f.Queues)+len(f.Reasons)+len(f.Properties)+f.MinReplays == 0 &&
		f.ErrorType == "" && f.Text == "" && f.Match == nil && f.DeadLetteredAfter.IsZero() && f.DeadLetteredBefore.IsZero() && f.MaxReplays == nil
}

// matcher is a prepared Filter.
type matcher struct {
	Filter
	ids, groups map[string]bool
}

func (f Filter) matcher() *matcher {
	set := func(all []string) map[string]bool {
		m := make(map[string]bool, len(all))
		for _, s := range all {
			m[s] = true
		}
		return m
	}
	return &matcher{Filter: f, ids: set(f.IDs), groups: set(f.Groups)}
}

func (f *matcher) matches(l *deadLetter) bool {
	d := &l.death
	switch {
	case len(f.Reasons) > 0 && !slices.Contains(f.Reasons, d.Reason),
		len(f.Queues) > 0 && !slices.Contains(f.Queues, d.Queue),
		f.ErrorType != "" && f.ErrorType != d.ErrorType && f.ErrorType != shownType(d.ErrorType),
		f.Text != "" && !strings.Contains(d.Error, f.Text),
		f.Match != nil && !f.Match.MatchString(d.Error),
		f.MinReplays > 0 && l.replays() < f.MinReplays,
		f.MaxReplays != nil && l.replays() > *f.MaxReplays:
		return false
	}
	for k, want := range f.Properties {
		v, ok := l.application.Get(k)
		if !ok || propertyText(v) != want {
			return false
		}
	}
	if !f.DeadLetteredAfter.IsZero() || !f.DeadLetteredBefore.IsZero() {
		died := l.died()
		if died.IsZero() || died.Before(f.DeadLetteredAfter) || !f.DeadLetteredBefore.IsZero() && !died.Before(f.DeadLetteredBefore) {
			return false
		}
	}
	if len(f.groups) > 0 && !f.groups[l.group().ID] {
		return false
	}
	if len(f.ids) == 0 {
		return true
	}
	if id := l.messageID(); id != "" && f.ids[id] {
		return true
	}
	return f.ids[l.id()]
}

// propertyText is the value of an application property as text.
func propertyText(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case frames.Symbol:
		return string(v)
	case frames.Timestamp:
		return v.Time().Format(time.RFC3339Nano)
	case float32:
		return strconv.FormatFloat(float64(v), 'g', -1, 32)
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64)
	case frames.UUID, []byte:
		return idText(v)
	}
	return fmt.Sprint(v)
}
