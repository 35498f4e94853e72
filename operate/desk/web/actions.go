package web

import (
	"bytes"
	"errors"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/operate/desk"
)

// did logs an action that was started.
func (h *Handler) did(v *visit, a Action, what string, args ...any) {
	h.log.Info("hopback desk: "+what, append([]any{"action", a, "who", v.who, "remote", v.RemoteAddr}, args...)...)
}

func (h *Handler) startSurvey(v *visit) *refusal {
	if h.survey.start(h, v.who) {
		h.did(v, ActionView, "a survey started")
	}
	v.to("", "")
	return nil
}

func (h *Handler) stopSurvey(v *visit) *refusal {
	if h.survey.stop() {
		h.did(v, ActionStop, "a survey was stopped")
	}
	v.to("", "")
	return nil
}

// codes are the side effects that a form accepts. Accepting them is a separate action.
func (h *Handler) codes(v *visit) ([]desk.WarningCode, *refusal) {
	var all []desk.WarningCode
	for _, c := range v.form["accept"] {
		all = append(all, desk.WarningCode(c))
	}
	if len(all) > 20 {
		return nil, refuse(http.StatusBadRequest, "Too many codes", "Go back and use the button on that page.")
	}
	if len(all) == 0 {
		return nil, nil
	}
	return all, h.mayAccept(v)
}

// accept reads a queue despite the side effects, for the page that was refused.
func (h *Handler) accept(v *visit) *refusal {
	accept, no := h.codes(v)
	if no != nil {
		return no
	}
	page := v.form.Get("page")
	q, err := url.ParseQuery(v.form.Get("query"))
	if err != nil || len(accept) == 0 {
		return refuse(http.StatusBadRequest, "Nothing was accepted", "Go back and use the button on that page.")
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
			return refuse(http.StatusBadRequest, "No message is named", "Start from the overview.")
		}
		h.peeks.forget(queue, showKey(queue, id))
		if _, no = h.peeks.get(h, v, showKey(queue, id), queue, h.show(queue, id, accept)); no != nil {
			return no
		}
	default:
		return refuse(http.StatusBadRequest, "Page not found", "Start from the overview.")
	}
	h.did(v, ActionAccept, "side effects accepted", "queue", queue, "accept", accept)
	v.to(page, template.URL(q.Encode()))
	return nil
}

// chosen is the selection of a form: the selected messages, or all that the page shows.
func (h *Handler) chosen(v *visit) (selection, *refusal) {
	sel, no := wanted(v.form)
	if no != nil {
		return sel, no
	}
	if sel.Accept, no = h.codes(v); no != nil {
		return sel, no
	}
	sel.Back += viewOf(v.form)
	if g, ok := h.survey.find(sel.Queue, v.form.Get("group")); ok && len(sel.Filter.Groups) == 1 && sel.Words == "all messages of the group "+g.ID {
		sel.Words = "the group \"" + errorLine(g.Text, g.ErrorType, string(g.Reason)) + "\""
	}
	_, scope, _ := strings.Cut(v.form.Get("do"), " ")
	switch scope {
	case "all":
	case "selected":
		ids := v.form["id"]
		if len(ids) == 0 {
			return sel, refuse(http.StatusUnprocessableEntity, "No message is selected", "Go back and select at least one message.")
		}
		if len(ids) > 1000 {
			return sel, refuse(http.StatusBadRequest, "Too many messages", "Select at most 1,000.")
		}
		sel.Filter, sel.All = desk.Filter{IDs: ids}, false
		sel.Words = many(len(ids), "selected message")
		if len(ids) == 1 {
			sel.Words = "the message " + short(ids[0])
			sel.Back = query("in", sel.Queue, "group", v.form.Get("group"))
		}
	default:
		return sel, refuse(http.StatusBadRequest, "No action is named", "Go back and use a button on that page.")
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
		return refuse(http.StatusBadRequest, "Unknown action", "Go back and use a button on that page.")
	}
	return h.set(v, r)
}

var errNoDiscards = refuse(http.StatusForbidden, "Discarding is disabled", "Discarded messages are written to a file first. To enable it, start the page with hopback desk --discard-to, or set Config.DiscardDir.")

// set starts a run, and redirects to its page.
func (h *Handler) set(v *visit, r *run) *refusal {
	r.browser = v.token
	if no := h.begin(r); no != nil {
		return no
	}
	h.did(v, r.action(), r.name()+" started", "run", r.id, "queue", r.sel.Queue, "selected", r.sel.Words, "replay", r.replay.ID, "max", r.most, "rate", r.rate)
	v.to("run", query("id", r.id))
	return nil
}

// planned is the dry run that a form continues. The server keeps its selection, so that the
// action applies to what the dry run showed.
func (h *Handler) planned(v *visit, want verb) (*run, *refusal) {
	plan, no := h.namedRun(v.form.Get("run"))
	if no != nil {
		return nil, no
	}
	if plan.verb != want || !plan.dry {
		return nil, refuse(http.StatusBadRequest, "This dry run is for another action", "Go back and start with a dry run.")
	}
	if len(plan.sel.Accept) > 0 {
		return plan, h.mayAccept(v)
	}
	return plan, nil
}

