package desk

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/middleware/pause"
)

// The values of QueueSurvey.Role.
const (
	roleWork    = "work"
	roleDelay   = "delay" // holds messages until their retry
	roleDead    = "dead-letter"
	roleParking = "parking" // for messages that name no queue to return to
)

// SurveyConfig configures [Desk.Survey]. The zero value surveys the whole virtual host, and
// needs Config.HTTP.
type SurveyConfig struct {
	// Queues are the names of the queues. Default: all queues of the virtual host, from the
	// HTTP API.
	Queues []string
	// CountsOnly counts messages without reading them. The Survey then has no groups.
	CountsOnly bool
	// Accept lists the warnings that the caller accepts. See [Warning].
	Accept []WarningCode
	// OnProgress, if not nil, is called a few times a second. It must not block.
	OnProgress func(queue string, p Progress)
}

// Survey is the state of a set of queues: their counts, and their dead letters by group.
type Survey struct {
	// Alarms are the memory and disk alarms of the broker. While there is one, the broker accepts
	// no messages, so nothing can be replayed. They come from the HTTP API, and are empty without it.
	Alarms []Alarm       `json:"alarms,omitempty"`
	Queues []QueueSurvey `json:"queues"`
	// Groups are the groups of all dead-letter and parking queues, the largest first, at
	// most 1,000. Others counts the messages of all other groups.
	Groups []Group `json:"groups"`
	Others uint64  `json:"others,omitempty"`
}

// Alarm is a resource alarm of a node. Resource is "memory" or "disk". Both fields are empty if
// the user of the HTTP API may only see that there is an alarm: the rest needs the tag
// "monitoring".
type Alarm struct {
	Node     string `json:"node,omitempty"`
	Resource string `json:"resource,omitempty"`
}

// QueueSurvey is the part of a [Survey] about one queue.
type QueueSurvey struct {
	Name string `json:"name"`
	// Role is the queue's purpose in the retry topology, by its name:
	//
	//   - "work": every queue without another role.
	//   - "delay": holds messages until their retry.
	//   - "dead-letter": a dead-letter queue.
	//   - "parking": the parking queue, for messages that name no queue to return to.
	Role string `json:"role"`
	// Type is "quorum", "classic", or "stream".
	Type string `json:"type,omitempty"`
	// Messages is the number of ready messages.
	Messages  uint64 `json:"messages"`
	Consumers uint64 `json:"consumers"`
	// Unacknowledged messages are held by consumers. Delayed messages wait for their delivery
	// time (RabbitMQ 4.3), and nobody can read them before. DeadLettering messages wait for the next queue to confirm them. These
	// counts come from the HTTP API and are a few seconds old. Counted reports whether they
	// are known.
	Unacknowledged uint64 `json:"unacknowledged,omitempty"`
	Delayed        uint64 `json:"delayed,omitempty"`
	DeadLettering  uint64 `json:"dead_lettering,omitempty"`
	Counted        bool   `json:"counted"`
	// In and Out are the messages per second published to the queue and delivered from it,
	// from the HTTP API.
	In  float64 `json:"in,omitempty"`
	Out float64 `json:"out,omitempty"`
	// Seen is the number of messages read. Oldest and Newest are when the first and the last
	// of them were dead-lettered. All three are set for dead-letter and parking queues only.
	Seen   uint64    `json:"seen,omitempty"`
	Oldest time.Time `json:"oldest,omitzero"`
	Newest time.Time `json:"newest,omitzero"`
	// Paused is the queue's pause, or that of its group of partitions, for workers with middleware/pause. It comes from the HTTP
	// API, and is nil without it.
	Paused *pause.State `json:"paused,omitempty"`
	// Warnings are the warnings about reading the queue. Unread says why some or all messages
	// weren't read, and is empty if all were. Messages that other consumers hold, or that wait for
	// their delivery time, count as unread unless WarningConsumers or WarningWaiting is accepted.
	Warnings []Warning `json:"warnings,omitempty"`
	Unread   string    `json:"unread,omitempty"`
}

// maxGroups bounds the groups that are counted, and with them the memory of a survey.
const maxGroups = 1000

