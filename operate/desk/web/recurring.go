package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/schedule"
)

const (
	// recurringLimit is how long an action about recurring messages may take: a worker may hold the group's state for
	// half a minute.
	recurringLimit = 40 * time.Second
	// shownRecurring and shownGroupNames are how many messages and groups are shown. Anybody may have forged them.
	shownRecurring, shownGroupNames = 200, 200
	// maxSpec is up to which length the description of a message's times is read.
	maxSpec = 1000
)

// recurringData is the page about recurring messages: those of a group, or one of them.
type recurringData struct {
	page
	Queue, Group string
	Groups       []recurringGroup // if no group is named
	More         int              // groups that aren't shown
	State        schedule.GroupState
	Find         string
	Matching     int
	All, Paused  int
	Name         string // of the message that the page is about; empty: the group
	One          *schedule.RecurringState
	Answer       string
}

type recurringGroup struct{ Queue, Name string }

// PauseState is the pause that the page's form is about.
func (d recurringData) PauseState() *schedule.PauseState {
	if d.One != nil {
		return d.One.Paused
	}
	return d.State.Paused
}

// Idle reports whether no worker publishes the group's messages.
func (d recurringData) Idle() bool { return d.State.Worker == "" }

// Late is how long the broker has refused a message.
func (d recurringData) Late() bool { return d.State.LastActive.Sub(d.State.Done) > time.Second }

// recurringQueue is the queue with the state of the group that a form names.
func recurringQueue(form url.Values) string {
	if group := strings.TrimSpace(form.Get("group")); group != "" {
		return schedule.Names{}.TokenQueue(group)
	}
	return form.Get("in")
}

// tokenQueues is in the names of all such queues; a prefix may precede it.
var tokenQueues = schedule.Names{}.TokenQueue("")

// groupOf returns the group whose state a queue has, by the queue's name.
func (h *Handler) groupOf(queue string) (g schedule.Group, ok bool) {
	prefix, name, ok := strings.Cut(queue, tokenQueues)
	return schedule.Group{Conn: h.desk.Conn(), Name: name, Names: schedule.Names{Prefix: prefix}}, ok && name != ""
}

// recurring shows the groups, or the messages of one.
func (h *Handler) recurring(v *visit) *refusal {
	data := recurringData{page: h.page(v, "Recurring messages"), Queue: v.wants.Queue, Name: v.form.Get("name"), Find: v.form.Get("find")}
	if data.Queue == "" {
		h.addGroups(v, &data)
	} else {
		ctx, cancel := context.WithTimeout(v.Context(), recurringLimit)
		defer cancel()
		if no := h.showRecurring(ctx, &data); no != nil {
			return no
		}
	}
	h.render(v.w, http.StatusOK, "recurring", data)
	return nil
}

// addGroups adds the groups whose queues the visitor may see. Without the HTTP API there are none to list.
func (h *Handler) addGroups(v *visit, data *recurringData) {
	counted, _, _ := h.counts.get(v.Context(), h)
	for _, q := range counted.Queues {
		g, is := h.groupOf(q.Name)
		switch {
		case !is || !h.sees(v, q.Name):
		case len(data.Groups) == shownGroupNames:
			data.More++
		default:
			data.Groups = append(data.Groups, recurringGroup{q.Name, g.Names.Prefix + g.Name})
		}
	}
}

// group returns the group that a page is about. One at a time has its state.
func (h *Handler) group(ctx context.Context, queue string) (g schedule.Group, leave func(), no *refusal) {
	g, is := h.groupOf(queue)
	if !is {
		return g, nil, noRecurring(fmt.Errorf("the queue %.100q isn't one of a group", queue))
	}
	select {
	case h.tokens <- struct{}{}:
		return g, func() { <-h.tokens }, nil
	case <-ctx.Done():
		return g, nil, refuse(http.StatusServiceUnavailable, "Busy", "Somebody else's page reads recurring messages. Reload this one in a moment.")
	}
}

func noRecurring(err error) *refusal {
	return &refusal{http.StatusNotFound, "No such recurring messages", "There is no group or message with this name, or no program has run the group yet.", err}
}

