package web

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/operate/desk"
)

// routes are all paths, without the prefix and the slash.
func (h *Handler) routes() {
	h.paths = map[string]route{
		"":           {http.MethodGet, ActionView, h.overview},
		"messages":   {http.MethodGet, ActionView, h.messages},
		"message":    {http.MethodGet, ActionView, h.message},
		"body":       {http.MethodGet, ActionBody, h.body},
		"download":   {http.MethodGet, ActionBody, h.download},
		"edit":       {http.MethodGet, ActionEdit, h.editForm},
		"parked":     {http.MethodGet, ActionView, h.waitingForm},
		"pause":      {http.MethodGet, ActionView, h.paused},
		"recurring":  {http.MethodGet, ActionView, h.recurring},
		"runs":       {http.MethodGet, ActionView, h.runList},
		"partitions": {http.MethodGet, ActionView, h.partitions},
		"workers":    {http.MethodGet, ActionView, h.workers},
		"run":        {http.MethodGet, ActionView, h.runPage},

		"survey":        {http.MethodPost, ActionView, h.startSurvey},
		"stop-survey":   {http.MethodPost, ActionStop, h.stopSurvey},
		"accept":        {http.MethodPost, ActionAccept, h.accept},
		"dry-run":       {http.MethodPost, ActionDryRun, h.dryRun},
		"replay":        {http.MethodPost, ActionReplay, h.replay},
		"discard":       {http.MethodPost, ActionDiscard, h.discard},
		"replay-edited": {http.MethodPost, ActionEdit, h.fix},
		"stop":          {http.MethodPost, ActionStop, h.stop},
		"waiting":       {http.MethodPost, ActionWaiting, h.waiting},
		"pause-queue":   {http.MethodPost, ActionPause, h.pause},
		"pause-group":   {http.MethodPost, ActionPause, h.pauseGroup},
		"recurring-do":  {http.MethodPost, ActionRecurring, h.changeRecurring},
	}
}

type route struct {
	method string
	action Action
	do     func(v *visit) *refusal
}

func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	guard(w)
	path := strings.TrimPrefix(r.URL.Path, "/")
	get := r.Method == http.MethodGet || r.Method == http.MethodHead
	if f, ok := h.static[path]; ok && get {
		// The files are the same for everybody. Their content is in their address.
		w.Header().Set("Content-Type", f.kind)
		w.Header().Set("Cache-Control", "private, max-age=86400")
		_, _ = w.Write(f.content)
		return
	}
	if h.login != nil && path == loginPath && get {
		if no := h.login.open(w, r); no != nil {
			h.refused(w, r, nil, ActionView, no)
		}
		return
	}
	to, ok := h.paths[path]
	switch {
	case !ok:
		h.refused(w, r, nil, "", refuse(http.StatusNotFound, "Page not found", "Start from the overview."))
		return
	case to.method == http.MethodPost && r.Method != http.MethodPost, to.method == http.MethodGet && !get:
		w.Header().Set("Allow", to.method)
		h.refused(w, r, nil, to.action, refuse(http.StatusMethodNotAllowed, "Method not allowed", "This address accepts only "+to.method+" requests."))
		return
	}
	v, no := h.enter(w, r, path, to.action)
	if no == nil {
		if to.action == ActionBody || to.method == http.MethodPost {
			w.Header().Set("Cache-Control", "no-store")
		}
		no = to.do(v)
	}
	if no != nil {
		h.refused(w, r, v, to.action, no)
	}
}

// refused answers a request that isn't done.
func (h *Handler) refused(w http.ResponseWriter, r *http.Request, v *visit, a Action, no *refusal) {
	if no.status == http.StatusForbidden {
		who := ""
		if v != nil {
			who = v.who
		}
		h.log.Warn("hopback desk: refused", "action", a, "path", r.URL.Path, "remote", r.RemoteAddr, "who", who, "error", no)
	}
	text := no.text
	if text == "" && no.err != nil {
		text = plainError(no.err)
	}
	p := h.page(v, no.title)
	if v == nil {
		p.Broker = "" // a stranger may not know it
	}
	h.render(w, no.status, "refused", struct {
		page
		Text string
	}{p, text})
}

// page is what every page has.
type page struct {
	Title    string
	Broker   string
	Who      string
	Token    string
	Writable bool
	Discards bool
	Claims   bool // the broker can cancel waiting messages by their token
	Refresh  int  // seconds; 0: the page doesn't change by itself
	Active   int  // runs
	Notices  []notice
	Now      time.Time
}

