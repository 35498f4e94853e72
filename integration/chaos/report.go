package chaos

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// FaultReport is a fault that was injected; times are milliseconds since the run began.
type FaultReport struct {
	Fault
	// From when, since when it was done, since when undone, and since when every lane
	// that had something to do was handling again.
	From     uint32 `json:"from_ms"`
	Injected uint32 `json:"injected_ms"`
	Healed   uint32 `json:"healed_ms"`
	Back     uint32 `json:"back_ms"`
	Error    string `json:"error,omitempty"`
}

// Row is a line of the table: what became of the messages that were published in
// the shares of the faults of one kind, with one strategy, on one broker.
type Row struct {
	Fault    Kind   `json:"fault"`
	Strategy string `json:"strategy"` // of the lane; "queue-deleted" for the one whose queue is deleted, which is by Republish
	Broker   string `json:"broker"`   // "4.3"
	Nodes    int    `json:"nodes"`
	Faults   int    `json:"faults"`
	Tally
	// Stall is the longest time in which no handler of the lane was called though
	// accepted messages hadn't ended.
	Stall time.Duration `json:"longest_stall_ns"`
}

func (r Row) key() string { return fmt.Sprint(r.Fault, r.Strategy, r.Broker, r.Nodes) }

// Report is what a run has counted.
type Report struct {
	Seed       uint64                `json:"seed"`
	Version    string                `json:"version"`      // "4.3"
	Full       string                `json:"full_version"` // "4.3.6"
	Nodes      int                   `json:"nodes"`
	Took       time.Duration         `json:"took_ns"`
	Faults     []FaultReport         `json:"faults"`
	Rows       []Row                 `json:"rows"`
	Late       map[string]Spread     `json:"late"` // of retries behind their delay, by lane
	Violations []Violation           `json:"violations"`
	Count      map[ViolationKind]int `json:"violation_counts"`
	// Notes are of the broker's own troubles, that nobody here can help.
	Notes []string `json:"notes,omitempty"`
	// History is the folder of the run's history, if that was kept.
	History string `json:"history,omitempty"`
}

// Good says that nothing is wrong.
func (r *Report) Good() bool { return len(r.Violations) == 0 }

func (r *run) report(schedule []Fault, faults []FaultReport, last uint32) *Report {
	rep := &Report{
		Seed: r.cfg.Seed, Version: r.cfg.Version, Full: r.site.version, Nodes: r.cfg.Nodes, Took: time.Since(r.began),
		Faults: faults, Late: map[string]Spread{}, Count: map[ViolationKind]int{},
	}
	found := func(list []Violation, count map[ViolationKind]int) {
		rep.Violations = append(rep.Violations, list...)
		for k, n := range count {
			rep.Count[k] += n
		}
	}
	for _, l := range r.lanes {
		v := l.ledger.Check(len(schedule))
		rep.Late[l.name] = v.Late
		found(v.Violations, v.Count)
		rows := map[Kind]*Row{}
		for i, f := range schedule {
			row := rows[f.Kind]
			if row == nil {
				row = &Row{Fault: f.Kind, Strategy: l.name, Broker: r.cfg.Version, Nodes: r.cfg.Nodes}
				rows[f.Kind] = row
			}
			row.add(v.Shares[i])
			if i < len(faults) {
				row.Faults++
				to := last
				if i+1 < len(faults) {
					to = before(faults[i+1].From)
				}
				row.Stall = max(row.Stall, l.ledger.Stall(before(faults[i].From), to))
			}
		}
		for _, row := range rows {
			rep.Rows = append(rep.Rows, *row)
		}
	}
	r.mu.Lock()
	found(r.trouble.list, r.trouble.count)
	rep.Notes = r.notes
	r.mu.Unlock()
	sortRows(rep.Rows)
	r.keep("report.json", rep)
	if !rep.Good() {
		r.keepHistories(rep.Violations)
	}
	return rep
}

// before is a second before a fault: a stall that begins then is mostly its doing,
// seen from the last message that came through.
func before(at uint32) uint32 { return at - min(at, 1000) }

