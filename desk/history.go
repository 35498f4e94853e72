package desk

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/internal/historylog"
	"github.com/hopback/hopback/retry"
)

// HistoryEvent is an event in the history of a message, as the message records it.
type HistoryEvent struct {
	// At is the time of the event. It is zero if unknown.
	At time.Time `json:"at,omitzero"`
	// Kind is the kind of the event:
	//
	//	"created"        by the property creation-time
	//	"published"      to its exchange, before its first retry
	//	"first failure"  since the message was published or replayed
	//	"failure"        between the first and the last
	//	"last failure"   since the message was published or replayed
	//	"dead-lettered"  by the broker
	//	"died"           dead-lettered before an earlier replay
	//	"replayed"       by a Desk
	Kind string `json:"kind"`
	// Queue is the queue where it happened.
	Queue string `json:"queue,omitempty"`
	// Reason is the broker's reason for dead-lettering, such as "rejected", or the Reason
	// of a death.
	Reason string `json:"reason,omitempty"`
	// Count is how often it happened. Since is when it first happened, if Count is above 1.
	Count uint64    `json:"count,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Delay is how long the message was to wait after a failure. It is in nanoseconds in JSON.
	Delay time.Duration `json:"delay,omitempty"`
	// Text is the error, the exchange and routing key, or ReplayConfig.By, as fits Kind.
	Text string `json:"text,omitempty"`
}

// What Hop.Kind may be.
const (
	historyCreated             = "created"       // by the property creation-time
	historyPublished           = "published"     // to its exchange, before its first retry
	historyFirstFailure        = "first failure" // of this life
	historyFailed              = "failure"       // of this life, between the first and the last
	historyLastFailure         = "last failure"  // of this life
	historyDeadLettered        = "dead-lettered" // by the broker
	historyEarlierDeadLettered = "died"          // in an earlier life
	historyReplayed            = "replayed"      // by a Desk
)

const maxDeadLetterings = 64

// historyOf is x-opt-deaths as go-amqp would have decoded it, as far as package historylog reads
// it. It is nil if there is none.
func historyOf(annotations frames.Map) []map[any]any {
	v, _ := annotations.Get(historylog.Key)
	a, ok := v.(frames.Array)
	if !ok {
		return nil
	}
	var all []map[any]any
	for _, e := range a.Elements[:min(len(a.Elements), maxDeadLetterings)] {
		m, ok := e.(frames.Map)
		if !ok {
			continue
		}
		one := map[any]any{}
		for _, e := range m {
			key, _ := text(e.Key)
			switch v := e.Value.(type) {
			case frames.Timestamp:
				one[key] = stamp(v)
			case frames.Array:
				one[key] = v.Elements
			default:
				one[key] = plain(v)
			}
		}
		all = append(all, one)
	}
	return all
}

// stamp reads a time that may be any.
func stamp(t frames.Timestamp) time.Time {
	if t <= 0 || t > 253402300799999 {
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

// lives reads annotation.Lives, which anybody may have written.
func (l *deadLetter) lives() []life {
	s := l.annotation(annotation.Lives)
	if s == "" || len(s) > 4*maxLivesBytes {
		return nil
	}
	var all []life
	if json.Unmarshal([]byte(s), &all) != nil {
		return nil
	}
	return all[max(len(all)-maxLives, 0):]
}

// history is the message's history, oldest first. The order doesn't depend on times: those of
// deaths are the broker's and may be whole seconds, those of attempts may be a worker's.
func (l *deadLetter) history() []HistoryEvent {
	var events []HistoryEvent
	at := func(ms int64) time.Time { return stamp(frames.Timestamp(ms)) }
	if l.properties != nil && l.properties.CreationTime.Set {
		events = append(events, HistoryEvent{At: stamp(l.properties.CreationTime.Value), Kind: historyCreated})
	}
	if l.death.Exchange != "" || l.death.RoutingKey != "" {
		events = append(events, HistoryEvent{Kind: historyPublished, Text: cut(l.death.Exchange+" "+l.death.RoutingKey, 600)})
	}
	for _, e := range l.lives() {
		events = append(events,
			HistoryEvent{At: at(e.Died), Kind: historyEarlierDeadLettered, Queue: e.Queue, Reason: string(e.Reason), Text: e.Error},
			HistoryEvent{At: at(e.At), Kind: historyReplayed, Text: e.Replay + " " + e.By})
	}
	attempts := retry.AttemptsOf(l.m)
	deaths := l.deaths()
	slices.Reverse(deaths) // RabbitMQ has the last one first
	before, between := afterWhichAttempt(attempts, deaths, l.death.Queue)
	died := func(which []int) {
		for _, i := range which {
			d := deaths[i]
			h := HistoryEvent{At: d.Last, Kind: historyDeadLettered, Queue: d.Queue, Reason: d.Reason, Count: d.Count}
			if d.Count > 1 {
				h.Since = d.First
			}
			events = append(events, h)
		}
	}
	died(before)
	events = append(events, l.missing(attempts)...)
	for i, a := range attempts {
		h := HistoryEvent{At: a.At.UTC(), Kind: historyFailed, Queue: l.death.Queue, Text: a.Error, Delay: a.Delay}
		switch {
		case i == len(attempts)-1:
			h.Kind, h.Reason, h.Text = historyLastFailure, string(l.death.Reason), l.death.Error
		case a.At.Equal(l.death.FirstFailure):
			h.Kind = historyFirstFailure
		}
		events = append(events, h)
		died(between[i])
	}
	return events
}

// missing is what is known of failed attempts that the message doesn't list.
func (l *deadLetter) missing(attempts []retry.FailedAttempt) []HistoryEvent {
	first := l.death.FirstFailure
	if first.IsZero() || len(attempts) > 0 && !first.Before(attempts[0].At) {
		return nil
	}
	events := []HistoryEvent{{At: first.UTC(), Kind: historyFirstFailure, Queue: l.death.Queue}}
	if n := l.death.Retries - len(attempts); n > 0 { // without the first
		events = append(events, HistoryEvent{Kind: historyFailed, Queue: l.death.Queue, Count: uint64(n), Text: "not recorded"})
	}
	return events
}

// afterWhichAttempt says which deaths, by index, follow each attempt, and which come before all
// of them. Both lists are oldest first, and so are the results. queue is where the attempts
// failed.
//
// RabbitMQ has one entry for all deaths in a queue for a reason, with the time of the last
// one. A message that is moved has one history for all attempts, and leaves a delay queue
// between two of them. The history of a copy begins in a delay queue.
func afterWhichAttempt(attempts []retry.FailedAttempt, deaths []historylog.DeadLettering, queue string) (before []int, after map[int][]int) {
	after = map[int][]int{}
	last := len(attempts) - 1
	var waits []int // attempts before a delay, the newest first
	for i, a := range slices.Backward(attempts) {
		if a.Delay > 0 {
			waits = append(waits, i)
		}
	}
	// moved is how many of these delays are between two failures of this history.
	moved := 0
	for _, d := range deaths {
		if d.Queue == queue && d.Reason == "rejected" {
			moved = int(min(d.Count, uint64(len(attempts))))
		}
	}
	if moved > 0 && last >= 0 && attempts[last].Delay == 0 {
		moved--
	}
	place := make([]int, len(deaths))
	next, seen := 0, map[time.Duration]bool{}
	for i, d := range slices.Backward(deaths) {
		place[i] = last
		if d.Reason != "expired" || d.Queue == queue {
			continue
		}
		for next < min(moved, len(waits)) && seen[attempts[waits[next]].Delay] {
			next++
		}
		switch {
		case len(waits) == 0:
			place[i] = -1
		case next < min(moved, len(waits)):
			place[i] = waits[next]
			seen[attempts[waits[next]].Delay] = true
			next++
		default:
			place[i] = waits[min(max(moved, 0), len(waits)-1)]
		}
	}
	for i, p := range place {
		if p < 0 {
			before = append(before, i)
		} else {
			after[p] = append(after[p], i)
		}
	}
	return before, after
}