func (h *Handler) page(v *visit, title string) page {
	p := page{Title: title, Broker: clean(short(h.cfg.Title)), Writable: h.cfg.Writable, Discards: h.cfg.DiscardDir != "", Claims: h.claims(), Now: time.Now()}
	if v != nil {
		p.Who, p.Token, p.Notices = v.who, v.token, h.notices(v)
		for _, r := range h.runsFor(v) {
			if !r.over() {
				p.Active++
			}
		}
	}
	return p
}

func (h *Handler) render(w http.ResponseWriter, status int, name string, data any) {
	var b bytes.Buffer
	if err := h.pages.ExecuteTemplate(&b, name, data); err != nil {
		h.log.Error("hopback desk: can't render a page", "page", name, "error", err)
		http.Error(w, "The page can't be rendered. The server's log has the error.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = b.WriteTo(w)
}

// to redirects to a page, by a link that is relative to this one: the prefix isn't known.
func (v *visit) to(page string, query template.URL) {
	location := "./" + page
	if query != "" {
		location += "?" + string(query)
	}
	v.w.Header().Set("Location", location)
	v.w.WriteHeader(http.StatusSeeOther)
}

// addSurvey adds what the last survey has found, as far as the visitor may see it.
func (h *Handler) addSurvey(v *visit, data *overviewData, last *surveyed) {
	groups := slices.DeleteFunc(slices.Clone(last.groups), func(g desk.Group) bool { return !h.sees(v, g.In) })
	groups = sorted(groups, data.Sorting, groupOrders, unknownOfGroup, compareGroups)
	data.Surveyed = &surveyView{At: last.at, Took: last.took, Who: last.who, Others: last.others, Err: plainError(last.err), Count: len(groups)}
	if len(groups) > shownGroups && !data.All {
		groups = groups[:shownGroups]
		data.Surveyed.Cut = true
	}
	for _, g := range groups {
		data.Groups = append(data.Groups, h.groupView(g, sparkWidth, sparkHeight))
	}
	for _, q := range last.queues {
		if !h.sees(v, q.Name) {
			continue
		}
		for _, c := range q.Warnings {
			data.Notes = append(data.Notes, q.Name+": "+c.Text)
		}
		if q.Unread != "" {
			data.Unread = true
			data.Notes = append(data.Notes, q.Name+" wasn't read to the end: "+strings.ReplaceAll(q.Unread, "hopback: ", ""))
		}
		if !q.Oldest.IsZero() && (data.Oldest.IsZero() || q.Oldest.Before(data.Oldest)) {
			data.Oldest = q.Oldest
		}
	}
	if len(data.Notes) > 20 {
		data.Notes = append(data.Notes[:20], "…")
	}
}

// deadOf counts the dead letters of the queues, those that nobody can read yet, the queues for
// them, and those of these queues that aren't empty.
func deadOf(queues []desk.QueueSurvey) (dead, hidden uint64, deadQueues, with int) {
	for _, q := range queues {
		if isDead(q) {
			dead += deadIn(q)
			hidden += q.Delayed
			if deadQueues++; deadIn(q) > 0 {
				with++
			}
		}
	}
	return dead, hidden, deadQueues, with
}

// autoSurveyed starts a survey if the last one is old and a new one is short. It returns the
// surveyor's state.
func (h *Handler) autoSurveyed(v *visit, dead uint64) (running *surveying, last *surveyed, stale bool) {
	running, last, stale = h.survey.state()
	if running != nil || dead > autoSurvey || last != nil && !stale && time.Since(last.at) <= autoAge || !h.survey.start(h, v.who) {
		return running, last, stale
	}
	for end := time.Now().Add(patience); time.Now().Before(end); { // a small one ends at once
		if running, last, stale = h.survey.state(); running == nil {
			break
		}
		backoff.Sleep(v.Context(), 20*time.Millisecond)
	}
	return running, last, stale
}

// overview is the first page.
func (h *Handler) overview(v *visit) *refusal {
	counted, at, err := h.counts.get(v.Context(), h)
	if v.Context().Err() != nil {
		return refuse(http.StatusServiceUnavailable, "Interrupted", "")
	}
	queues := slices.DeleteFunc(slices.Clone(counted.Queues), func(q desk.QueueSurvey) bool { return !h.sees(v, q.Name) })
	dead, hidden, deadQueues, with := deadOf(queues)
	running, last, stale := h.survey.state()
	// A page that refreshes itself doesn't start surveys.
	if v.Header.Get("X-Hopback-Refresh") == "" && err == nil && deadQueues > 0 {
		running, last, stale = h.autoSurveyed(v, dead)
	}
	data := overviewData{page: h.page(v, "Overview"), Queues: queues, CountsAt: at, Err: plainError(err), Dead: dead, Hidden: hidden, With: with, Stale: stale, Counted: true}
	data.Refresh = 5
	data.All = v.form.Get("all") != ""
	data.sortBy(v.form)
	if err == nil {
		data.Alarms = alarmWords(counted.Alarms)
		data.Idle = withoutConsumers(queues)
		data.Paused = pausesOf(queues)
	}
	if running != nil {
		data.Refresh = 1
		data.Surveying = &progress{Done: running.seen, Of: max(running.of, running.seen), Began: running.began, Where: running.queue}
		if data.Surveying.Waits = h.waits(running.queue, "a survey"); !h.sees(v, running.queue) {
			data.Surveying.Where, data.Surveying.Waits = "", ""
		}
	}
	if last != nil {
		h.addSurvey(v, &data, last)
	}
	for _, q := range queues {
		data.Counted = data.Counted && q.Counted
	}
	data.Drawings = []drawing{wide(queues), narrow(queues)}
	if data.Of = len(queues); data.Of > shownQueues && !data.All {
		full := slices.Clone(queues)
		slices.SortStableFunc(full, func(a, b desk.QueueSurvey) int { return cmp.Compare(b.Messages, a.Messages) })
		data.Queues = full[:shownQueues]
	}
	runs := h.runsFor(v)
	for _, r := range runs[:min(5, len(runs))] {
		data.Runs = append(data.Runs, h.runView(r))
	}
	h.render(v.w, http.StatusOK, "overview", data)
	return nil
}

const (
	// autoSurvey is up to how many dead letters the overview surveys without being asked to.
	autoSurvey = 20_000
	autoAge    = 30 * time.Second
	// shownGroups are shown at first, of up to 1,000, and shownQueues of all.
	shownGroups = 100
	shownQueues = 100
)

type overviewData struct {
	page
	Queues    []desk.QueueSurvey
	Of        int // all queues
	CountsAt  time.Time
	Err       string
	Counted   bool
	Dead      uint64
	Hidden    uint64 // dead letters that wait for their delivery time
	With      int    // queues that hold some
	Oldest    time.Time
	Drawings  []drawing
	Alarms    []string
	Idle      idleQueues
	Paused    pauses
	Sorting   sorting
	Headings  map[string]heading
	AllLink   template.URL
	Surveying *progress
	Surveyed  *surveyView
	Stale     bool
	Groups    []groupView
	All       bool
	Notes     []string
	Unread    bool // a queue wasn't read to its end
	Runs      []runView
}

type surveyView struct {
	At     time.Time
	Took   time.Duration
	Who    string
	Others uint64
	Count  int
	Cut    bool
	Err    string
}

type groupView struct {
	desk.Group
	Line  string
	Query template.URL
	Spark *spark
}

func (h *Handler) groupView(g desk.Group, sparkWidth, sparkHeight int) groupView {
	return groupView{
		Group: g, Line: errorLine(g.Text, g.ErrorType, string(g.Reason)), Query: query("in", g.In, "group", g.ID),
		Spark: sparkOf(g, sparkWidth, sparkHeight, time.Now()),
	}
}

// progress is the progress of a scan or a run.
type progress struct {
	Done, Of uint64
	Began    time.Time
	Where    string
	Waits    string // for what the queue is in use
}

// elsewhere is what a queue is in use for when another process scans it.
const elsewhere = "a scan that was started elsewhere"

// Percent is for people.
func (p progress) Percent() int {
	if p.Of == 0 {
		return 0
	}
	return int(min(p.Done*100/p.Of, 100))
}

// Rate is in messages a second.
func (p progress) Rate() float64 { return float64(p.Done) / max(time.Since(p.Began).Seconds(), 0.1) }

// Took is how long it has taken so far.
func (p progress) Took() string { return time.Since(p.Began).Round(time.Second).String() }

// Left is an estimate.
func (p progress) Left() string {
	rate := p.Rate()
	if p.Of <= p.Done || p.Done == 0 || time.Since(p.Began) < 2*time.Second {
		return ""
	}
	left := float64(p.Of-p.Done) / rate
	if left > 24*60*60 {
		return "" // it says nothing
	}
	return took(time.Duration(left * float64(time.Second)).Round(time.Second))
}

// waits is what the queue is in use for, unless that is the page's own scan.
func (h *Handler) waits(queue, own string) string {
	if holder := h.queues.holder(queue); holder != own {
		return holder
	}
	return ""
}

// wanted is the selection that a page's address makes, or a form's.
func wanted(form url.Values) (selection, *refusal) {
	s := selection{Queue: form.Get("in")}
	if s.Queue == "" || len(s.Queue) > 255 {
		return s, refuse(http.StatusBadRequest, "No queue is named", "Start from the overview.")
	}
	f := &s.Filter
	var words []string
	if g := form.Get("group"); g != "" {
		f.Groups = []string{g}
		words = append(words, "of the group "+g)
	}
	if x := form.Get("reason"); x != "" {
		f.Reasons = []client.Reason{client.Reason(x)}
		words = append(words, fmt.Sprintf("with the reason %q", x))
	}
	if x := form.Get("text"); x != "" {
		f.Text = x
		words = append(words, fmt.Sprintf("whose error contains %q", x))
	}
	if x := form.Get("find"); x != "" {
		f.IDs = []string{x}
		words = append(words, fmt.Sprintf("with the ID %q", x))
	}
	if x := form.Get("property"); x != "" {
		k, value, ok := strings.Cut(x, "=")
		if !ok || k == "" {
			return s, refuse(http.StatusBadRequest, "This property filter isn't valid", "Write it as name=value.")
		}
		f.Properties = map[string]string{k: value}
		words = append(words, fmt.Sprintf("with the property %q", x))
	}
	s.Back = query("in", s.Queue, "group", form.Get("group"), "reason", form.Get("reason"), "text", form.Get("text"), "find", form.Get("find"), "property", form.Get("property"))
	if len(words) == 0 {
		s.All = true
	}
	s.Words = "all messages " + strings.Join(words, ", ")
	s.Words = strings.TrimSpace(s.Words)
	return s, nil
}

const pageSize = 50

// messages lists messages of a queue: those of a group, or those that a search finds.
func (h *Handler) messages(v *visit) *refusal {
	sel, no := wanted(v.form)
	if no != nil {
		return no
	}
	skip, err := strconv.Atoi(cmp.Or(v.form.Get("skip"), "0"))
	if err != nil || skip < 0 || skip > 1<<30 {
		return refuse(http.StatusBadRequest, "Page not found", "")
	}
	key, shown := listKey(sel, skip), viewOf(v.form)
	here := sel.Back + shown
	if skip > 0 {
		here += template.URL("&skip=" + strconv.Itoa(skip))
	}
	if v.form.Get("again") != "" {
		h.peeks.forget(sel.Queue, key)
		v.to("messages", here)
		return nil
	}
	k, no := h.peeks.get(h, v, key, sel.Queue, h.list(sel, skip, nil))
	if no != nil {
		return no
	}
	state := h.peeks.state(k)
	if !state.there {
		h.reading(v, k, "Messages in "+fit(sel.Queue, 60))
		return nil
	}
	list, _ := state.value.(*listed)
	if state.err != nil && (list == nil || list.Seen == 0) {
		return h.unread(v, sel.Queue, "messages", here, state.err)
	}
	data := messagesData{
		page: h.page(v, "Messages in "+fit(sel.Queue, 60)), Queue: sel.Queue, List: &list.List, Accept: list.accept, At: state.at, Took: state.at.Sub(k.began),
		Skip: skip, First: skip + 1, Last: skip + len(list.Messages), Here: here, Form: v.form, Whole: sel.All,
	}
	if data.Order = h.order(k, state, &data.page); !state.early {
		data.Err = plainError(state.err)
	}
	if g, ok := h.survey.find(sel.Queue, v.form.Get("group")); ok {
		group := h.groupView(g, headWidth, headHeight)
		data.Group = &group
		data.Title = fit(data.Group.Line, 60)
	}
	h.addRows(&data, list.Messages)
	if skip > 0 {
		data.Before = sel.Back + shown
		if skip > pageSize {
			data.Before += template.URL("&skip=" + strconv.Itoa(skip-pageSize))
		}
	}
	if list.More {
		data.Behind = sel.Back + shown + template.URL("&skip="+strconv.Itoa(skip+len(list.Messages)))
	}
	h.render(v.w, http.StatusOK, "messages", data)
	return nil
}

func listKey(sel selection, skip int) string { return fmt.Sprintf("list %s %d", sel.Back, skip) }

// list reads for the page messages.
func (h *Handler) list(sel selection, skip int, accept []desk.WarningCode) reader {
	return func(ctx context.Context, found func(peekResult), notify func(desk.Progress)) (peekResult, error) {
		keep := func(l desk.List) peekResult {
			for i := range l.Messages {
				trimSummary(&l.Messages[i])
				trimProperties(&l.Messages[i])
			}
			return peekResult{value: &listed{l, accept}}
		}
		l, err := h.desk.List(ctx, desk.ListConfig{
			Queue: sel.Queue, Filter: sel.Filter, Skip: skip, Limit: pageSize, PropertyTexts: true, Accept: accept, OnFound: func(l desk.List) { found(keep(l)) }, OnProgress: notify,
		})
		return keep(l), err
	}
}

// listed is what is kept of a list.
type listed struct {
	desk.List
	accept []desk.WarningCode
}

type messagesData struct {
	page
	Queue             string
	Whole             bool
	Group             *groupView
	List              *desk.List
	Accept            []desk.WarningCode
	Rows              []messageRow
	At                time.Time
	Took              time.Duration
	Err               string
	Order             order
	Skip, First, Last int
	Here              template.URL
	Before, Behind    template.URL
	Form              url.Values
	Sorting           sorting
	Headings          map[string]heading
	Unsorted          template.URL // the query without the sorting
	Columns           []string
	Choices           []choice
	Reasons           []reasonChoice
	Counted           time.Time // when the reasons were; zero if they weren't
}

type messageRow struct {
	desk.Summary
	Line  string
	Query template.URL
	Cells []string // the values of the columns
}

// Names are the fields that select messages.
func (messagesData) Names() []string {
	return []string{"group", "reason", "text", "find", "property"}
}

// Field is the value of a form's field.
func (data messagesData) Field(name string) string { return data.Form.Get(name) }

// reading is the page that is shown during a scan.
func (h *Handler) reading(v *visit, k *peek, title string) {
	now, held := k.now()
	data := readingData{page: h.page(v, title), Queue: k.queue, Progress: progress{Done: now.Seen, Of: max(now.Of, now.Seen), Began: k.began}}
	if !held {
		data.Progress.Waits = h.queues.holder(k.queue)
	} else if now.Waiting {
		data.Progress.Waits = elsewhere
	}
	data.Refresh = 1
	h.render(v.w, http.StatusOK, "reading", data)
}

// order says of a page that was shown early whether its queue is in order again.
type order struct {
	Under *progress // of restoring the order
	Err   string    // why it can't be restored
}

// order makes a page that was shown early reload itself until the queue is in order.
func (h *Handler) order(k *peek, state peekShown, p *page) (o order) {
	switch {
	case !state.early:
	case state.over:
		o.Err = plainError(state.err)
	default:
		now, _ := k.now()
		o.Under = &progress{Done: now.Seen, Of: max(now.Of, now.Seen), Began: k.began}
		p.Refresh = 5
	}
	return o
}

type readingData struct {
	page
	Queue    string
	Progress progress
}

// unread says why a queue wasn't read. A page that may change queues can accept side effects.
func (h *Handler) unread(v *visit, queue, page string, query template.URL, err error) *refusal {
	if t := sideEffects(err); t != nil {
		data := sideEffectsData{page: h.page(v, "Reading this queue has side effects"), Queue: queue, SideEffects: t.SideEffects, Page: page, Query: query}
		h.render(v.w, http.StatusConflict, "terms", data)
		return nil
	}
	return h.failed(err)
}

type sideEffectsData struct {
	page
	Queue       string
	SideEffects desk.SideEffects
	Page        string
	Query       template.URL
}

// failed turns an error of the desk into a page.
func (h *Handler) failed(err error) *refusal {
	var none *desk.NoMessageError
	var own *refusal
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &none):
		return &refusal{http.StatusNotFound, "Message not found", "It was replayed or discarded, or a consumer holds it. Go back and refresh the list.", err}
	case errors.Is(err, client.ErrNotFound):
		return &refusal{status: http.StatusNotFound, title: "Queue not found", err: err}
	case errors.As(err, new(*argument.Error)):
		return &refusal{status: http.StatusBadRequest, title: "Invalid request", err: err}
	case errors.Is(err, errIdle), errors.Is(err, context.Canceled), errors.Is(err, errStopped):
		return &refusal{http.StatusServiceUnavailable, "Interrupted", "Reload the page.", err}
	}
	return &refusal{status: http.StatusBadGateway, title: "The broker returned an error", err: err}
}