// Survey counts the messages of queues, and groups the dead letters: those in dead-letter and
// parking queues, which it recognizes by the names of the retry topology. It doesn't read the
// messages of other queues. All messages stay in their queues, in order. Use it for an
// overview, and to get the groups to replay.
//
//   - If a queue can't be read, its QueueSurvey says why in Unread, and Survey continues.
//   - Without SurveyConfig.Queues and without Config.HTTP, the error is an [*argument.Error].
//   - If SurveyConfig.Queues names a queue that doesn't exist, the error is
//     [declare.ErrNotFound].
//   - If ctx ends, Survey returns ctx's cause and the survey so far.
func (d *Desk) Survey(ctx context.Context, cfg SurveyConfig) (Survey, error) {
	queues, err := d.queues(ctx, cfg.Queues)
	if err != nil {
		return Survey{}, err
	}
	s := Survey{Alarms: d.alarms(ctx), Queues: queues, Groups: []Group{}}
	var all []Group
	for i := range s.Queues {
		q := &s.Queues[i]
		if cfg.CountsOnly || q.Role != roleDead && q.Role != roleParking {
			continue
		}
		groups, others, err := d.surveyQueue(ctx, q, cfg)
		if ctx.Err() != nil {
			return s, context.Cause(ctx)
		}
		if err != nil {
			q.Unread = err.Error()
		}
		s.Others += others
		for _, g := range groups {
			g.In = q.Name
			all = append(all, g)
		}
	}
	slices.SortStableFunc(all, func(a, b Group) int { return cmp.Compare(b.Count, a.Count) })
	for _, g := range all[min(len(all), maxGroups):] {
		s.Others += g.Count
	}
	s.Groups = append(s.Groups, all[:min(len(all), maxGroups)]...)
	return s, nil
}

func (d *Desk) surveyQueue(ctx context.Context, q *QueueSurvey, cfg SurveyConfig) ([]Group, uint64, error) {
	var notify notifier
	if cfg.OnProgress != nil {
		notify.notify = func(p Progress) { cfg.OnProgress(q.Name, p) }
	}
	t, leave, err := d.enter(ctx, q.Name, cfg.Accept, &notify)
	q.Warnings = t.Warnings
	if err != nil {
		return nil, 0, err
	}
	defer leave()
	q.Messages = t.Messages
	groups := newTally(maxGroups)
	err = d.peek(ctx, q.Name, peeking{accept: cfg.Accept, unread: &q.Unread, passed: func(seen uint64) { notify.now(Progress{Seen: seen, Matched: q.Seen, Done: q.Seen, Of: t.Messages}) }, reset: func() {
		groups = newTally(maxGroups)
		q.Seen, q.Oldest, q.Newest = 0, time.Time{}, time.Time{}
	}, visit: func(_ dedicated.Delivery, l *deadLetter) error {
		q.Seen++
		groups.add(l, "")
		widen(&q.Oldest, &q.Newest, l.died())
		notify.now(Progress{Seen: q.Seen, Matched: q.Seen, Done: q.Seen, Of: t.Messages})
		return nil
	}})
	top, others := groups.top(maxGroups)
	return top, others, err
}

func widen(oldest, newest *time.Time, t time.Time) {
	if t.IsZero() {
		return
	}
	t = t.UTC()
	if oldest.IsZero() || t.Before(*oldest) {
		*oldest = t
	}
	if t.After(*newest) {
		*newest = t
	}
}

// tally counts groups in bounded memory.
type tally struct {
	most   int
	counts map[string]*tallied // by ID
	others uint64
	limit  time.Time // see arrivals.add
	// known has groups by the death that the message records. It saves most messages their
	// fingerprint, where errors repeat.
	known map[deathKey]*tallied
}

type tallied struct {
	Group
	arrivals arrivals
}

// deathKey is what makes up a group.
type deathKey struct {
	queue     string
	reason    client.Reason
	kind, err string
}

// maxKnown bounds tally.known: an error text can have a kilobyte.
const maxKnown = 4096

