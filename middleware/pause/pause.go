// Package pause lets people pause a queue for all of its workers, and resume it.
//
//	handler = pause.With(pause.Config{})(handler) // in each worker
//
//	err := pause.Pause(ctx, conn, "orders", pause.PauseConfig{For: time.Hour, Why: "the bank is down"})
//	err = pause.Resume(ctx, conn, "orders")
//
// The command does the same: hopback queue pause orders --for 1h --why "the bank is down".
//
// # What a pause does
//
// No further handler starts in a worker that has noticed it, within about a second. Running handlers continue,
// and messages stay in the queue: see [client.Control.Limit]. Publishers, the desk, and consumers without
// this middleware aren't affected.
//
// A pause is a binding from the exchange hopback.pauses to the queue. So it outlasts restarts of workers and
// of the broker, is in its exports of definitions, and ends with the queue. Nothing is ever published there.
//
// # What it costs
//
// Each consumer asks the broker once a second for the pauses of its queue, however many messages it handles.
// While the broker doesn't answer, nothing changes; a worker that starts during a memory or disk alarm handles
// messages until it has an answer.
//
// # Permissions
//
// Workers need the permissions to write to their queue and to read hopback.pauses: RabbitMQ 4.3 asks for the same
// to read a queue's bindings as to change them. A worker that lacks them doesn't start. Pausing also needs the
// permission to configure hopback.pauses.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package pause

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/names"
)

// PauseConfig configures [Pause]. The zero value pauses until [Resume].
type PauseConfig struct {
	// For is how long, by the broker's clock. Default: until Resume.
	For time.Duration
	// By is who, and Why the reason, for those who wonder: up to 200 bytes each. Default: none.
	By, Why string
}

// State is a pause.
type State struct {
	Queue string    `json:"queue"`
	Since time.Time `json:"since"`
	Until time.Time `json:"until,omitzero"` // zero: until Resume
	By    string    `json:"by,omitempty"`
	Why   string    `json:"why,omitempty"`
}

const (
	// exchange is internal, so that nobody can publish to it.
	exchange = "hopback.pauses"
	maxText  = 200
	// maxTime is the end of the year 9999, in milliseconds since 1970: JSON has no later times.
	maxTime = 253_402_300_799_999

	argSince, argUntil = "x-hopback-since", "x-hopback-until" // in milliseconds since 1970
	argBy, argWhy      = "x-hopback-by", "x-hopback-why"
)

// Pause pauses a queue. A queue that is paused gets the new duration and reason. It returns when the broker knows it;
// workers notice within about a second.
//
// An [*argument.Error] means that an argument is refused. An error that matches [declare.ErrNotFound] means that there is
// no such queue. The others are those of [declare.Apply].
func Pause(ctx context.Context, conn *client.Conn, queue string, cfg PauseConfig) error {
	if err := check(conn, queue); err != nil {
		return err
	}
	if cfg.For < 0 {
		return argument.New("PauseConfig.For", cfg.For, "is negative", "leave it out to pause until Resume")
	}
	for name, text := range map[string]string{"PauseConfig.By": cfg.By, "PauseConfig.Why": cfg.Why} {
		if len(text) > maxText || !utf8.ValidString(text) {
			return argument.New(name, text, "isn't up to 200 bytes of UTF-8", "say it in a sentence")
		}
	}
	m := conn.Management()
	if _, err := declare.Inspect(ctx, m, queue); err != nil {
		return err
	}
	before, err := declare.Bindings(ctx, m, binding(queue))
	if err != nil {
		return err
	}
	now := timeOf(ctx, conn.BrokerTime)
	b := binding(queue)
	b.Arguments = map[string]any{argSince: now.UnixMilli()}
	if cfg.For > 0 {
		b.Arguments[argUntil] = now.Add(cfg.For).UnixMilli()
	}
	if cfg.By != "" {
		b.Arguments[argBy] = cfg.By
	}
	if cfg.Why != "" {
		b.Arguments[argWhy] = cfg.Why
	}
	if _, err := declare.Apply(ctx, m, declare.Topology{
		Exchanges: []declare.Exchange{{Name: exchange, Internal: true}}, Bindings: []declare.Binding{b},
	}); err != nil {
		return err
	}
	return remove(ctx, m, slices.DeleteFunc(before, func(old declare.Binding) bool { return old.Arguments[argSince] == b.Arguments[argSince] }))
}

// Resume ends the pause of a queue. One that isn't paused stays so. The errors are those of [Pause].
func Resume(ctx context.Context, conn *client.Conn, queue string) error {
	if err := check(conn, queue); err != nil {
		return err
	}
	m := conn.Management()
	if _, err := declare.Inspect(ctx, m, queue); err != nil {
		return err
	}
	found, err := declare.Bindings(ctx, m, binding(queue))
	if err != nil {
		return err
	}
	return remove(ctx, m, found)
}

// Of returns the pause of a queue; ok is false if it isn't paused. The errors are those of [Pause].
func Of(ctx context.Context, conn *client.Conn, queue string) (s State, ok bool, err error) {
	if err := check(conn, queue); err != nil {
		return s, false, err
	}
	m := conn.Management()
	if _, err := declare.Inspect(ctx, m, queue); err != nil {
		return s, false, err
	}
	s, ok, err = find(ctx, m, queue)
	if ok && !s.Until.IsZero() && !s.Until.After(timeOf(ctx, conn.BrokerTime)) {
		return State{}, false, err
	}
	return s, ok, err
}

func check(conn *client.Conn, queue string) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	return names.Check(argument.Root("queue"), queue)
}

func binding(queue string) declare.Binding {
	return declare.Binding{Source: exchange, Queue: queue, Key: queue}
}

func remove(ctx context.Context, m declare.Requester, all []declare.Binding) error {
	var errs []error
	for _, b := range all {
		errs = append(errs, declare.DeleteBinding(ctx, m, b))
	}
	return errors.Join(errs...)
}

// find returns the last pause of a queue. Two that began at the same time leave two bindings.
func find(ctx context.Context, m declare.Requester, queue string) (last State, ok bool, err error) {
	found, err := declare.Bindings(ctx, m, binding(queue))
	for _, b := range found {
		s := State{Queue: queue, Since: timeIn(b, argSince), Until: timeIn(b, argUntil), By: textIn(b, argBy), Why: textIn(b, argWhy)}
		if !ok || s.Since.After(last.Since) {
			last, ok = s, true
		}
	}
	return last, ok, err
}

func timeIn(b declare.Binding, arg string) time.Time {
	ms, ok := b.Arguments[arg].(int64)
	if !ok {
		return time.Time{}
	}
	return time.UnixMilli(min(max(ms, 0), maxTime)).UTC()
}

// textIn bounds a text that anybody may have written.
func textIn(b declare.Binding, arg string) string {
	text, _ := b.Arguments[arg].(string)
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "")
}

// timeOf returns the broker's time, or this host's if it can't be asked.
func timeOf(ctx context.Context, ask func(context.Context) (time.Time, error)) time.Time {
	if ask != nil {
		if now, err := ask(ctx); err == nil {
			return now
		}
	}
	return time.Now()
}

// String says it in a line, for people.
func (s State) String() string {
	text := "paused since " + s.Since.Format(time.RFC3339)
	if !s.Until.IsZero() {
		text += " until " + s.Until.Format(time.RFC3339)
	}
	if s.By != "" {
		text += fmt.Sprintf(" by %q", s.By)
	}
	if s.Why != "" {
		text += fmt.Sprintf(": %q", s.Why)
	}
	return text
}
