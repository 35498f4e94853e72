package web

import (
	"html/template"
	"net/url"
	"slices"
	"strings"

	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/operate/desk"
)

// sortBy sorts the groups as the page's address says: by their size, unless it says something
// else.
func (data *overviewData) sortBy(form url.Values) {
	data.Sorting = sortingOf(form, groupOrders)
	base := url.Values{}
	if data.All {
		base.Set("all", "1")
	}
	if data.Sorting.Key == "" {
		data.Sorting.Key = "messages"
	}
	data.Headings = data.Sorting.headings(groupOrders, base)
	data.AllLink = query("all", "1", "sort", sortingOf(form, groupOrders).String())
}

// Sorted says how the groups are sorted.
func (data overviewData) Sorted() string { return data.Sorting.words(groupOrders) }

// alarmWords are the broker's alarms for people.
func alarmWords(alarms []desk.Alarm) (words []string) {
	for _, a := range alarms[:min(len(alarms), 10)] {
		switch {
		case a.Resource == "":
			words = append(words, "a memory or disk alarm")
		case a.Node == "":
			words = append(words, "a "+a.Resource+" alarm")
		default:
			words = append(words, "a "+a.Resource+" alarm on "+a.Node)
		}
	}
	return words
}

// idleQueues are work queues in which messages wait, and which have no consumers.
type idleQueues struct {
	Queues []idleQueue
	More   int // that aren't named
}

type idleQueue struct {
	Name, Label string
	Messages    uint64
}

// shownIdle is how many work queues without consumers are named, and how many pauses.
const shownIdle = 5

// withoutConsumers finds the work queues in which messages wait for a consumer. A stream keeps
// its messages, so they don't wait.
func withoutConsumers(queues []desk.QueueSurvey) (idle idleQueues) {
	for _, q := range queues {
		if q.Role == "work" && q.Type != "stream" && q.Consumers == 0 && q.Messages > 0 {
			idle.Queues = append(idle.Queues, idleQueue{q.Name, fit(q.Name, 60), q.Messages})
		}
	}
	slices.SortStableFunc(idle.Queues, func(a, b idleQueue) int {
		switch {
		case a.Messages > b.Messages:
			return -1
		case a.Messages < b.Messages:
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
	idle.More = max(len(idle.Queues)-shownIdle, 0)
	idle.Queues = idle.Queues[:len(idle.Queues)-idle.More]
	return idle
}

// pauses are those of queues and of groups.
type pauses struct {
	First []pause.State
	More  int // that aren't named
}

// pausesOf names the pauses, once for all partitions of a group.
func pausesOf(queues []desk.QueueSurvey) (all pauses) {
	for _, q := range queues {
		if q.Paused != nil && !slices.Contains(all.First, *q.Paused) {
			all.First = append(all.First, *q.Paused)
		}
	}
	slices.SortStableFunc(all.First, func(a, b pause.State) int { return a.Since.Compare(b.Since) })
	all.More = max(len(all.First)-shownIdle, 0)
	all.First = all.First[:len(all.First)-all.More]
	return all
}

// viewOf is the part of a query that says how the messages are shown: the columns, and how they
// are sorted. It begins with "&".
func viewOf(form url.Values) template.URL {
	v := url.Values{}
	if columns := columnsOf(form); len(columns) > 0 {
		v["column"] = columns
	}
	if s := sortingOf(form, messageOrders); s.Key != "" {
		v.Set("sort", s.String())
	}
	if len(v) == 0 {
		return ""
	}
	return template.URL("&" + v.Encode())
}

// addRows adds the messages, sorted as the page's address says, with the columns that it names.
func (h *Handler) addRows(data *messagesData, messages []desk.Summary) {
	form := data.Form
	data.Columns = columnsOf(form)
	data.Choices = choicesOf(messages, data.Columns)
	data.Sorting = sortingOf(form, messageOrders)
	base := url.Values{}
	for _, name := range append(data.Names(), "in", "column", "skip") {
		if v := form[name]; len(v) > 0 && v[0] != "" {
			base[name] = v
		}
	}
	data.Headings = data.Sorting.headings(messageOrders, base)
	data.Unsorted = template.URL(base.Encode())
	choices, surveyed := h.survey.reasonsOf(data.Queue, form.Get("group"), form.Get("reason"))
	if data.Reasons = choices; surveyed != nil {
		data.Counted = surveyed.at
	}
	for _, m := range sorted(messages, data.Sorting, messageOrders, unknownOfMessage, compareMessages) {
		line := errorLine(m.Error, m.ErrorType, string(m.Reason))
		if m.Unreadable != "" {
			line = "can't be decoded: " + m.Unreadable
		} else if data.Group != nil && line == data.Group.Line {
			line = "" // it is in the heading
		}
		row := messageRow{Summary: m, Line: line, Query: query("in", data.Queue, "id", m.ID)}
		for _, name := range data.Columns {
			row.Cells = append(row.Cells, m.PropertyTexts[name])
		}
		data.Rows = append(data.Rows, row)
	}
}

// Sorted says how the messages are sorted; empty if they are in the order of the queue.
func (data messagesData) Sorted() string { return data.Sorting.words(messageOrders) }

// Complete reports whether all messages that match are on this page.
func (data messagesData) Complete() bool {
	return data.Skip == 0 && !data.List.More && data.Err == "" && data.List.Unread == ""
}

// SortKeys are the columns that the messages can be sorted by.
func (data messagesData) SortKeys() []string { return keysOf(messageOrders) }

// SortKeys are the columns that the groups can be sorted by.
func (data overviewData) SortKeys() []string { return keysOf(groupOrders) }