// shown is what is kept of a message.
type shown struct {
	desk.DeadLetter
	Fields []section
	accept []desk.WarningCode
	// whole is how many bytes the body has. It is -1 if it isn't bytes or text.
	whole int
}

type section struct {
	Name   string
	Fields []field
	More   bool // there are more
}

func (h *Handler) show(queue, id string, accept []desk.WarningCode) reader {
	keep := func(l desk.DeadLetter) peekResult {
		s := &shown{accept: accept, whole: -1}
		for _, p := range []struct {
			name string
			json []byte
		}{{"Properties", l.Properties}, {"Application properties", l.ApplicationProperties}, {"Annotations", l.Annotations}, {"Footer", l.Footer}} {
			if fields, more := fieldsOf(p.json); len(fields) > 0 {
				s.Fields = append(s.Fields, section{p.name, fields, more})
			}
		}
		raw := l.RawBody
		if raw != nil {
			s.whole = len(raw)
		}
		l.RawBody, l.Properties, l.ApplicationProperties, l.Annotations, l.Footer = nil, nil, nil, nil, nil
		trimDeadLetter(&l)
		s.DeadLetter = l
		return peekResult{s, raw}
	}
	return func(ctx context.Context, found func(peekResult), notify func(desk.Progress)) (peekResult, error) {
		_, err := h.desk.Show(ctx, desk.ShowConfig{Queue: queue, ID: id, Accept: accept, OnFound: func(l desk.DeadLetter) { found(keep(l)) }, OnProgress: notify})
		return peekResult{}, err // there is no message without Found
	}
}

