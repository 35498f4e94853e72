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
// # Groups of partitions
//
// All partitions of a group of package partition are paused in one step, by PauseGroup or hopback partition pause orders,
// and those that a Reshard adds are paused, too. The binding leads to the group's exchange orders.now. A paused worker
// keeps its partitions and what it holds of them, so each key keeps its order.
//
// # What it costs
//
// Each consumer, or each worker of a group, asks the broker once a second for the pauses of its queue, however many messages it handles.
// While the broker doesn't answer, nothing changes; a worker that starts during a memory or disk alarm handles
// messages until it has an answer.
//
// # Permissions
//
// Workers need the permissions to write to their queue and to read hopback.pauses: RabbitMQ 4.3
// asks for the same to read a queue's bindings as to change them. A worker that lacks them doesn't
// start. Pausing also needs the permission to configure hopback.pauses. For a group, they need
// write to orders.now instead of the queue.
//
// This package is a preview: a minor version may change its names. See docs/versions.md#stability.
package pause

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/declare/check"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/names"
	"github.com/hopback/hopback/partition"
)

// PauseConfig configures [Pause]. The zero value pauses until [Resume].
type PauseConfig struct {
	// For is how long, by the broker's clock. Default: until Resume.
	For time.Duration
	// By is the person who pauses, and Why the reason, for other people: up to 200 bytes each. Default: none.
	By, Why string
}

