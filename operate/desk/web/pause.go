package web

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/middleware/pause"
)

// pauseLimit is how long an action about a pause may take.
const pauseLimit = 10 * time.Second

// pauseData is the page about the pause of a work queue. A person names the queue.
type pauseData struct {
	page
	Queue  string
	Paused *pause.State // nil: it isn't
	Answer string
}

// paused shows whether a queue is paused. Nothing is changed.
func (h *Handler) paused(v *visit) *refusal {
	data := pauseData{page: h.page(v, "Pause a queue"), Queue: v.form.Get("in")}
	if data.Queue != "" {
		ctx, cancel := context.WithTimeout(v.Context(), pauseLimit)
		defer cancel()
		if no := h.showPause(ctx, &data); no != nil {
			return no
		}
	}
	h.render(v.w, http.StatusOK, "pause", data)
	return nil
}

func (h *Handler) showPause(ctx context.Context, data *pauseData) *refusal {
	s, is, err := pause.Of(ctx, h.desk.Conn(), data.Queue)
	switch {
	case err != nil:
		return h.pauseFailed(err)
	case is:
		data.Paused = &s
	}
	return nil
}

func (h *Handler) pauseFailed(err error) *refusal {
	if bad, ok := errors.AsType[*argument.Error](err); ok && bad.Code == argument.CodeUnsupported {
		return &refusal{http.StatusUnprocessableEntity, "This is a partition", "A partition isn't paused alone. Pause its group, on the page Partitions.", err}
	}
	if errors.Is(err, declare.ErrNotFound) || errors.As(err, new(*argument.Error)) {
		return &refusal{http.StatusNotFound, "No such queue", "There is no queue with this name.", err}
	}
	return h.failed(err)
}

// pause pauses or resumes a queue.
func (h *Handler) pause(v *visit) *refusal {
	data := pauseData{page: h.page(v, "Pause a queue"), Queue: v.form.Get("in")}
	ctx, cancel := context.WithTimeout(v.Context(), pauseLimit)
	defer cancel()
	var err error
	switch v.form.Get("do") {
	case "pause":
		cfg, no := pauseOf(v)
		if no != nil {
			return no
		}
		err = pause.Pause(ctx, h.desk.Conn(), data.Queue, cfg)
		data.Answer = "The queue is paused. Workers notice within about a second."
	case "resume":
		err = pause.Resume(ctx, h.desk.Conn(), data.Queue)
		data.Answer = "The queue is resumed. Workers notice within about a second."
	default:
		return refuse(http.StatusBadRequest, "No action is named", "Go back and use a button on that page.")
	}
	h.did(v, ActionPause, "a pause was changed", "queue", data.Queue, "do", v.form.Get("do"), "error", err)
	if err != nil {
		return h.pauseFailed(err)
	}
	if no := h.showPause(ctx, &data); no != nil {
		return no
	}
	h.render(v.w, http.StatusOK, "pause", data)
	return nil
}

// pauseOf reads the form of a pause.
func pauseOf(v *visit) (cfg pause.PauseConfig, no *refusal) {
	cfg = pause.PauseConfig{By: v.who, Why: strings.TrimSpace(strings.ToValidUTF8(v.form.Get("why"), ""))}
	if text := strings.TrimSpace(v.form.Get("minutes")); text != "" {
		minutes, bad := strconv.Atoi(text)
		if bad != nil || minutes < 1 || minutes > maxMinutes {
			return cfg, refuse(http.StatusUnprocessableEntity, "This isn't a time", "Go back, and enter a number of minutes, at most a year, or nothing.")
		}
		cfg.For = time.Duration(minutes) * time.Minute
	}
	if len(cfg.Why) > maxWhy {
		return cfg, refuse(http.StatusUnprocessableEntity, "The reason is too long", "Go back, and say it in up to 200 bytes.")
	}
	return cfg, nil
}

// maxWhy is the longest reason, in bytes.
const maxWhy = 200
