package retry

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
)

const (
	// maxAttempts bounds the list of attempts, and maxAttemptsBytes its JSON.
	maxAttempts      = 32
	maxAttemptsBytes = 1024
	// maxAttemptText is how many bytes of an error the list has.
	maxAttemptText = 100
)

// FailedAttempt is one failed attempt in the history of a message. See [AttemptsOf].
type FailedAttempt struct {
	// At is when the attempt failed, by the broker's clock as the worker knows it.
	At time.Time
	// Delay is the delay before the next attempt. It is zero if the attempt wasn't retried.
	Delay time.Duration
	// Error is the start of the error's text, at most 100 bytes.
	Error string
}

// AttemptsOf returns the failed attempts that m records, oldest first, so the last one is the
// last failure. Use it to show the history of a message, for example of a dead letter.
//
// The list can be incomplete:
//
//   - It has at most 33 attempts. If there were more, or if their errors take too much space, the
//     oldest are missing.
//   - Attempts in workers that don't use this package are missing.
//
// Use it for display only: the message's sender or another client could have written all of it.
// AttemptsOf never fails. It skips entries that it can't parse.
func AttemptsOf(m *client.Message) []FailedAttempt {
	if m == nil {
		return nil
	}
	t := historyOf(m)
	all := attemptsUntil(&t)
	// The delay in a dead letter is that of its last retry. After the last attempt of a
	// dead-lettered message there is none.
	r, _ := m.Annotations[client.AnnotationReason].(string)
	if n := len(all); n > 0 && givenUp(client.Reason(r)) && all[n-1].At.Equal(millis(t.Last)) {
		all[n-1].Delay = 0
	}
	return all
}

// attemptsUntil returns all attempts of t, with its last failure.
func attemptsUntil(t *compactHistory) []FailedAttempt {
	last := FailedAttempt{
		At: millis(t.Last), Delay: time.Duration(min(max(t.Delay, t.Asked, 0), maxDelay.Milliseconds())) * time.Millisecond, Error: attemptText(t.Error),
	}
	all := readAttempts(t.Attempts, last.Error)
	// A message that waited without another failure has its last one in the list.
	if !last.At.IsZero() && (len(all) == 0 || !all[len(all)-1].At.Equal(last.At)) {
		all = append(all, last)
	}
	return all
}

// attemptsBefore returns the list for m, which has failed once more with the error text, or
// waits and hasn't failed. compact is its annotation.History, if that was parsed.
func attemptsBefore(m *client.Message, compact *compactHistory, text string, waits bool) string {
	var t compactHistory
	switch {
	case m.Annotations[annotation.Older.Last] != nil || m.Annotations[annotation.Queue] != nil:
		t = historyOf(m)
	case compact != nil:
		t = *compact
	default:
		return "" // the first failure costs nothing
	}
	if waits {
		text = t.Error
	}
	return writeAttempts(attemptsUntil(&t), text)
}

// attemptText is what the list has of an error's text.
func attemptText(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= maxAttemptText {
		return s
	}
	n := maxAttemptText
	for !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// readAttempts reads a list that anybody could have written. next is the error after it.
func readAttempts(list, next string) []FailedAttempt {
	if list == "" || len(list) > 4*maxAttemptsBytes {
		return nil
	}
	var raw [][]json.RawMessage
	if json.Unmarshal([]byte(list), &raw) != nil {
		return nil
	}
	var all []FailedAttempt
	for _, r := range slices.Backward(raw[max(len(raw)-maxAttempts, 0):]) {
		var at, delay int64
		if len(r) < 2 || json.Unmarshal(r[0], &at) != nil || json.Unmarshal(r[1], &delay) != nil || millis(at).IsZero() {
			continue
		}
		if len(r) > 2 {
			var text string
			if json.Unmarshal(r[2], &text) != nil {
				continue
			}
			next = attemptText(text)
		}
		delay = min(max(delay, 0), maxDelay.Milliseconds())
		all = append(all, FailedAttempt{At: millis(at), Delay: time.Duration(delay) * time.Millisecond, Error: next})
	}
	slices.Reverse(all)
	return all
}

// writeAttempts returns the list for a message whose next error is next: as many of the
// newest attempts as there is room for, or "" if there are none.
func writeAttempts(all []FailedAttempt, next string) string {
	next = attemptText(next)
	var items []string
	size := len("[]")
	for _, f := range slices.Backward(all[max(len(all)-maxAttempts, 0):]) {
		b := append(make([]byte, 0, 64), '[')
		b = strconv.AppendInt(b, f.At.UnixMilli(), 10)
		b = append(b, ',')
		b = strconv.AppendInt(b, f.Delay.Milliseconds(), 10)
		if f.Error != next {
			b = append(b, ',')
			b = appendQuoted(b, f.Error)
		}
		b = append(b, ']')
		if size += len(b) + 1; size > maxAttemptsBytes {
			break
		}
		items, next = append(items, string(b)), f.Error
	}
	if len(items) == 0 {
		return ""
	}
	slices.Reverse(items)
	return "[" + strings.Join(items, ",") + "]"
}