func showKey(queue, id string) string { return "show " + string(query("in", queue, "id", id)) }

// deadLetter is the message that an address names. done says that the request is answered.
func (h *Handler) deadLetter(v *visit, path string) (s *shown, k *peek, done bool, no *refusal) {
	queue, id := v.form.Get("in"), v.form.Get("id")
	if queue == "" || len(queue) > 255 || id == "" || len(id) > 1000 {
		return nil, nil, false, refuse(http.StatusBadRequest, "No message is named", "Start from the overview.")
	}
	here := query("in", queue, "id", id)
	if v.form.Get("again") != "" {
		h.peeks.forget(queue, showKey(queue, id))
		v.to(path, here)
		return nil, nil, true, nil
	}
	k, no = h.peeks.get(h, v, showKey(queue, id), queue, h.show(queue, id, nil))
	if no != nil {
		return nil, nil, false, no
	}
	state := h.peeks.state(k)
	if !state.there {
		h.reading(v, k, "A message in "+fit(queue, 60))
		return nil, nil, true, nil
	}
	if s, _ = state.value.(*shown); s == nil {
		no = h.unread(v, queue, path, here, state.err)
		return nil, nil, no == nil, no
	}
	return s, k, false, nil
}

// message shows one message. Its body is hidden.
func (h *Handler) message(v *visit) *refusal { return h.showDeadLetter(v, "message", false) }