func (h *Handler) recurringFailed(err error) *refusal {
	if errors.Is(err, declare.ErrNotFound) || errors.As(err, new(*argument.Error)) {
		return noRecurring(err)
	}
	return h.failed(err)
}

// showRecurring reads the group's state, and what is shown of its messages.
func (h *Handler) showRecurring(ctx context.Context, data *recurringData) *refusal {
	g, leave, no := h.group(ctx, data.Queue)
	if no != nil {
		return no
	}
	defer leave()
	data.Group = g.Names.Prefix + g.Name
	var err error
	data.State, err = g.List(ctx, schedule.ListConfig{Times: h.timesOf, Select: func(r schedule.RecurringState) bool {
		data.All++
		if r.Paused != nil {
			data.Paused++
		}
		if data.Name != "" {
			return r.Name == data.Name
		}
		if !strings.Contains(strings.ToLower(r.Name), strings.ToLower(data.Find)) {
			return false
		}
		data.Matching++
		return data.Matching <= shownRecurring
	}})
	switch {
	case err != nil:
		return h.recurringFailed(err)
	case data.Name != "" && len(data.State.Recurring) == 0:
		return noRecurring(fmt.Errorf("the group has no message %.200q", data.Name))
	case data.Name != "":
		data.One = &data.State.Recurring[0]
	}
	return nil
}

// timesOf returns the times of a schedule.Recurring.Spec.
func (h *Handler) timesOf(spec string) schedule.Times {
	if len(spec) > maxSpec {
		return nil
	}
	if text, ok := strings.CutPrefix(spec, "every "); ok {
		if d, err := time.ParseDuration(text); err == nil {
			return schedule.Every(d)
		}
		return nil
	}
	if h.cfg.Times != nil {
		return h.cfg.Times(spec)
	}
	return nil
}

// changeRecurring pauses, resumes, runs, or removes a message, or pauses or resumes a group.
func (h *Handler) changeRecurring(v *visit) *refusal {
	data := recurringData{page: h.page(v, "Recurring messages"), Queue: v.wants.Queue, Name: v.form.Get("name")}
	do := v.form.Get("do")
	var names []string
	what := "The group"
	if data.Name != "" {
		names, what = []string{data.Name}, "The message"
	}
	var change func(context.Context, schedule.Group) error
	switch {
	case do == "pause":
		cfg, no := pauseOf(v)
		if no != nil {
			return no
		}
		data.Answer = what + " is paused: its times until then are skipped."
		change = func(ctx context.Context, g schedule.Group) error {
			return g.Pause(ctx, schedule.PauseConfig{Names: names, For: cfg.For, By: cfg.By, Why: cfg.Why})
		}
	case do == "resume":
		data.Answer = what + " is resumed."
		change = func(ctx context.Context, g schedule.Group) error { return g.Resume(ctx, names...) }
	case do != "run" && do != "remove" || data.Name == "":
		return refuse(http.StatusBadRequest, "No action is named", "Go back and use a button on that page.")
	case v.form.Get("sure") == "":
		return refuse(http.StatusUnprocessableEntity, "Not confirmed", "Go back and select the box that confirms it.")
	case do == "run":
		change = func(ctx context.Context, g schedule.Group) error {
			id, err := g.RunNow(ctx, data.Name)
			data.Answer = "A worker publishes the message now, with the message-id " + id + ". If none runs, the next one does it, within an hour."
			return err
		}
	default:
		data.Answer = "The message is removed: it isn't published until somebody resumes it."
		change = func(ctx context.Context, g schedule.Group) error { return g.Remove(ctx, data.Name) }
	}
	ctx, cancel := context.WithTimeout(v.Context(), recurringLimit)
	defer cancel()
	g, leave, no := h.group(ctx, data.Queue)
	if no != nil {
		return no
	}
	err := change(ctx, g)
	leave()
	h.did(v, ActionRecurring, "recurring messages were changed", "queue", data.Queue, "name", data.Name, "do", do, "error", err)
	if err != nil {
		return h.recurringFailed(err)
	}
	if no := h.showRecurring(ctx, &data); no != nil {
		return no
	}
	h.render(v.w, http.StatusOK, "recurring", data)
	return nil
}