// replay continues a dry run, or resumes a replay that was stopped.
func (h *Handler) replay(v *visit) *refusal {
	if id := v.form.Get("resume"); id != "" {
		old, no := h.namedRun(id)
		if no != nil {
			return no
		}
		if old.verb != verbReplay || old.dry || !old.over() {
			return refuse(http.StatusConflict, "Nothing to resume", "Only a replay that was stopped or failed can be resumed.")
		}
		if len(old.sel.Accept) > 0 {
			if no := h.mayAccept(v); no != nil {
				return no
			}
		}
		return h.set(v, &run{verb: verbReplay, who: v.who, sel: old.sel, replay: old.replay, rate: old.rate, most: old.most, headers: old.headers})
	}
	plan, no := h.planned(v, verbReplay)
	if no != nil {
		return no
	}
	r := &run{verb: verbReplay, who: v.who, sel: plan.sel}
	if no := h.limits(v, r); no != nil {
		return no
	}
	switch v.form.Get("to") {
	case "", "queue":
	case "exchange":
		r.replay.ToExchange = true
	case "other":
		name := v.form.Get("other")
		if name == "" || len(name) > 255 {
			return refuse(http.StatusBadRequest, "No queue is named", "Go back and enter the queue that the messages should go to.")
		}
		r.replay.Address = address.Queue(name)
	default:
		return refuse(http.StatusBadRequest, "Unknown destination", "Go back and choose one of the destinations.")
	}
	plan.stop(v.who) // if it is still counting
	return h.set(v, r)
}

// limits reads the rate and the maximum number of messages of a form, and whether the person
// accepts that headers are lost.
func (h *Handler) limits(v *visit, r *run) *refusal {
	form := v.form
	if form.Get("headers") != "" {
		if no := h.mayAccept(v); no != nil {
			return no
		}
		r.headers = true
	}
	if s := strings.TrimSpace(form.Get("rate")); s != "" {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || !(f > 0) || f > 1e6 {
			return refuse(http.StatusBadRequest, "This rate isn't valid", "Enter messages per second, above 0 and up to 1,000,000, or leave the field empty.")
		}
		r.rate = f
	}
	if s := strings.TrimSpace(form.Get("max")); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n == 0 {
			return refuse(http.StatusBadRequest, "This limit isn't valid", "Enter the largest number of messages, above 0, or leave the field empty.")
		}
		r.most = n
	}
	return nil
}

// discard continues a dry run.
func (h *Handler) discard(v *visit) *refusal {
	if h.cfg.DiscardDir == "" {
		return errNoDiscards
	}
	plan, no := h.planned(v, verbDiscard)
	if no != nil {
		return no
	}
	if v.form.Get("sure") == "" {
		return refuse(http.StatusUnprocessableEntity, "Not confirmed", "Go back and select the box that confirms the removal from the queue.")
	}
	r := &run{verb: verbDiscard, who: v.who, sel: plan.sel}
	if no := h.limits(v, r); no != nil {
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
		return refuse(http.StatusBadRequest, "No message is named", "Start from the overview.")
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
			return refuse(http.StatusBadRequest, "A property isn't valid", "Write each property as name=value, one per line.")
		}
		set[k] = value
	}
	for line := range strings.Lines(form.Get("remove")) {
		if k := strings.TrimRight(line, "\r\n"); k != "" {
			set[k] = nil
		}
	}
	if len(set) > 1000 {
		return refuse(http.StatusBadRequest, "Too many properties", "Change at most 1,000.")
	}
	// A browser sends every line break as CR LF. A body that has CR can't be edited here.
	body, hasBody := []byte(strings.ReplaceAll(form.Get("body"), "\r\n", "\n")), form.Has("body")
	kind := form.Get("content-type")
	if len(body) > maxForm || len(kind) > 255 {
		return refuse(http.StatusBadRequest, "Too large", "The body can have 2 MiB, and the content type 255 bytes.")
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
			return errors.New("the edit changes nothing; to replay the message unchanged, use Replay")
		}
		return nil
	}
	r := &run{verb: verbEdit, who: v.who, edit: edit, sel: selection{
		Queue: queue, Filter: desk.Filter{IDs: []string{id}}, Words: "the message " + short(id), Back: query("in", queue), Accept: accept,
	}}
	if no := h.limits(v, r); no != nil {
		return no
	}
	r.most = 1
	return h.set(v, r)
}

// stop stops a run.
func (h *Handler) stop(v *visit) *refusal {
	r, no := h.namedRun(v.form.Get("run"))
	if no != nil {
		return no
	}
	if r.stop(v.who) {
		h.did(v, ActionStop, r.name()+" was stopped", "run", r.id, "queue", r.sel.Queue)
	}
	v.to("run", query("id", r.id))
	return nil
}