// body shows one message with its body.
func (h *Handler) body(v *visit) *refusal { return h.showDeadLetter(v, "body", true) }

func (h *Handler) showDeadLetter(v *visit, path string, body bool) *refusal {
	s, k, done, no := h.deadLetter(v, path)
	if done || no != nil {
		return no
	}
	queue := v.form.Get("in")
	if body {
		h.log.Info("hopback desk: body shown", "action", ActionBody, "who", v.who, "queue", queue, "id", s.ID, "messages", 1)
	}
	state := h.peeks.state(k)
	data := messageData{
		page: h.page(v, fit(cmp.Or(s.MessageID, s.ID), 60)), Queue: queue, DeadLetter: s.DeadLetter, Fields: s.Fields, Accept: s.accept, At: state.at, ShowBody: body,
		Line: errorLine(s.Error, s.ErrorType, string(s.Reason)), Here: query("in", queue, "id", v.form.Get("id")), Back: query("in", queue, "group", s.Group),
		Whole: s.whole, Kept: h.peeks.rawOf(k) != nil || s.whole == 0, Shown: len(s.Body),
	}
	data.History = historyOf(&s.DeadLetter)
	data.Order = h.order(k, state, &data.page)
	h.render(v.w, http.StatusOK, "message", data)
	return nil
}

