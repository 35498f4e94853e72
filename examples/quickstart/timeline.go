package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/retry"
)

// timeline prints events as they happen, and keeps track of the orders. Its methods are safe for
// concurrent use.
type timeline struct {
	start    time.Time
	colours  bool
	allEnded chan struct{} // closed when every order has ended

	mu       sync.Mutex
	out      io.Writer
	accounts []*account
	open     int // accounts that haven't ended
}

// account is the state of one order.
type account struct {
	order      Order
	attempts   int
	hops       []hop
	end        string // empty until it has ended
	deadLetter *retry.DeadLetter
}

// hop is one stay in a delay queue.
type hop struct {
	asked, had time.Duration
	began      time.Time
}

func newTimeline(out io.Writer, orders []Order) *timeline {
	t := &timeline{start: time.Now(), colours: coloured(out), out: out, open: len(orders), allEnded: make(chan struct{})}
	for _, o := range orders {
		t.accounts = append(t.accounts, &account{order: o})
	}
	return t
}

// watch is a middleware around retry.With: it gets what retry.With decided.
func (t *timeline) watch(h client.Handler) client.Handler {
	return client.Wrap(h, func(ctx context.Context, d *client.Delivery) error {
		err := h.Handle(ctx, d)
		t.handled(d, err)
		return err
	})
}

// handled prints one attempt and its result.
func (t *timeline) handled(d *client.Delivery, err error) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.account(d)
	if a == nil {
		return
	}
	a.attempts++
	retries, waited := retry.Count(d.Message()), ""
	if retries > 0 && retries <= len(a.hops) {
		h := &a.hops[retries-1]
		h.had = d.Received().Sub(h.began)
		waited = human(h.asked) + " → " + human(h.had)
	}
	what, so, colour := "charged", "✓ accepted", green
	switch o := client.OutcomeOf(err).(type) {
	case nil:
		t.ended(a, "accepted")
	case client.Forward:
		h := hop{began: now, asked: delayOf(o)}
		a.hops = append(a.hops[:min(retries, len(a.hops))], h)
		what, so, colour = o.Err.Error(), "↻ retry in "+human(h.asked), yellow
	case client.DeadLetter:
		what, so, colour = o.Err.Error(), "✗ dead letter: "+string(o.Reason), red
	default:
		what, so, colour = err.Error(), "back to the queue", yellow
	}
	t.line(fmt.Sprintf("%7.3f  %s  %s  %s  %s  ", now.Sub(t.start).Seconds(),
		cell(a.order.ID, 5), cell(strconv.Itoa(retries+1), 7), cell(waited, 16), cell(what, 28)), colour, so)
}

// delayOf reads the delay in the routing key of the retry copy: delay.<milliseconds>.<queue>.
func delayOf(f client.Forward) time.Duration {
	_, rest, _ := strings.Cut(f.To.RoutingKey(), ".")
	ms, _, _ := strings.Cut(rest, ".")
	n, _ := strconv.ParseInt(ms, 10, 64)
	return time.Duration(n) * time.Millisecond
}

// dead is the handler of the dead-letter queue.
func (t *timeline) dead(_ context.Context, d *client.Delivery) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.account(d)
	if a == nil {
		return nil
	}
	death := retry.DeadLetterOf(d.Message())
	a.deadLetter = &death
	t.ended(a, "dead letter: "+string(death.Reason))
	return nil
}

// account finds the order by its message-id: a body may be unreadable.
func (t *timeline) account(d *client.Delivery) *account {
	if p := d.Message().Properties; p != nil {
		for _, a := range t.accounts {
			if p.MessageID == a.order.ID {
				return a
			}
		}
	}
	t.line("", yellow, "ignored: a message that this run didn't send")
	return nil
}

// ended records where an order ended up. A duplicate, such as after a lost connection, changes
// nothing.
func (t *timeline) ended(a *account, how string) {
	if a.end != "" {
		return
	}
	a.end = how
	if t.open--; t.open == 0 {
		close(t.allEnded)
	}
}

func (t *timeline) declared(b client.Broker, p retry.Policy, queue string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var delays []string
	ladder, _ := p.QueueDelays() // the policy was validated before
	for _, d := range ladder {
		delays = append(delays, human(d))
	}
	t.line("", bold, fmt.Sprintf("hopback quickstart with %s %s", b.Product, b.Version))
	t.line("", "", fmt.Sprintf("%s: %d retries, after %s; then to %s", queue, p.MaxRetries, strings.Join(delays, ", "), p.Names.DeadLetterQueue(queue)))
}