// State is a pause, of a queue or of a group.
type State struct {
	Queue string    `json:"queue,omitempty"`
	Group string    `json:"group,omitempty"`
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

// target is what is paused: a queue, or a group of package partition by one of its exchanges.
type target struct{ queue, group, exchange string }

func (t target) kind() string {
	if t.group != "" {
		return "group"
	}
	return "queue"
}

func (t target) name() string { return cmp.Or(t.group, t.queue) }

func (t target) binding() declare.Binding {
	return declare.Binding{Source: exchange, Queue: t.queue, Exchange: t.exchange, Key: t.name()}
}

// Pause pauses a queue. A queue that is paused gets the new duration and reason. Pause returns when
// the broker has stored the pause; workers notice within about a second.
//
// An [*argument.Error] means that an argument is refused, such as the queue of one partition: use [PauseGroup]. An error
// that matches [declare.ErrNotFound] means that there is no such queue. The others are those of [declare.Apply].
func Pause(ctx context.Context, conn *client.Conn, queue string, cfg PauseConfig) error {
	if err := cfg.check(); err != nil {
		return err
	}
	t, err := queueOf(ctx, conn, queue)
	if err != nil {
		return err
	}
	return t.start(ctx, conn, cfg)
}

// Resume ends the pause of a queue. If the queue isn't paused, Resume does nothing. The errors are those of [Pause].
func Resume(ctx context.Context, conn *client.Conn, queue string) error {
	t, err := queueOf(ctx, conn, queue)
	if err != nil {
		return err
	}
	return t.end(ctx, conn)
}

// Of returns the pause of a queue; ok is false if it isn't paused. The errors are those of [Pause].
func Of(ctx context.Context, conn *client.Conn, queue string) (s State, ok bool, err error) {
	t, err := queueOf(ctx, conn, queue)
	if err != nil {
		return s, false, err
	}
	return t.state(ctx, conn)
}

// PauseGroup pauses all partitions of a group of package partition, in one step. See [Pause].
func PauseGroup(ctx context.Context, conn *client.Conn, group string, cfg PauseConfig) error {
	if err := cfg.check(); err != nil {
		return err
	}
	t, err := groupOf(ctx, conn, group)
	if err != nil {
		return err
	}
	return t.start(ctx, conn, cfg)
}

// ResumeGroup ends the pause of a group. See [Resume].
func ResumeGroup(ctx context.Context, conn *client.Conn, group string) error {
	t, err := groupOf(ctx, conn, group)
	if err != nil {
		return err
	}
	return t.end(ctx, conn)
}

// OfGroup returns the pause of a group; ok is false if it isn't paused. See [Of].
func OfGroup(ctx context.Context, conn *client.Conn, group string) (s State, ok bool, err error) {
	t, err := groupOf(ctx, conn, group)
	if err != nil {
		return s, false, err
	}
	return t.state(ctx, conn)
}

// All returns the pauses of a virtual host, of queues and of groups, with one request to the HTTP API. The errors are those
// of api.
func All(ctx context.Context, conn *client.Conn, api check.Reader) (all []State, err error) {
	if conn == nil || api == nil {
		return nil, argument.New("api", nil, "is nil, or conn is", "use a connection from client.Connect, and a Reader of package httpapi")
	}
	reply, err := api.Get(ctx, "/exchanges/"+address.Escape(api.VHost())+"/"+exchange+"/bindings/source")
	if errors.Is(err, declare.ErrNotFound) {
		return nil, nil // nothing was ever paused
	}
	var found []struct {
		Destination string `json:"destination"`
		Key         string `json:"routing_key"`
		Kind        string `json:"destination_type"`
		Arguments   any    `json:"arguments"` // none may be a list
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(reply, &found); err != nil {
		return nil, fmt.Errorf("hopback: the HTTP API's list of pauses can't be decoded: %w", err)
	}
	last := map[target]State{}
	timed := false
	for _, b := range found {
		t, of := target{queue: b.Key}, b.Key
		if b.Kind == "exchange" {
			t, of = target{group: b.Key}, inside.NowExchange(b.Key)
		}
		if b.Destination != of {
			continue // workers don't see it either
		}
		args, _ := b.Arguments.(map[string]any)
		s := stateOf(t, args)
		if before, ok := last[t]; !ok || s.Since.After(before.Since) {
			last[t] = s
		}
		timed = timed || !s.Until.IsZero()
	}
	var now time.Time
	if timed {
		now = timeOf(ctx, conn.BrokerTime)
	}
	for _, s := range last {
		if !s.over(now) {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b State) int { return cmp.Or(cmp.Compare(a.Queue, b.Queue), cmp.Compare(a.Group, b.Group)) })
	return all, nil
}

func (c PauseConfig) check() error {
	if c.For < 0 {
		return argument.New("PauseConfig.For", c.For, "is negative", "leave it out to pause until Resume")
	}
	for name, text := range map[string]string{"PauseConfig.By": c.By, "PauseConfig.Why": c.Why} {
		if len(text) > maxText || !utf8.ValidString(text) {
			return argument.New(name, text, "isn't up to 200 bytes of UTF-8", "say it in a sentence")
		}
	}
	return nil
}

// queueOf finds a queue. The workers of a partition don't ask about its queue, so a pause of it would have no effect.
func queueOf(ctx context.Context, conn *client.Conn, queue string) (target, error) {
	if err := checkName(conn, "queue", queue); err != nil {
		return target{}, err
	}
	info, err := declare.Inspect(ctx, conn.Management(), queue)
	if err != nil {
		return target{}, err
	}
	if _, is := info.Arguments["x-hopback-partitions"]; is {
		return target{}, argument.At(argument.Root("queue"), argument.CodeUnsupported, queue, "is a partition, which can't be paused alone", "pause its group: PauseGroup, or hopback partition pause")
	}
	return target{queue: queue}, nil
}

func groupOf(ctx context.Context, conn *client.Conn, group string) (target, error) {
	if err := checkName(conn, "group", group); err != nil {
		return target{}, err
	}
	if _, _, err := partition.Find(ctx, conn, group); err != nil {
		return target{}, err
	}
	return target{group: group, exchange: inside.NowExchange(group)}, nil
}

func checkName(conn *client.Conn, kind, name string) error {
	if conn == nil {
		return argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	return names.Check(argument.Root(kind), name)
}

func (t target) start(ctx context.Context, conn *client.Conn, cfg PauseConfig) error {
	m := conn.Management()
	b := t.binding()
	before, err := declare.Bindings(ctx, m, b)
	if err != nil {
		return err
	}
	now := timeOf(ctx, conn.BrokerTime)
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

func (t target) end(ctx context.Context, conn *client.Conn) error {
	found, err := declare.Bindings(ctx, conn.Management(), t.binding())
	if err != nil {
		return err
	}
	return remove(ctx, conn.Management(), found)
}

func (t target) state(ctx context.Context, conn *client.Conn) (s State, ok bool, err error) {
	s, ok, err = find(ctx, conn.Management(), t)
	if ok && !s.Until.IsZero() && s.over(timeOf(ctx, conn.BrokerTime)) {
		return State{}, false, err
	}
	return s, ok, err
}

func remove(ctx context.Context, m declare.Requester, all []declare.Binding) error {
	var errs []error
	for _, b := range all {
		errs = append(errs, declare.DeleteBinding(ctx, m, b))
	}
	return errors.Join(errs...)
}

// find returns the last pause. Two that began at the same time leave two bindings.
func find(ctx context.Context, m declare.Requester, t target) (last State, ok bool, err error) {
	found, err := declare.Bindings(ctx, m, t.binding())
	for _, b := range found {
		s := stateOf(t, b.Arguments)
		if !ok || s.Since.After(last.Since) {
			last, ok = s, true
		}
	}
	return last, ok, err
}

// stateOf reads the arguments of a binding.
func stateOf(t target, args map[string]any) State {
	return State{Queue: t.queue, Group: t.group, Since: timeIn(args[argSince]), Until: timeIn(args[argUntil]), By: textIn(args[argBy]), Why: textIn(args[argWhy])}
}

func timeIn(arg any) time.Time {
	switch ms := arg.(type) {
	case int64:
		return time.UnixMilli(min(max(ms, 0), maxTime)).UTC()
	case float64: // in JSON
		return time.UnixMilli(int64(min(max(ms, 0), maxTime))).UTC()
	}
	return time.Time{}
}

// textIn bounds a text that anybody may have written.
func textIn(arg any) string {
	text, _ := arg.(string)
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

// over reports whether it has ended by now.
func (s State) over(now time.Time) bool { return !s.Until.IsZero() && !s.Until.After(now) }

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