type messageData struct {
	page
	Queue      string
	DeadLetter desk.DeadLetter
	Line       string
	Fields     []section
	Accept     []desk.WarningCode
	At         time.Time
	Here       template.URL
	Back       template.URL
	ShowBody   bool
	Shown      int
	Whole      int
	Kept       bool // for a download
	History    historyView
	Order      order
}

// download sends the whole body as a file that no browser opens by itself.
func (h *Handler) download(v *visit) *refusal {
	s, k, done, no := h.deadLetter(v, "download")
	if done || no != nil {
		return no
	}
	raw := h.peeks.rawOf(k)
	if s.whole > maxRaw || s.whole < 0 {
		return refuse(http.StatusUnprocessableEntity, "This body can't be downloaded", "It is larger than 64 MiB, or has AMQP types. Use hopback dlq export.")
	}
	if raw == nil && s.whole > 0 {
		// It was dropped to make room for others, so read it again.
		h.peeks.forget(k.queue, k.key)
		if s, k, done, no = h.deadLetter(v, "download"); done || no != nil {
			return no
		}
		if raw = h.peeks.rawOf(k); raw == nil && s.whole > 0 {
			return refuse(http.StatusServiceUnavailable, "Too many scans", "Try again in a moment.")
		}
	}
	h.log.Info("hopback desk: body downloaded", "action", ActionBody, "who", v.who, "queue", k.queue, "id", s.ID, "messages", 1, "bytes", len(raw))
	header := v.w.Header()
	header.Set("Content-Type", "application/octet-stream")
	header.Set("Content-Disposition", `attachment; filename="body-`+s.ID+`.bin"`)
	header.Set("Content-Length", strconv.Itoa(len(raw)))
	_, _ = v.w.Write(raw)
	return nil
}