func (t *timeline) published(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line("", "", fmt.Sprintf("%d orders published, each confirmed by the broker", n))
	t.line("", "", "")
	t.line("", bold, "   time  order  attempt  delay → actual    what happened                 result")
}

// tables prints where everything ended up. The error names orders that are unaccounted for.
func (t *timeline) tables(queue string, left uint64, why error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line("", "", "")
	t.line("", bold, "order  what happens                attempts  delay→actual in ms             result")
	ends := map[string]int{}
	var missing []string
	for _, a := range t.accounts {
		var hops []string
		for _, h := range a.hops {
			had := "?"
			if h.had > 0 {
				had = strconv.FormatInt(h.had.Milliseconds(), 10)
			}
			hops = append(hops, fmt.Sprintf("%d→%s", h.asked.Milliseconds(), had))
		}
		end, colour := a.end, green
		switch {
		case end == "":
			end, colour = "UNACCOUNTED FOR", red
			missing = append(missing, a.order.ID)
		case a.deadLetter != nil:
			ends["dead"]++
			colour = red
		default:
			ends["accepted"]++
		}
		t.line(fmt.Sprintf("%s  %s  %s  %s  ", cell(a.order.ID, 5), cell(a.order.History, 26),
			cell(strconv.Itoa(a.attempts), 8), cell(strings.Join(hops, ", "), 29)), colour, end)
	}
	t.line("", "", "")
	t.line("", "", "In "+queue+":")
	t.line("", bold, "order  reason       retries  error")
	for _, a := range t.accounts {
		if l := a.deadLetter; l != nil {
			t.line(fmt.Sprintf("%s  %s  %s  %s", cell(a.order.ID, 5), cell(string(l.Reason), 11),
				cell(strconv.Itoa(l.Retries), 7), l.Error), "", "")
		}
	}
	t.line("", "", "")
	n := len(t.accounts)
	t.line("", bold, fmt.Sprintf("%d of %d orders accounted for in %.1f s: %d accepted, %d dead-lettered, %d left in queues",
		n-len(missing), n, time.Since(t.start).Seconds(), ends["accepted"], ends["dead"], left))
	switch {
	case len(missing) > 0:
		return fmt.Errorf("unaccounted for: %s (%w)", strings.Join(missing, ", "), why)
	case left > 0:
		return errors.New("messages were left in the queues")
	}
	return nil
}

// logger shows what the client logs, such as a lost connection, in the timeline.
func (t *timeline) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler((*logWriter)(t), &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == "queue" || a.Key == "stack" {
				return slog.Attr{}
			}
			return a
		},
	}))
}

type logWriter timeline

func (w *logWriter) Write(b []byte) (int, error) {
	t := (*timeline)(w)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line(fmt.Sprintf("%7.3f  ", time.Since(t.start).Seconds()), dim, string(bytes.TrimSpace(b)))
	return len(b), nil
}

// columns is how wide the output gets.
const columns = 100

// The colours, as ANSI escape sequences.
const (
	bold   = "\x1b[1m"
	dim    = "\x1b[2m"
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	reset  = "\x1b[0m"
)

// line writes one line immediately: plain, and then rest in a color.
func (t *timeline) line(plain, colour, rest string) {
	rest = clip(rest, columns-utf8.RuneCountInString(plain))
	if t.colours && colour != "" {
		rest = colour + rest + reset
	}
	_, _ = fmt.Fprintln(t.out, strings.TrimRight(plain+rest, " "))
}

// coloured reports whether out is a terminal and the user hasn't disabled colors
// (https://no-color.org).
func coloured(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// cell is s in a column of the given width.
func cell(s string, width int) string {
	s = clip(s, width)
	return s + strings.Repeat(" ", width-utf8.RuneCountInString(s))
}

// clip cuts s to a width, and removes control characters: the text may come from a message.
func clip(s string, width int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, s)
	switch {
	case width <= 0:
		return ""
	case utf8.RuneCountInString(s) > width:
		return string([]rune(s)[:width-1]) + "…"
	}
	return s
}

// human is d as "300 ms" or "1.503 s".
func human(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return strconv.FormatFloat(float64(d.Milliseconds())/1000, 'f', -1, 64) + " s"
}