func newTally(most int) *tally {
	return &tally{most: most, counts: map[string]*tallied{}, known: map[deathKey]*tallied{}, limit: time.Now().Add(clockSkew)}
}

// add counts a message. id is its ID, or "" if it isn't known yet.
func (t *tally) add(l *deadLetter, id string) {
	key := deathKey{l.death.Queue, l.death.Reason, l.death.ErrorType, l.death.Error}
	c := t.known[key]
	if c == nil {
		g := l.group()
		if c = t.counts[g.ID]; c == nil {
			if len(t.counts) >= t.most {
				t.others++
				return
			}
			if id == "" {
				id = l.id()
			}
			g.Example = id
			c = &tallied{Group: g}
			t.counts[g.ID] = c
		}
		if len(t.known) < maxKnown {
			t.known[key] = c
		}
	}
	c.Count++
	widen(&c.Oldest, &c.Newest, l.died())
	c.arrivals.add(l.died(), t.limit)
}

// top returns the n largest groups, and the number of messages in all other groups.
func (t *tally) top(n int) (groups []Group, others uint64) {
	groups = make([]Group, 0, len(t.counts))
	for _, c := range t.counts {
		c.Arrivals = c.arrivals.result()
		groups = append(groups, c.Group)
	}
	slices.SortFunc(groups, func(a, b Group) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.ID, b.ID)) })
	others = t.others
	for _, g := range groups[min(n, len(groups)):] {
		others += g.Count
	}
	return groups[:min(n, len(groups))], others
}

// queues are the queues of a survey.
func (d *Desk) queues(ctx context.Context, names []string) ([]QueueSurvey, error) {
	roles := d.roles()
	if d.cfg.HTTP == nil {
		if len(names) == 0 {
			return nil, argument.At(argument.Root("SurveyConfig").Field("Queues"), argument.CodeMissing, nil, "is empty, and queues can't be listed over AMQP", "name the queues, or set Config.HTTP")
		}
		var all []QueueSurvey
		for _, name := range names {
			info, _, err := d.inspect(ctx, name)
			if err != nil {
				return nil, err
			}
			all = append(all, QueueSurvey{Name: name, Role: roles(name), Type: info.Type, Messages: info.Messages, Consumers: info.Consumers})
		}
		return all, nil
	}
	reply, err := d.cfg.HTTP.Get(ctx, "/queues/"+address.Escape(d.cfg.HTTP.VHost()))
	if err != nil {
		return nil, err
	}
	var found []struct {
		Name      string  `json:"name"`
		Type      string  `json:"type"`
		Ready     *uint64 `json:"messages_ready"`
		Unacked   uint64  `json:"messages_unacknowledged"`
		DLX       uint64  `json:"messages_dlx"`
		Delayed   uint64  `json:"messages_delayed"`
		Consumers uint64  `json:"consumers"`
		Arguments any     `json:"arguments"`
		Stats     struct {
			Publish struct{ Rate float64 } `json:"publish_details"`
			Deliver struct{ Rate float64 } `json:"deliver_get_details"`
		} `json:"message_stats"`
	}
	if err := json.Unmarshal(reply, &found); err != nil {
		return nil, fmt.Errorf("hopback: the HTTP API's list of queues can't be decoded: %w", err)
	}
	pauses, _ := pause.All(ctx, d.conn, d.cfg.HTTP) // the rest of a survey is worth more than an error about them
	var all []QueueSurvey
	for _, q := range found {
		switch {
		case len(names) > 0 && !slices.Contains(names, q.Name), len(names) == 0 && (strings.HasSuffix(q.Name, lockSuffix) || strings.HasPrefix(q.Name, liveQueues)):
			continue
		}
		s := QueueSurvey{
			Name: q.Name, Role: roles(q.Name), Type: q.Type, Consumers: q.Consumers, Counted: q.Ready != nil,
			Unacknowledged: q.Unacked, Delayed: q.Delayed, DeadLettering: q.DLX, In: q.Stats.Publish.Rate, Out: q.Stats.Deliver.Rate,
		}
		if q.Ready != nil {
			s.Messages = *q.Ready
		}
		args, _ := q.Arguments.(map[string]any)
		_, partition := args["x-hopback-partitions"]
		for _, p := range pauses {
			if p.Queue == q.Name || partition && p.Group != "" && isOfGroup(q.Name, p.Group) {
				s.Paused = &p
			}
		}
		all = append(all, s)
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(q QueueSurvey) bool { return q.Name == name }) {
			return nil, fmt.Errorf("hopback: there is no queue %q: %w", name, declare.ErrNotFound)
		}
	}
	order := map[string]int{roleDead: 0, roleParking: 1, roleWork: 2, roleDelay: 3}
	slices.SortFunc(all, func(a, b QueueSurvey) int {
		return cmp.Or(cmp.Compare(order[a.Role], order[b.Role]), compareDelays(a, b), cmp.Compare(a.Name, b.Name))
	})
	return all, nil
}

