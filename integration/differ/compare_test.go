package differ

import (
	"context"
	"fmt"
	"maps"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hopback/hopback/hopbacktest"
)

// versus is a real broker, which is compared with the one in memory of its version.
type versus struct {
	version string // such as "4.3.6"
	dial    func() (net.Conn, error)
	vhosts  []string
	hang    bool // let queues hang
	runs    atomic.Int64
	slow    sync.Mutex // held to delete what isn't deleted in a hurry
}

// result is what two brokers came to.
type result struct {
	sequence     sequence
	memory, real []step
	at           int // of the operation in which they differ, -1 if none
	err          error
}

var started = fmt.Sprintf("%x", time.Now().UnixMilli()&0xffffff)

// done is how many operations of the sequence were carried out, before one in which a queue would
// have hung.
func (r result) done() int64 { return int64(min(len(r.sequence), len(r.memory))) }

// compare runs a sequence in memory, and then with the real broker.
func (v *versus) compare(t *testing.T, s sequence, patience time.Duration) result {
	n := v.runs.Add(1)
	vhost, prefix := v.vhosts[int(n)%len(v.vhosts)], fmt.Sprintf("d%s-%d-", started, n)
	r := result{sequence: s, at: -1}
	synctest.Test(t, func(t *testing.T) {
		b, err := hopbacktest.New(hopbacktest.Config{Version: v.version, DeadLetterRetry: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		b.AddVHost(vhost)
		w := newWorld(func() (net.Conn, error) { return b.Dial(context.Background(), "tcp", "") }, vhost, prefix)
		w.quiet, w.hang = synctest.Wait, v.hang
		w.hangs = func(queue string) bool {
			return slices.ContainsFunc(b.Events(), func(e hopbacktest.Event) bool { return e.Kind == "queue hangs" && e.Queue == queue })
		}
		r.memory, r.err = w.play(s, nil)
	})
	if r.err != nil {
		r.err = fmt.Errorf("in memory: %w", r.err)
		return r
	}
	w := newWorld(v.dial, vhost, prefix)
	w.patience, w.hang = patience, v.hang
	w.slowly = func(f func()) {
		v.slow.Lock()
		defer v.slow.Unlock()
		f()
	}
	r.real, r.err = w.play(s, r.memory)
	for i := range r.real {
		if differ(r.memory[i], r.real[i]) {
			r.at = i
			break
		}
	}
	return r
}

// shrink finds a shorter sequence that still differs.
func (v *versus) shrink(t *testing.T, worst result) result {
	end := time.Now().Add(2 * time.Minute)
	differs := func(s sequence) bool {
		r := v.compare(t, s, 3*time.Second)
		if r.err != nil || r.at < 0 || known(v.version, r) != nil {
			return false
		}
		r.sequence = s[:min(r.at+1, len(s))]
		worst = r
		return true
	}
	differs(worst.sequence)
	for fewer := true; fewer; {
		fewer = false
		for n := max(1, len(worst.sequence)/2); n > 0; n /= 2 {
			for i := len(worst.sequence) - n; i >= 0 && time.Now().Before(end); i -= n {
				if i+n <= len(worst.sequence) && differs(slices.Delete(slices.Clone(worst.sequence), i, i+n)) {
					fewer = true
				}
			}
		}
		for i := 0; i < len(worst.sequence); i++ {
			for _, op := range simpler(worst.sequence[i]) {
				s := slices.Clone(worst.sequence)
				if s[i] = op; time.Now().Before(end) && differs(s) {
					fewer = true
					break
				}
			}
		}
	}
	return worst
}

// brief is the operation in which they differ, and how.
func (r result) brief() string {
	if r.err != nil || r.at < 0 {
		return fmt.Sprint(r.err)
	}
	op := "at the end"
	if r.at < len(r.sequence) {
		op = strings.TrimSpace(r.sequence[r.at : r.at+1].String())
	}
	return fmt.Sprintf("operation %d, %s memory: %q, RabbitMQ: %q", r.at, op, r.memory[r.at].lines(), r.real[r.at].lines())
}

// String has the sequence, and what both have said to the operation in which they differ.
func (r result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", r.sequence)
	if r.err != nil {
		fmt.Fprintf(&b, "%v\n", r.err)
	}
	for i := max(0, r.at-2); i < len(r.real); i++ {
		m, real := r.memory[i].lines(), r.real[i].lines()
		name := "at the end"
		if i < len(r.sequence) {
			name = sequence{r.sequence[i]}.String()
		}
		fmt.Fprintf(&b, "%s", strings.TrimSpace(name)+"\n")
		for _, l := range m {
			if slices.Contains(real, l) {
				fmt.Fprintf(&b, "    both      %s\n", l)
			} else {
				fmt.Fprintf(&b, "  > memory    %s\n", l)
			}
		}
		for _, l := range real {
			if !slices.Contains(m, l) {
				fmt.Fprintf(&b, "  > RabbitMQ  %s\n", l)
			}
		}
	}
	return b.String()
}

func (s step) lines() (all []string) {
	for _, stream := range slices.Sorted(maps.Keys(s.logged)) {
		for i, l := range s.logged[stream] {
			all = append(all, fmt.Sprintf("%s (%d): %s", stream, i, l))
		}
	}
	for _, q := range slices.Sorted(maps.Keys(s.counts)) {
		all = append(all, q+": "+s.counts[q])
	}
	return all
}

// simpler are variants of an operation in which something is left out.
func simpler(op operation) (all []operation) {
	for _, v := range without(reflect.ValueOf(op)) {
		all = append(all, v.Interface().(operation))
	}
	return all
}

func without(v reflect.Value) (all []reflect.Value) {
	with := func(i int, field reflect.Value) {
		c := reflect.New(v.Type()).Elem()
		c.Set(v)
		c.Field(i).Set(field)
		all = append(all, c)
	}
	for i := range v.NumField() {
		f := v.Field(i)
		switch a, isArgs := f.Interface().(args); {
		case f.IsZero():
		case isArgs:
			for _, k := range sorted(a) {
				c := maps.Clone(a)
				delete(c, k)
				if len(c) == 0 {
					c = nil
				}
				with(i, reflect.ValueOf(c))
			}
		case f.Kind() == reflect.Struct:
			for _, c := range without(f) {
				with(i, c)
			}
		case f.Kind() == reflect.String && v.Type() != reflect.TypeFor[message]():
		default:
			with(i, reflect.Zero(f.Type()))
		}
	}
	return all
}
