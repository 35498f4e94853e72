package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
)

// partitionsLimit is how long it may take to ask the workers of a group. They answer within 2 s.
const partitionsLimit = 10 * time.Second

// partitionsData is the page about a group of partitions. A person names the group.
type partitionsData struct {
	page
	Group      string
	Partitions []partition.State
	Waiting    uint64 // in all of them
	Ownerless  int
	Paused     *pause.State // nil: the group isn't
	Answer     string
}

// partitions shows who owns which partition, and how many messages wait.
func (h *Handler) partitions(v *visit) *refusal {
	data := partitionsData{page: h.page(v, "Partitions"), Group: v.form.Get("group")}
	if data.Group != "" {
		if no := h.askGroup(v, &data); no != nil {
			return no
		}
	}
	h.render(v.w, http.StatusOK, "partitions", data)
	return nil
}

func (h *Handler) askGroup(v *visit, data *partitionsData) *refusal {
	if !h.asking.TryLock() {
		return refuse(http.StatusServiceUnavailable, "Busy", "Somebody else's page asks the workers of a group. Reload this one in a moment.")
	}
	defer h.asking.Unlock()
	ctx, cancel := context.WithTimeout(v.Context(), partitionsLimit)
	defer cancel()
	all, err := h.desk.Partitions(ctx, data.Group, func(queue string) bool { return h.sees(v, queue) })
	if err != nil {
		return h.groupFailed(err)
	}
	s, is, err := pause.OfGroup(ctx, h.desk.Conn(), data.Group)
	switch {
	case err != nil && !errors.Is(err, client.ErrUnauthorized): // this user may not read it, and sees the rest
		return h.failed(err)
	case is:
		data.Paused = &s
	}
	data.Partitions = all
	for _, s := range all {
		data.Waiting += s.Waiting
		if s.Owner == "" && s.Generation == all[0].Generation {
			data.Ownerless++
		}
	}
	return nil
}

func (h *Handler) groupFailed(err error) *refusal {
	if errors.Is(err, declare.ErrNotFound) || errors.As(err, new(*argument.Error)) || errors.Is(err, partition.ErrWrongGroup) {
		return &refusal{http.StatusNotFound, "No such group", "There are no partitions with this name.", err}
	}
	return h.failed(err)
}

// pauseGroup pauses or resumes a group. The user needs the permission for each of its partitions.
func (h *Handler) pauseGroup(v *visit) *refusal {
	data := partitionsData{page: h.page(v, "Partitions"), Group: v.form.Get("group")}
	ctx, cancel := context.WithTimeout(v.Context(), pauseLimit)
	defer cancel()
	var change func() error
	switch v.form.Get("do") {
	case "pause":
		cfg, no := pauseOf(v)
		if no != nil {
			return no
		}
		data.Answer = "The group is paused. Workers notice within about a second."
		change = func() error { return pause.PauseGroup(ctx, h.desk.Conn(), data.Group, cfg) }
	case "resume":
		data.Answer = "The group is resumed. Workers notice within about a second."
		change = func() error { return pause.ResumeGroup(ctx, h.desk.Conn(), data.Group) }
	default:
		return refuse(http.StatusBadRequest, "No action is named", "Go back and use a button on that page.")
	}
	err := h.mayPause(ctx, v, data.Group)
	if err == nil {
		err = change()
	}
	h.did(v, ActionPause, "a pause was changed", "group", data.Group, "do", v.form.Get("do"), "error", err)
	if err != nil {
		return h.groupFailed(err)
	}
	if no := h.askGroup(v, &data); no != nil {
		return no
	}
	h.render(v.w, http.StatusOK, "partitions", data)
	return nil
}

// mayPause returns declare.ErrNotFound unless the visitor may pause each partition of a group. During a Reshard, that is
// those of both generations.
func (h *Handler) mayPause(ctx context.Context, v *visit, group string) error {
	now, next, err := partition.Find(ctx, h.desk.Conn(), group)
	if err != nil {
		return err
	}
	for _, queue := range append(now.Queues(), next.Queues()...) {
		_, err := h.cfg.Authorize(v.Request, Access{Action: ActionPause, Queue: queue})
		if err != nil || !h.lists(queue) {
			return errors.Join(fmt.Errorf("the user may not pause the partition %s: %w", queue, declare.ErrNotFound), err)
		}
	}
	return nil
}