// isOfGroup reports whether a queue's name is that of a partition of the group, of any generation.
func isOfGroup(queue, group string) bool {
	rest, ok := strings.CutPrefix(queue, group+".")
	return ok && strings.Count(rest, ".") == 1
}

// compareDelays orders delay queues with names that differ only in their delay by that: "delay_1s"
// is before "delay_500ms" and "delay_10s" before both, if they are compared as texts.
func compareDelays(a, b QueueSurvey) int {
	if a.Role != roleDelay || b.Role != roleDelay {
		return 0
	}
	first, delay := delayOf(a.Name)
	second, other := delayOf(b.Name)
	if first != second {
		return cmp.Compare(first, second)
	}
	return cmp.Compare(delay, other)
}

// delayOf splits the delay off a queue's name, as retry.Names.DelayQueue adds it.
func delayOf(name string) (prefix string, delay time.Duration) {
	prefix = strings.TrimRight(name, "ms")
	prefix = strings.TrimRight(prefix, "0123456789")
	delay, err := time.ParseDuration(name[len(prefix):])
	if err != nil {
		return name, 0
	}
	return prefix, delay
}

// alarms returns the alarms of the cluster. The check for them needs less permission than their
// names do, and its answer, 503, is the same as that of an API that is down. An API that refuses
// or answers the second request isn't down. Other failures aren't reported: the rest of a survey
// is worth more than an error about its alarms.
func (d *Desk) alarms(ctx context.Context) (all []Alarm) {
	if d.cfg.HTTP == nil {
		return nil
	}
	if _, err := d.cfg.HTTP.Get(ctx, "/health/checks/alarms"); !errors.Is(err, declare.ErrUnavailable) {
		return nil
	}
	reply, err := d.cfg.HTTP.Get(ctx, "/nodes")
	if errors.Is(err, declare.ErrForbidden) {
		return []Alarm{{}}
	}
	var nodes []struct {
		Name   string `json:"name"`
		Memory bool   `json:"mem_alarm"`
		Disk   bool   `json:"disk_free_alarm"`
	}
	if err != nil || json.Unmarshal(reply, &nodes) != nil {
		return nil
	}
	for _, n := range nodes {
		if n.Memory {
			all = append(all, Alarm{n.Name, "memory"})
		}
		if n.Disk {
			all = append(all, Alarm{n.Name, "disk"})
		}
	}
	return all
}

// roles returns a function that finds the role of a queue by the names of the retry topology.
func (d *Desk) roles() func(name string) string {
	n := d.cfg.Names
	or := func(s, fallback string) string {
		if s == "" {
			return n.Prefix + fallback
		}
		return s
	}
	parking, suffix := n.ParkingQueue(), strings.TrimPrefix(n.DeadLetterQueue("x"), "x")
	delays := []string{or(n.DelayPrefix, "delay_"), or(n.HoldPrefix, "hold_"), or(n.LadderPrefix, "retry_ladder_")}
	return func(name string) string {
		switch {
		case name == parking:
			return roleParking
		case strings.HasSuffix(name, suffix):
			return roleDead
		}
		for _, p := range delays {
			if strings.HasPrefix(name, p) {
				return roleDelay
			}
		}
		return roleWork
	}
}
