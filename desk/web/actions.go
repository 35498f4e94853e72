package web

import (
	"bytes"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/desk"
)

// did logs an action that was begun.
func (h *Handler) did(v *visit, a Action, what string, args ...any) {
	h.log.Info("hopback desk: "+what, append([]any{"action", a, "who", v.who, "remote", v.RemoteAddr}, args...)...)
}

func (h *Handler) startSurvey(v *visit) *refusal {
	if h.survey.start(h, v.who) {
		h.did(v, ActionView, "a survey begins")
	}
	v.to("", "")
	return nil
}

func (h *Handler) stopSurvey(v *visit) *refusal {
	if h.survey.stop() {
		h.did(v, ActionStop, "a survey is stopped")
	}
	v.to("", "")
	return nil
}

// codes are the caveats that a form accepts. They are an action of their own.
func (h *Handler) codes(v *visit) ([]desk.WarningCode, *refusal) {
	var all []desk.WarningCode
	for _, c := range v.form["accept"] {
		all = append(all, desk.WarningCode(c))
	}
	if len(all) > 20 {
		return nil, refuse(http.StatusBadRequest, "Too many words", "")
	}
	if len(all) == 0 {
		return nil, nil
	}
	return all, h.mayAccept(v)
}

// accept looks into a queue although that costs something, for the page that was refused.
func (h *Handler) accept(v *visit) *refusal {
	accept, no := h.codes(v)
	if no != nil {
		return no
	}
	page := v.form.Get("page")
	q, err := url.ParseQuery(v.form.Get("query"))
	if err != nil || len(accept) == 0 {
		return refuse(http.StatusBadRequest, "Nothing is accepted", "Go back, and use the button there.")
	}
	queue := q.Get("in")
	switch page {
	case "messages":
		sel, no := wanted(q)
		if no != nil {
			return no
		}
		skip, _ := strconv.Atoi(q.Get("skip"))
		skip = max(skip, 0)
		h.peeks.forget(queue, listKey(sel, skip))
		_, no = h.peeks.get(h, v, listKey(sel, skip), queue, h.list(sel, skip, accept))
		if no != nil {
			return no
		}
	case "message", "body", "edit", "download":
		id := q.Get("id")
		if queue == "" || id == "" {
			return refuse(http.StatusBadRequest, "No message is named", "")
		}
		h.peeks.forget(queue, showKey(queue, id))
		if _, no = h.peeks.get(h, v, showKey(queue, id), queue, h.show(queue, id, accept)); no != nil {
			return no
		}
	default:
		return refuse(http.StatusBadRequest, "There is no such page", "")
	}
	h.did(v, ActionAccept, "a look's costs are accepted", "queue", queue, "accept", accept)
	v.to(page, template.URL(q.Encode()))
	return nil
}

// chosen is the selection of a form: the messages with a tick, or all that the page shows.
func (h *Handler) chosen(v *visit) (selection, *refusal) {
	sel, no := wanted(v.form)
	if no != nil {
		return sel, no
	}
	if sel.Accept, no = h.codes(v); no != nil {
		return sel, no
	}
	if g, ok := h.survey.find(sel.Queue, v.form.Get("group")); ok && len(sel.Filter.Groups) == 1 && sel.Words == "all messages of the group "+g.ID {
		sel.Words = fmt.Sprintf("the group %q", errorLine(g.Text, g.ErrorType, string(g.Reason)))
	}
	_, scope, _ := strings.Cut(v.form.Get("do"), " ")
	switch scope {
	case "all":
	case "ticked":
		ids := v.form["id"]
		if len(ids) == 0 {
			return sel, refuse(http.StatusUnprocessableEntity, "Nothing is ticked", "Go back, and tick the messages that you mean.")
		}
		if len(ids) > 1000 {
			return sel, refuse(http.StatusBadRequest, "Too many messages", "Tick at most 1,000.")
		}
		sel.Filter, sel.All = desk.Filter{IDs: ids}, false
		sel.Words = many(len(ids), "ticked message")
		if len(ids) == 1 {
			sel.Words = "the message " + short(ids[0])
			sel.Back = query("in", sel.Queue, "group", v.form.Get("group"))
		}
	default:
		return sel, refuse(http.StatusBadRequest, "Nothing is selected", "Go back, and use a button there.")
	}
	return sel, nil
}