// keepHistories writes all that was noted of the messages that something is wrong with.
func (r *run) keepHistories(violations []Violation) {
	var b bytes.Buffer
	for _, l := range r.lanes {
		ids := map[uint32]bool{}
		for _, v := range violations {
			if v.Lane == l.n {
				ids[v.ID] = true
				fmt.Fprintln(&b, v)
			}
		}
		if len(ids) == 0 {
			continue
		}
		for _, w := range l.workers {
			for i, f := range w.files {
				t := tail{r: f}
				_ = t.read(func(x record) {
					if ids[x.id] {
						fmt.Fprintf(&b, "lane %s message %d: %v worker %d life %d, attempt %d: %v, delivery count %d\n", l.name, x.id, ms(x.at), w.n, i+1, x.attempt, [...]string{"?", "failed", "handled", "died", "foreign"}[min(int(x.what), 4)], x.count)
					}
				})
			}
		}
	}
	_ = os.WriteFile(r.dir+"/stories.txt", b.Bytes(), 0o644)
}

func sortRows(rows []Row) {
	slices.SortFunc(rows, func(a, b Row) int {
		return strings.Compare(fmt.Sprint(b.Broker, a.Nodes, a.Fault, a.Strategy), fmt.Sprint(a.Broker, b.Nodes, b.Fault, b.Strategy))
	})
	slices.SortStableFunc(rows, func(a, b Row) int {
		for _, c := range []int{strings.Compare(string(a.Fault), string(b.Fault)), strings.Compare(a.Strategy, b.Strategy), strings.Compare(b.Broker, a.Broker), a.Nodes - b.Nodes} {
			if c != 0 {
				return c
			}
		}
		return 0
	})
}

// Sum adds the rows of several reports up.
func Sum(reports []*Report) []Row {
	rows := map[string]*Row{}
	for _, rep := range reports {
		for _, r := range rep.Rows {
			row := rows[r.key()]
			if row == nil {
				row = &Row{Fault: r.Fault, Strategy: r.Strategy, Broker: r.Broker, Nodes: r.Nodes}
				rows[r.key()] = row
			}
			row.add(r.Tally)
			row.Faults += r.Faults
			row.Stall = max(row.Stall, r.Stall)
		}
	}
	sum := make([]Row, 0, len(rows))
	for _, r := range rows {
		sum = append(sum, *r)
	}
	sortRows(sum)
	return sum
}

// WriteTable writes rows as text, with their sum. The number of faults of a run is
// counted once, though each of its lanes has a row for it.
func WriteTable(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "fault\tstrategy\tbroker\tnodes\tfaults\tmessages\taccepted\thandled\tdead\tduplicates\trefused\tunknown\ttaken\tlost\tlongest stall\t")
	var all Row
	counted := map[string]int{}
	line := func(r Row, broker string, nodes string) {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%.2f s\t\n", r.Fault, r.Strategy, broker, nodes, r.Faults, r.Messages, r.Accepted, r.Handled, r.Dead, r.Duplicates, r.Refused, r.Unknown, r.Taken, r.Lost, r.Stall.Seconds())
	}
	for _, r := range rows {
		line(r, r.Broker, fmt.Sprint(r.Nodes))
		all.add(r.Tally)
		all.Stall = max(all.Stall, r.Stall)
		k := fmt.Sprint(r.Fault, r.Broker, r.Nodes)
		counted[k] = max(counted[k], r.Faults)
	}
	for _, n := range counted {
		all.Faults += n
	}
	all.Fault, all.Strategy = "all", ""
	line(all, "", "")
	return t.Flush()
}

// Write writes the report as text.
func (r *Report) Write(w io.Writer) error {
	if err := WriteTable(w, r.Rows); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(r.Late)) {
		if l := r.Late[name]; l.N > 0 {
			fmt.Fprintf(w, "%s: %d retries, late by p50 %v, p99 %v, max %v\n", name, l.N, l.P50, l.P99, l.Max)
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	if r.Good() {
		_, err := fmt.Fprintf(w, "RabbitMQ %s, %d node(s), seed %d, %v: nothing lost, nothing wrong\n", r.Full, r.Nodes, r.Seed, r.Took.Round(time.Second))
		return err
	}
	fmt.Fprintf(w, "RabbitMQ %s, %d node(s), seed %d, %v: WRONG: %v\n", r.Full, r.Nodes, r.Seed, r.Took.Round(time.Second), r.Count)
	for i, v := range r.Violations {
		if i == 20 {
			fmt.Fprintf(w, "  and more\n")
			break
		}
		fmt.Fprintf(w, "  %v\n", v)
	}
	if r.History != "" {
		fmt.Fprintf(w, "  the history is in %s\n", r.History)
	}
	return nil
}