// maxEdit bounds the bodies that are edited in a form.
const maxEdit = 256 << 10

// editForm shows the form to edit a message.
func (h *Handler) editForm(v *visit) *refusal {
	s, k, done, no := h.deadLetter(v, "edit")
	if done || no != nil {
		return no
	}
	queue := v.form.Get("in")
	data := editData{page: h.page(v, "Edit "+fit(cmp.Or(s.MessageID, s.ID), 60)), Queue: queue, DeadLetter: s.DeadLetter, Accept: s.accept, Here: query("in", queue, "id", v.form.Get("id"))}
	raw := h.peeks.rawOf(k)
	switch {
	case s.Unreadable != "":
		return refuse(http.StatusUnprocessableEntity, "This message can't be edited", "It can't be decoded, so it can't be replayed. You can export or discard it.")
	case s.BodyForm != "json" && s.BodyForm != "text" || s.whole < 0:
		data.Why = "The body isn't text, so it can't be edited here."
	case s.whole > maxEdit || raw == nil && s.whole > 0:
		data.Why = "The body is larger than 256 KiB, so it can't be edited here."
	case bytes.ContainsRune(raw, '\r'):
		data.Why = "The body contains carriage returns, which a browser would change, so it can't be edited here."
	case clean(string(raw)) != string(raw):
		data.Why = "The body has invisible characters, so it can't be edited here."
	default:
		data.Body = string(raw)
		h.log.Info("hopback desk: body shown", "action", ActionEdit, "who", v.who, "queue", queue, "id", s.ID, "messages", 1)
	}
	for _, f := range s.Fields {
		if f.Name == "Application properties" {
			data.Properties = f.Fields
		}
	}
	h.render(v.w, http.StatusOK, "edit", data)
	return nil
}

type editData struct {
	page
	Queue      string
	DeadLetter desk.DeadLetter
	Accept     []desk.WarningCode
	Here       template.URL
	Body, Why  string
	Properties []field
}

// runView is a run for people.
type runView struct {
	ID, Name, Title, Who, Queue, Words string
	Back                               template.URL
	Verb                               string
	Dry, Over, Stopped, Failed         bool
	Began, Ended                       time.Time
	Took                               time.Duration
	Progress                           progress
	Matched, Sent, Hidden              uint64
	Replay                             *desk.ReplayReport
	Discard                            *desk.DiscardReport
	Groups                             []groupView
	Others                             uint64
	Seen                               uint64
	File                               string
	Err                                string
	State                              string
	Unread                             string
	Resume                             bool
}

