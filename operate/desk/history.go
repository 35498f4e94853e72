package desk

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/frames"
	"github.com/hopback/hopback/retry"
)

// HistoryEvent is an event in a message's history, as the message records it.
type HistoryEvent struct {
	// At is the time of the event, or zero if it is unknown.
	At time.Time `json:"at,omitzero"`
	// Kind is one of:
	//
	//   - "created": the time in the property creation-time.
	//   - "published": to its exchange, before the first retry.
	//   - "first failure": the first since the message was published or replayed.
	//   - "failure": between the first and the last.
	//   - "last failure": the last since the message was published or replayed.
	//   - "dead-lettered": by the broker.
	//   - "dead-lettered earlier": before a replay.
	//   - "replayed": by a Desk.
	Kind string `json:"kind"`
	// Queue is the queue that the message was in.
	Queue string `json:"queue,omitempty"`
	// Reason is the broker's reason for dead-lettering, such as "rejected". In a "last
	// failure" and in "dead-lettered earlier" it is a [client.Reason].
	Reason string `json:"reason,omitempty"`
	// Count is how often the event happened, if the message counts it. Since is when it first
	// happened, if that is known and Count is above 1; At is then the last time.
	Count uint64    `json:"count,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Delay is the delay before the retry that followed a failure. In JSON it is in
	// nanoseconds.
	Delay time.Duration `json:"delay,omitempty"`
	// Text depends on Kind: the error of a failure, the exchange and routing key of
	// "published", the replay's ID and ReplayConfig.By of "replayed".
	Text string `json:"text,omitempty"`
}

// The values of HistoryEvent.Kind. A life is the time from being published or replayed to
// being dead-lettered.
const (
	historyCreated             = "created"               // by the property creation-time
	historyPublished           = "published"             // to its exchange, before its first retry
	historyFirstFailure        = "first failure"         // of this life
	historyFailed              = "failure"               // of this life, between the first and the last
	historyLastFailure         = "last failure"          // of this life
	historyDeadLettered        = "dead-lettered"         // by the broker
	historyEarlierDeadLettered = "dead-lettered earlier" // in an earlier life
	historyReplayed            = "replayed"              // by a Desk
)

const maxDeadLetterings = 64

// historyOf is the annotation x-opt-deaths as go-amqp decodes it, in the parts that
// annotation.DeadLetterings reads. It is nil if the message doesn't have it.
func historyOf(annotations frames.Map) []map[any]any {
	v, _ := annotations.Get(annotation.Deaths)
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

// stamp is a timestamp as a time, or zero if it is out of range.
func stamp(t frames.Timestamp) time.Time {
	if t <= 0 || t > 253402300799999 {
		return time.Time{}
	}
	return t.Time()
}

// life is the summary of a life that ended with a replay.
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

// lives reads annotation.Lives. The message's sender may have written anything there.
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

// history is the message's history, oldest first. The order doesn't depend on times: the
// broker writes those of dead-letterings, sometimes in whole seconds, and workers may write
// those of attempts.
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
	slices.Reverse(deaths) // RabbitMQ puts the latest first
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

// missing are the events of failed attempts that the message counts but doesn't list.
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

// afterWhichAttempt finds out which deaths, by index, follow each attempt, and which come
// before all attempts. Both lists are oldest first, and so are the results. queue is where the
// attempts failed.
//
// RabbitMQ keeps one entry for each queue and reason, with the time of the latest death. A
// message that the broker moves keeps one history for all attempts, and leaves a delay queue
// between two attempts. The history of a retry copy starts in a delay queue.
func afterWhichAttempt(attempts []retry.FailedAttempt, deaths []annotation.DeadLettering, queue string) (before []int, after map[int][]int) {
	after = map[int][]int{}
	last := len(attempts) - 1
	var waits []int // attempts before a delay, the newest first
	for i, a := range slices.Backward(attempts) {
		if a.Delay > 0 {
			waits = append(waits, i)
		}
	}
	// moved is how many of these delays lie between two failures of this history.
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
