package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// notice reports a run to the person who started it, on the next page that they open.
type notice struct {
	Run  string // its ID, for a link
	Text string
	Bad  bool
}

// noticed is what a person has been notified of.
type noticed int

const (
	noticedNothing noticed = iota
	noticedStart
	noticedEnd
)

// maxNotices bounds the notices on a page. The list of runs has the others.
const maxNotices = 3

// notices returns what happened to the visitor's runs since the visitor's last page. Each notice
// is returned once, so none is left after a reload. The page of a run shows its state itself.
func (h *Handler) notices(v *visit) (all []notice) {
	if v.Method == http.MethodHead || v.Header.Get("Sec-Purpose") != "" || v.Header.Get("X-Hopback-Refresh") == "reload" {
		return nil // nobody reads this answer
	}
	for _, r := range h.runs.list() {
		if r.browser != v.token || r.dry || r.id == v.shows || !h.sees(v, r.sel.Queue) {
			continue
		}
		if n, ok := r.notice(); ok && len(all) < maxNotices {
			all = append(all, n)
		}
	}
	return all
}

// notice returns what the person who started the run doesn't know yet.
func (r *run) notice() (notice, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := noticedStart
	if !r.ended.IsZero() {
		now = noticedEnd
	}
	if r.noticed >= now {
		return notice{}, false
	}
	r.noticed = now
	n := notice{Run: r.id}
	if now == noticedStart {
		n.Text = fmt.Sprintf("%s of %s in %s is running.", r.noun(), fit(r.sel.Words, 120), r.sel.Queue)
		return n, true
	}
	n.Text, n.Bad = r.result()
	return n, true
}

// noun is the run at the beginning of a sentence.
func (r *run) noun() string {
	switch r.verb {
	case verbDiscard:
		return "The discard"
	case verbEdit:
		return "The edit"
	}
	return "The replay"
}

// result is how the run ended, in a sentence. r.mu is held.
func (r *run) result() (text string, bad bool) {
	var done, failed, unknown uint64
	what := "Replayed"
	switch {
	case r.discard != nil:
		done, what = r.discard.Discarded, "Discarded"
	case r.replayed != nil:
		done, failed, unknown = r.replayed.Replayed, r.replayed.Failed, r.replayed.Unknown
	}
	stopped := r.err != nil && isStopped(r.err)
	switch {
	case stopped:
		text = fmt.Sprintf("%s of %s was stopped after %s.", r.noun(), fit(r.sel.Words, 120), many(done, "message"))
	case r.err != nil && done == 0:
		return fmt.Sprintf("%s of %s failed: %s", r.noun(), fit(r.sel.Words, 120), plainError(r.err)), true
	case r.err != nil:
		return fmt.Sprintf("%s of %s failed after %s: %s", r.noun(), fit(r.sel.Words, 120), many(done, "message"), plainError(r.err)), true
	case r.verb == verbDiscard:
		text = fmt.Sprintf("%s %s from %s.", what, many(done, "message"), r.sel.Queue)
	case r.verb == verbEdit && done == 1:
		text = fmt.Sprintf("Replayed the edited message%s.", r.destination())
	default:
		text = fmt.Sprintf("%s %s%s.", what, many(done, "message"), r.destination())
	}
	switch {
	case failed == 1:
		text += fmt.Sprintf(" 1 message couldn't be sent and is still in %s.", r.sel.Queue)
	case failed > 1:
		text += fmt.Sprintf(" %s couldn't be sent and are still in %s.", many(failed, "message"), r.sel.Queue)
	}
	if unknown > 0 {
		text += fmt.Sprintf(" %s may exist twice.", many(unknown, "message"))
	}
	return text, failed > 0 || unknown > 0
}

// destination is where the run sent messages. r.mu is held.
func (r *run) destination() string {
	switch {
	case r.replay.Address.QueueName() != "":
		return " to " + r.replay.Address.QueueName()
	case r.replay.ToExchange:
		return " to the exchange that they were published to"
	case r.replayed == nil || r.replayed.Others > 0:
		return ""
	}
	queue := ""
	for _, g := range r.replayed.Groups {
		if g.Queue == "" || queue != "" && g.Queue != queue {
			return " to the queues that they failed in"
		}
		queue = g.Queue
	}
	if queue == "" {
		return ""
	}
	return " to " + queue
}

// isStopped reports whether a run ended because somebody stopped it.
func isStopped(err error) bool {
	return errors.Is(err, errStopped) || errors.Is(err, context.Canceled)
}
