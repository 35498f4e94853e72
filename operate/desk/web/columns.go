package web

import (
	"cmp"
	"html/template"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/operate/desk"
	"github.com/hopback/hopback/retry"
)

const (
	// maxColumns bounds the columns of application properties, and maxNames the properties that
	// are offered.
	maxColumns = 4
	maxNames   = 24
	// maxName and maxValue bound what is kept of a property, and maxProperties of all that a message
	// has, in bytes.
	maxName       = 100
	maxValue      = 300
	maxProperties = 8 << 10
)

// columnsOf are the application properties that a page's address names.
func columnsOf(form url.Values) (columns []string) {
	for _, name := range form["column"] {
		if columnName(name) && !slices.Contains(columns, name) && len(columns) < maxColumns {
			columns = append(columns, name)
		}
	}
	return columns
}

// columnName reports whether a property can be a column. A name that can't be shown unchanged
// could pass for another one.
func columnName(name string) bool {
	return name != "" && len(name) <= maxName && clean(name) == name
}

// choice is a property that can be a column.
type choice struct {
	Name    string
	Checked bool
}

// choicesOf are the chosen columns and the properties of the messages, the most frequent first.
func choicesOf(messages []desk.Summary, columns []string) (choices []choice) {
	counts := map[string]int{}
	for _, m := range messages {
		for name := range m.PropertyTexts {
			counts[name]++
		}
	}
	for _, name := range columns {
		choices = append(choices, choice{name, true})
		delete(counts, name)
	}
	names := make([]string, 0, len(counts))
	for name := range counts {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	for _, name := range names[:min(len(names), maxNames)] {
		choices = append(choices, choice{name, false})
	}
	return choices
}

// trimProperties bounds what is kept of a message's application properties, and drops those
// that can't be columns.
func trimProperties(m *desk.Summary) {
	kept, room := map[string]string{}, maxProperties
	for _, name := range slices.Sorted(maps.Keys(m.PropertyTexts)) {
		value := cutAt(m.PropertyTexts[name], maxValue)
		if !columnName(name) || len(name)+len(value) > room {
			continue
		}
		room -= len(name) + len(value)
		kept[strings.Clone(name)] = strings.Clone(value)
	}
	m.PropertyTexts = kept
}

// sorting is the order of a table's rows.
type sorting struct {
	Key     string // empty: as they come
	Reverse bool
}

// ordering is a way to sort a table.
type ordering struct {
	key, label string
	descending bool      // unless it is reversed
	words      [2]string // of the order, and of its reverse
}

var messageOrders = []ordering{
	{"message", "Message", false, [2]string{"by ID", "by ID, backward"}},
	{"dead-lettered", "Dead-lettered", true, [2]string{"by time, the newest first", "by time, the oldest first"}},
	{"retries", "Retries", true, [2]string{"by retries, the most first", "by retries, the fewest first"}},
	{"replays", "Replays", true, [2]string{"by replays, the most first", "by replays, the fewest first"}},
	{"size", "Size", true, [2]string{"by size, the largest first", "by size, the smallest first"}},
}

var groupOrders = []ordering{
	{"queue", "Original queue", false, [2]string{"by queue", "by queue, backward"}},
	{"messages", "Messages", true, [2]string{"the largest first", "the smallest first"}},
	{"oldest", "Oldest", false, [2]string{"the oldest first", "the one with the newest oldest message first"}},
	{"newest", "Newest", true, [2]string{"the newest first", "the one with the oldest newest message first"}},
}

func keysOf(orders []ordering) (keys []string) {
	for _, o := range orders {
		keys = append(keys, o.key)
	}
	return keys
}

// sortingOf is the order that a page's address asks for, if there is one of that name.
func sortingOf(form url.Values, orders []ordering) sorting {
	key, reverse := strings.CutPrefix(form.Get("sort"), "-")
	if !slices.ContainsFunc(orders, func(o ordering) bool { return o.key == key }) {
		return sorting{}
	}
	return sorting{key, reverse}
}

func (s sorting) String() string {
	if s.Reverse {
		return "-" + s.Key
	}
	return s.Key
}

// words say how the rows are sorted.
func (s sorting) words(orders []ordering) string {
	for _, o := range orders {
		if o.key == s.Key {
			if s.Reverse {
				return o.words[1]
			}
			return o.words[0]
		}
	}
	return ""
}

// heading is the head of a column that rows can be sorted by.
type heading struct {
	Key, Label string
	Link       template.URL
	Sorted     string // as aria-sort has it; empty if the rows aren't sorted by it
}

// headings have links that sort, and that reverse the order. base is the rest of the query.
func (s sorting) headings(orders []ordering, base url.Values) map[string]heading {
	all := map[string]heading{}
	for _, o := range orders {
		to, sorted := sorting{Key: o.key}, ""
		if s.Key == o.key {
			to.Reverse = !s.Reverse
			if sorted = "ascending"; o.descending != s.Reverse {
				sorted = "descending"
			}
		}
		q := url.Values{"sort": {to.String()}}
		for k, v := range base {
			if k != "sort" {
				q[k] = v
			}
		}
		all[o.key] = heading{o.key, o.label, template.URL(q.Encode()), sorted}
	}
	return all
}

// sorted returns the rows in order. Rows that are equal stay as they come, and those whose value
// is unknown are last in either direction.
func sorted[T any](rows []T, s sorting, orders []ordering, unknown func(key string, row T) bool, compare func(key string, a, b T) int) []T {
	i := slices.IndexFunc(orders, func(o ordering) bool { return o.key == s.Key })
	if i < 0 {
		return rows
	}
	down := orders[i].descending != s.Reverse
	rows = slices.Clone(rows)
	slices.SortStableFunc(rows, func(a, b T) int {
		noA, noB := unknown(s.Key, a), unknown(s.Key, b)
		switch {
		case noA && noB:
			return 0
		case noA:
			return 1
		case noB:
			return -1
		case down:
			return compare(s.Key, b, a)
		}
		return compare(s.Key, a, b)
	})
	return rows
}

func unknownOfMessage(key string, m desk.Summary) bool {
	return key == "dead-lettered" && m.DeadLetteredAt.IsZero()
}

func unknownOfGroup(key string, g desk.Group) bool {
	return key == "oldest" && g.Oldest.IsZero() || key == "newest" && g.Newest.IsZero()
}

func compareMessages(key string, a, b desk.Summary) int {
	switch key {
	case "message":
		return cmp.Compare(cmp.Or(a.MessageID, a.ID), cmp.Or(b.MessageID, b.ID))
	case "dead-lettered":
		return a.DeadLetteredAt.Compare(b.DeadLetteredAt)
	case "retries":
		return cmp.Compare(a.Retries, b.Retries)
	case "replays":
		return cmp.Compare(a.Replays, b.Replays)
	}
	return cmp.Compare(a.Size, b.Size)
}

func compareGroups(key string, a, b desk.Group) int {
	switch key {
	case "queue":
		return cmp.Or(cmp.Compare(a.Queue, b.Queue), cmp.Compare(a.In, b.In))
	case "oldest":
		return a.Oldest.Compare(b.Oldest)
	case "newest":
		return a.Newest.Compare(b.Newest)
	}
	return cmp.Compare(a.Count, b.Count)
}

// knownReasons are those of this module, for a queue that no survey has read.
var knownReasons = []client.Reason{
	retry.ReasonExhausted, retry.ReasonPermanent, retry.ReasonRejected, client.ReasonPanicked, client.ReasonUndecodable, client.ReasonTooLarge, client.ReasonUnforwardable,
	retry.ReasonDeliveryLimit, retry.ReasonExpired, retry.ReasonMaxLength, retry.ReasonNoDelayQueue, retry.ReasonUnroutable, retry.ReasonUnknownQueue,
}

// reasonChoice is a reason to search for.
type reasonChoice struct {
	Value string
	Label string
}

// maxReasons bounds the reasons that are offered: a message can bring any.
const maxReasons = 50

// reasonsOf are the reasons in a queue, or in a group of it, with their counts if the last
// survey has them. chosen is among them in any case.
func (s *surveyor) reasonsOf(queue, group, chosen string) (choices []reasonChoice, surveyed *surveyed) {
	_, last, _ := s.state()
	counts := map[string]uint64{}
	if last != nil {
		for _, g := range last.groups {
			if g.In == queue && (group == "" || g.ID == group) {
				counts[string(g.Reason)] += g.Count
			}
		}
	}
	delete(counts, "") // such messages can't be searched for
	reasons := make([]string, 0, len(counts))
	for r := range counts {
		if len(r) <= maxValue && clean(r) == r {
			reasons = append(reasons, r)
		}
	}
	slices.SortFunc(reasons, func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
	reasons = reasons[:min(len(reasons), maxReasons)]
	more := ""
	if len(reasons) == 0 {
		last = nil
		for _, r := range knownReasons {
			reasons = append(reasons, string(r))
		}
	} else if last.others > 0 {
		more = "+" // some messages are in none of the groups
	}
	if chosen != "" && !slices.Contains(reasons, chosen) {
		reasons = append(reasons, chosen)
	}
	for _, r := range reasons {
		label := clean(cutAt(r, 60))
		if n := counts[r]; n > 0 {
			label += " (" + number(n) + more + ")"
		}
		choices = append(choices, reasonChoice{r, label})
	}
	return choices, last
}