func (h *Handler) runView(r *run) runView {
	r.mu.Lock()
	defer r.mu.Unlock()
	name := r.name()
	_, name, _ = strings.Cut(name, " ") // without its article
	w := runView{
		ID: r.id, Name: strings.ToUpper(name[:1]) + name[1:], Who: r.who, Queue: r.sel.Queue, Words: r.sel.Words, Back: r.sel.Back, Verb: string(r.verb), Dry: r.dry,
		Over: !r.ended.IsZero(), Stopped: r.err != nil && isStopped(r.err), Began: r.began, Ended: r.ended, File: r.file,
		Replay: r.replayed, Discard: r.discard,
	}
	w.Failed = r.err != nil && !w.Stopped
	if w.Failed {
		w.Err = plainError(r.err)
	}
	p := r.progress
	began := r.started
	if began.IsZero() {
		began = r.began
	}
	w.Progress = progress{Done: p.Seen, Of: max(p.Of, p.Seen), Began: began}
	w.Matched, w.Sent, w.Seen = p.Matched, p.Done, p.Seen
	if r.waiting {
		w.Progress.Waits = h.waits(r.sel.Queue, r.name())
	} else if p.Waiting {
		w.Progress.Waits = elsewhere
	}
	add := func(groups []desk.Group) {
		for _, g := range groups {
			g.In = r.sel.Queue
			w.Groups = append(w.Groups, groupView{Group: g, Line: errorLine(g.Text, g.ErrorType, string(g.Reason)), Query: query("in", r.sel.Queue, "group", g.ID)})
		}
	}
	if p := r.replayed; p != nil {
		w.Hidden = p.Hidden
		w.Matched, w.Sent, w.Seen, w.Others, w.Unread = p.Matched, p.Replayed, p.Seen, p.Others, p.Unread
		add(p.Groups)
	}
	if p := r.discard; p != nil {
		w.Hidden = p.Hidden
		w.Matched, w.Sent, w.Seen, w.Others, w.Unread = p.Matched, p.Discarded, p.Seen, p.Others, p.Unread
		add(p.Groups)
	}
	switch {
	case !w.Over && r.waiting:
		w.State = "waiting"
	case !w.Over && r.stopping != "":
		w.State = "stopping"
	case !w.Over:
		w.State = "running"
	case w.Stopped:
		w.State = "stopped"
	case w.Failed:
		w.State = "failed"
	case r.replayed != nil && r.replayed.Failed > 0, w.Hidden > 0, w.Unread != "":
		w.State = "incomplete"
	default:
		w.State = "done"
	}
	if w.Over {
		w.Took = r.ended.Sub(began)
	}
	w.Resume = w.Over && !w.Dry && r.verb == verbReplay && (w.Stopped || w.Failed)
	return w
}

// runsFor returns the runs on queues that the visitor may view, the latest first.
func (h *Handler) runsFor(v *visit) []*run {
	return slices.DeleteFunc(h.runs.list(), func(r *run) bool { return !h.sees(v, r.sel.Queue) })
}

func (h *Handler) runList(v *visit) *refusal {
	data := runsData{page: h.page(v, "Runs")}
	for _, r := range h.runsFor(v) {
		data.Runs = append(data.Runs, h.runView(r))
	}
	if data.Refresh = 5; data.Active > 0 {
		data.Refresh = 2
	}
	h.render(v.w, http.StatusOK, "runs", data)
	return nil
}

type runsData struct {
	page
	Runs []runView
}

func (h *Handler) runPage(v *visit) *refusal {
	r, no := h.namedRun(v.form.Get("id"))
	if no != nil {
		return no
	}
	v.shows = r.id
	view := h.runView(r)
	data := runData{page: h.page(v, view.Name), Run: view}
	if !view.Over {
		data.Refresh = 1
	}
	h.render(v.w, http.StatusOK, "run", data)
	return nil
}

type runData struct {
	page
	Run runView
}

func (h *Handler) namedRun(id string) (*run, *refusal) {
	if r := h.runs.find(id); r != nil {
		return r, nil
	}
	return nil, refuse(http.StatusNotFound, "Run not found", "The page remembers the last 100 runs, until its server stops.")
}