// dryRun counts what would be replayed or discarded. Its page has the button that does it.
func (h *Handler) dryRun(v *visit) *refusal {
	sel, no := h.chosen(v)
	if no != nil {
		return no
	}
	does, _, _ := strings.Cut(v.form.Get("do"), " ")
	r := &run{verb: verb(does), dry: true, who: v.who, sel: sel}
	switch {
	case r.verb == verbDiscard && h.cfg.DiscardDir == "":
		return errNoDiscards
	case r.verb != verbReplay && r.verb != verbDiscard:
		return refuse(http.StatusBadRequest, "There is no such action", "")
	}
	return h.set(v, r)
}

var errNoDiscards = refuse(http.StatusForbidden, "Nothing can be discarded here", "Discarded messages are written to a file first. Start the page with hopback desk --discard-to, or with Config.DiscardDir.")

// set begins a run, and goes to its page.
func (h *Handler) set(v *visit, r *run) *refusal {
	if no := h.begin(r); no != nil {
		return no
	}
	h.did(v, r.action(), r.name()+" begins", "run", r.id, "queue", r.sel.Queue, "selected", r.sel.Words, "replay", r.replay.ID, "max", r.most, "rate", r.rate)
	v.to("run", query("id", r.id))
	return nil
}

// planned is the dry run that a form goes on with: its selection is known here, so that
// what is done is what was shown.
func (h *Handler) planned(v *visit, want verb) (*run, *refusal) {
	plan, no := h.namedRun(v.form.Get("run"))
	if no != nil {
		return nil, no
	}
	if plan.verb != want || !plan.dry {
		return nil, refuse(http.StatusBadRequest, "This isn't the dry run of that", "Go back, and begin with a dry run.")
	}
	if len(plan.sel.Accept) > 0 {
		return plan, h.mayAccept(v)
	}
	return plan, nil
}

// replay goes on from a dry run, or with a replay that was stopped.
func (h *Handler) replay(v *visit) *refusal {
	if id := v.form.Get("resume"); id != "" {
		old, no := h.namedRun(id)
		if no != nil {
			return no
		}
		if old.verb != verbReplay || old.dry || !old.over() {
			return refuse(http.StatusConflict, "There is nothing to go on with", "Only a replay that was stopped can be continued.")
		}
		if len(old.sel.Accept) > 0 {
			if no := h.mayAccept(v); no != nil {
				return no
			}
		}
		return h.set(v, &run{verb: verbReplay, who: v.who, sel: old.sel, replay: old.replay, rate: old.rate, most: old.most})
	}
	plan, no := h.planned(v, verbReplay)
	if no != nil {
		return no
	}
	r := &run{verb: verbReplay, who: v.who, sel: plan.sel}
	if no := limits(v.form, r); no != nil {
		return no
	}
	switch v.form.Get("to") {
	case "", "queue":
	case "exchange":
		r.replay.ToExchange = true
	case "other":
		name := v.form.Get("other")
		if name == "" || len(name) > 255 {
			return refuse(http.StatusBadRequest, "No queue is named", "Go back, and name the queue that the messages should go to.")
		}
		r.replay.Address = address.Queue(name)
	default:
		return refuse(http.StatusBadRequest, "There is no such destination", "")
	}
	plan.stop(v.who) // whoever has seen enough needn't wait for its end
	return h.set(v, r)
}

