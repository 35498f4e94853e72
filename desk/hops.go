package desk

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/frames"
)

// Hop is an event in the history of a message, as the message records it.
type Hop struct {
	// At is the time of the event. It is zero if unknown.
	At time.Time `json:"at,omitzero"`
	// Kind is the kind of the event.
	Kind HopKind `json:"kind"`
	// Queue is the queue where it happened.
	Queue string `json:"queue,omitempty"`
	// Reason is the broker's reason for dead-lettering, such as "rejected", or the Reason
	// of a death.
	Reason string `json:"reason,omitempty"`
	// Count is how often it happened. Since is when it first happened, if Count is above 1.
	Count uint64    `json:"count,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Text is the error, the exchange and routing key, or ReplayConfig.By, as fits Kind.
	Text string `json:"text,omitempty"`
}

// HopKind is the kind of a Hop.
type HopKind string

// The kinds.
const (
	HopCreated      HopKind = "created"       // by the property creation-time
	HopPublished    HopKind = "published"     // to its exchange, before its first retry
	HopFirstFailure HopKind = "first failure" // of this life
	HopLastFailure  HopKind = "last failure"  // of this life
	HopDeadLettered HopKind = "dead-lettered" // by the broker
	HopDied         HopKind = "died"          // in an earlier life
	HopReplayed     HopKind = "replayed"      // by a Desk
)

// death is an entry of RabbitMQ's x-opt-deaths.
type death struct {
	Queue, Reason string
	Count         uint64
	First, Last   time.Time
}

const maxDeaths = 64

// deathsOf reads x-opt-deaths, an array of maps.
func deathsOf(annotations frames.Map) []death {
	v, _ := annotations.Get("x-opt-deaths")
	a, ok := v.(frames.Array)
	if !ok {
		return nil
	}
	var all []death
	for _, e := range a.Elements[:min(len(a.Elements), maxDeaths)] {
		m, ok := e.(frames.Map)
		if !ok {
			continue
		}
		field := func(key string) any {
			v, _ := m.Get(key)
			return v
		}
		var d death
		d.Queue, _ = text(field("queue"))
		d.Reason, _ = text(field("reason"))
		d.Count, _ = field("count").(uint64)
		d.First, d.Last = stamp(field("first-time")), stamp(field("last-time"))
		all = append(all, d)
	}
	return all
}

// stamp reads a time that may be anything.
func stamp(v any) time.Time {
	t, ok := v.(frames.Timestamp)
	if !ok || t <= 0 || t > 253402300799999 {
		return time.Time{}
	}
	return t.Time()
}

// life is what is kept of a life that a replay has ended.
type life struct {
	Queue   string        `json:"queue,omitempty"`
	Reason  client.Reason `json:"reason,omitempty"`
	Error   string        `json:"error,omitempty"`
	Type    string        `json:"type,omitempty"`
	Retries int           `json:"retries,omitempty"`
	Died    int64         `json:"died,omitempty"` // milliseconds since 1970, as At
	Replay  string        `json:"replay,omitempty"`
	By      string        `json:"by,omitempty"`
	At      int64         `json:"at,omitempty"`
}

// lives reads AnnotationLives, which anybody may have written.
func (l *letter) lives() []life {
	s := l.annotation(AnnotationLives)
	if s == "" || len(s) > 4*maxLivesBytes {
		return nil
	}
	var all []life
	if json.Unmarshal([]byte(s), &all) != nil {
		return nil
	}
	return all[max(len(all)-maxLives, 0):]
}

// hops is the message's way, oldest first.
func (l *letter) hops() []Hop {
	var hops []Hop
	at := func(ms int64) time.Time { return stamp(frames.Timestamp(ms)) }
	if l.properties != nil && l.properties.CreationTime.Set {
		hops = append(hops, Hop{At: stamp(l.properties.CreationTime.Value), Kind: HopCreated})
	}
	if l.death.Exchange != "" || l.death.RoutingKey != "" {
		hops = append(hops, Hop{Kind: HopPublished, Text: cut(l.death.Exchange+" "+l.death.RoutingKey, 600)})
	}
	for _, e := range l.lives() {
		hops = append(hops,
			Hop{At: at(e.Died), Kind: HopDied, Queue: e.Queue, Reason: string(e.Reason), Text: e.Error},
			Hop{At: at(e.At), Kind: HopReplayed, Text: e.Replay + " " + e.By})
	}
	if first := l.death.FirstFailure; !first.IsZero() {
		hops = append(hops, Hop{At: first.UTC(), Kind: HopFirstFailure, Queue: l.death.Queue})
	}
	if last := l.death.LastFailure; !last.IsZero() {
		hops = append(hops, Hop{At: last.UTC(), Kind: HopLastFailure, Queue: l.death.Queue, Reason: string(l.death.Reason), Text: l.death.Error})
	}
	for _, d := range deathsOf(l.annotations) {
		h := Hop{At: d.Last, Kind: HopDeadLettered, Queue: d.Queue, Reason: d.Reason, Count: d.Count}
		if d.Count > 1 {
			h.Since = d.First
		}
		hops = append(hops, h)
	}
	// What has no time stays before what it was found before. RabbitMQ counts deaths in
	// whole seconds, so they are compared in seconds.
	slices.SortStableFunc(hops, func(a, b Hop) int {
		if a.At.IsZero() || b.At.IsZero() {
			return 0
		}
		return int(max(min(a.At.Unix()-b.At.Unix(), 1), -1))
	})
	return hops
}
