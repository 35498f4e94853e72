package web

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
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
	switch {
	case errors.Is(err, declare.ErrNotFound), errors.As(err, new(*argument.Error)), errors.Is(err, partition.ErrWrongGroup):
		return &refusal{http.StatusNotFound, "No such group", "There are no partitions with this name.", err}
	case err != nil:
		return h.failed(err)
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