// limits reads the rate and the most messages of a form.
func limits(form url.Values, r *run) *refusal {
	if s := strings.TrimSpace(form.Get("rate")); s != "" {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || !(f > 0) || f > 1e6 {
			return refuse(http.StatusBadRequest, "The rate can't be used", "Give messages a second, above 0, or leave it empty.")
		}
		r.rate = f
	}
	if s := strings.TrimSpace(form.Get("max")); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n == 0 {
			return refuse(http.StatusBadRequest, "The number can't be used", "Give at most how many messages, above 0, or leave it empty.")
		}
		r.most = n
	}
	return nil
}

// discard goes on from a dry run.
func (h *Handler) discard(v *visit) *refusal {
	if h.cfg.DiscardDir == "" {
		return errNoDiscards
	}
	plan, no := h.planned(v, verbDiscard)
	if no != nil {
		return no
	}
	if v.form.Get("sure") == "" {
		return refuse(http.StatusUnprocessableEntity, "Not confirmed", "Go back, and tick that the messages may be removed from the queue.")
	}
	r := &run{verb: verbDiscard, who: v.who, sel: plan.sel}
	if no := limits(v.form, r); no != nil {
		return no
	}
	plan.stop(v.who)
	return h.set(v, r)
}

// fix changes a message and replays it.
func (h *Handler) fix(v *visit) *refusal {
	form := v.form
	queue, id := form.Get("in"), form.Get("id")
	if queue == "" || len(queue) > 255 || id == "" || len(id) > 1000 {
		return refuse(http.StatusBadRequest, "No message is named", "")
	}
	accept, no := h.codes(v)
	if no != nil {
		return no
	}
	set := map[string]any{}
	for line := range strings.Lines(form.Get("set")) {
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			continue
		}
		k, value, ok := strings.Cut(line, "=")
		if !ok || k == "" {
			return refuse(http.StatusBadRequest, "A property can't be read", "Write each as key=value, on a line of its own.")
		}
		set[k] = value
	}
	for line := range strings.Lines(form.Get("remove")) {
		if k := strings.TrimRight(line, "\r\n"); k != "" {
			set[k] = nil
		}
	}
	if len(set) > 1000 {
		return refuse(http.StatusBadRequest, "Too many properties", "")
	}
	// A browser sends every end of a line as CR LF. A body that has CR isn't edited here.
	body, hasBody := []byte(strings.ReplaceAll(form.Get("body"), "\r\n", "\n")), form.Has("body")
	kind := form.Get("content-type")
	if len(body) > maxForm || len(kind) > 255 {
		return refuse(http.StatusBadRequest, "Too large", "The content type may have 255 bytes.")
	}
	edit := func(e *desk.Edit) error {
		changed := len(set) > 0
		if old, ok := e.Body(); hasBody && !(ok && bytes.Equal(old, body)) {
			if !ok || bytes.ContainsRune(old, '\r') {
				return errors.New("the body can't be edited here")
			}
			e.SetBody(body)
			changed = true
		}
		if kind != e.Summary.ContentType && form.Has("content-type") {
			e.SetContentType(kind)
			changed = true
		}
		for k, value := range set {
			e.SetProperty(k, value)
		}
		if !changed {
			return errors.New("the edit changes nothing; to replay the message as it is, use Replay")
		}
		return nil
	}
	r := &run{verb: verbEdit, who: v.who, edit: edit, most: 1, sel: selection{
		Queue: queue, Filter: desk.Filter{IDs: []string{id}}, Words: "the message " + short(id), Back: query("in", queue), Accept: accept,
	}}
	return h.set(v, r)
}

// stop ends a run.
func (h *Handler) stop(v *visit) *refusal {
	r, no := h.namedRun(v.form.Get("run"))
	if no != nil {
		return no
	}
	if r.stop(v.who) {
		h.did(v, ActionStop, r.name()+" is stopped", "run", r.id, "queue", r.sel.Queue)
	}
	v.to("run", query("id", r.id))
	return nil
}
