package live

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

// Fleet is what [Ask] returns.
type Fleet struct {
	// Workers are sorted by host and ID.
	Workers []Worker `json:"workers"`
	// Dropped is how many further messages came that are no answers, are too large, or repeat one. Somebody may
	// have forged them.
	Dropped int `json:"dropped,omitempty"`
}

const (
	// quiet is after how long without a further answer Ask returns, and enough after how long in any case.
	quiet, enough = 500 * time.Millisecond, 2 * time.Second
	tick          = 100 * time.Millisecond

	// These bound what forged answers can do.
	maxWorkers     = 2000
	maxAnswers     = 4000
	maxAnswerBytes = 64 << 20 // of all answers
	maxCount       = 1 << 40  // so that sums don't overflow
	// maxAge is the longest age that is believed.
	maxAge = 100 * 365 * 24 * time.Hour
)

// Ask asks all workers with [With] that are connected to conn's virtual host what they do. It waits for the
// first answer, and until none has come for 500 ms, at most for 2 s. A worker that doesn't answer in time is missing. Without
// workers, the result is empty.
//
// The errors are those of [declare.Apply] and of [client.NewPublisher]. In an alarm, the broker accepts no question, and Ask
// returns an error within 10 s.
func Ask(ctx context.Context, conn *client.Conn) (Fleet, error) {
	if conn == nil {
		return Fleet{}, argument.New("conn", nil, "is nil", "use a connection from client.Connect")
	}
	ctx, asker, err := newAsker(ctx, conn)
	if err != nil {
		return Fleet{}, err
	}
	defer asker.leave()
	if err := asker.open(ctx, ask); errors.Is(err, errNobody) {
		return Fleet{Workers: []Worker{}}, nil
	} else if err != nil {
		return Fleet{}, err
	}
	return collect(ctx, asker.session)
}

// asker has a queue for answers.
type asker struct {
	conn    *client.Conn
	place   link.ReplyPlace
	queue   string
	to      string // its address
	session link.ReplySession
	cancel  context.CancelCauseFunc
}

func newAsker(ctx context.Context, conn *client.Conn) (context.Context, *asker, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	a := &asker{conn: conn, queue: answers + strings.ToLower(rand.Text()), cancel: cancel}
	var err error
	if a.to, err = address.Queue(a.queue).Build(); err == nil {
		a.place, err = inside.Of(conn).ReserveReplies(func(context.Context) { cancel(client.ErrClosed) }, func(*instrument.Stats) {})
	}
	if err != nil {
		cancel(nil)
	}
	return ctx, a, err
}

func (a *asker) leave() {
	if a.session != nil {
		a.session.Close()
	}
	a.place.Leave()
	a.cancel(nil)
}

// open declares the queue, and asks.
func (a *asker) open(ctx context.Context, ask func(ctx context.Context, conn *client.Conn, replyTo string) error) error {
	return a.within(ctx, func(asking context.Context) (err error) {
		a.session, err = a.place.Open(asking, func(oldbroker.Quirks) (link.ReplySource, error) {
			_, err := declare.Apply(asking, a.conn.Management(), declare.Topology{Queues: []declare.Queue{passingQueue(a.queue, maxAnswers, maxAnswerBytes, answerLife)}})
			return link.ReplySource{Queue: a.to, Links: 1, Credit: 200, Settled: true}, err
		})
		if err != nil {
			a.session = nil
			return err
		}
		return ask(asking, a.conn, a.to)
	})
}

// within bounds how long the broker has for requests.
func (a *asker) within(ctx context.Context, do func(context.Context) error) error {
	asking, asked := context.WithTimeoutCause(ctx, patience, errNotAsked)
	defer asked()
	err := do(asking)
	switch {
	case err == nil || errors.Is(err, errNobody):
		return err
	case ctx.Err() != nil:
		return ended(ctx)
	case context.Cause(asking) == errNotAsked:
		return errNotAsked
	}
	return err
}

var (
	errNotAsked = errors.New("hopback: the broker hasn't accepted the question within 10 s; it may have an alarm")
	errNobody   = errors.New("there is no queue for questions")
)

func ended(ctx context.Context) error {
	return fmt.Errorf("hopback: ask the workers: %w", context.Cause(ctx))
}

// cleanUp calls f with a ctx that lasts a moment, even if ctx has ended.
func cleanUp(ctx context.Context, f func(context.Context)) {
	ctx, done := context.WithTimeout(context.WithoutCancel(ctx), answerLimit)
	defer done()
	f(ctx)
}

// ask publishes a question for one answer.
func ask(ctx context.Context, conn *client.Conn, replyTo string) error {
	return askWith(ctx, conn, replyTo, nil)
}

func askWith(ctx context.Context, conn *client.Conn, replyTo string, properties map[string]any) error {
	p, err := client.NewPublisher[*client.Message](ctx, conn, address.Exchange(exchange, ""), client.PublisherConfig{NoResend: true})
	if err == nil {
		defer cleanUp(ctx, func(ctx context.Context) { _ = p.Close(ctx) })
		m := client.NewMessage(nil)
		m.Header = &client.Header{Priority: 4, TTL: questionLife}
		m.Properties.ReplyTo = &replyTo
		m.ApplicationProperties = properties
		if err = p.Publish(ctx, m); errors.Is(err, client.ErrRefused) {
			err = nil // a queue was full; the others have it
		}
	}
	if errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrUnroutable) {
		return errNobody
	}
	return err
}

// collect reads answers until no more come. It counts silent ticks, because one time limit can be over before a busy
// process has read what is there.
func collect(ctx context.Context, s link.ReplySession) (Fleet, error) {
	c := collector{now: time.Now(), known: map[string]bool{}, fleet: Fleet{Workers: []Worker{}}}
	silent := 0
	for range enough / tick {
		before := c.seen
		if err := c.read(ctx, s); err != nil {
			return Fleet{}, err
		}
		if silent++; c.seen > before || c.seen == 0 {
			silent = 0
		}
		if silent == int(quiet/tick) || c.full() {
			break
		}
	}
	slices.SortFunc(c.fleet.Workers, func(a, b Worker) int { return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.ID, b.ID)) })
	return c.fleet, nil
}

// collector reads answers that anybody may have written.
type collector struct {
	now         time.Time
	known       map[string]bool // by ID
	seen, bytes int
	fleet       Fleet
}

func (c *collector) full() bool { return c.seen >= maxAnswers || c.bytes >= maxAnswerBytes }

// read reads the answers of a tick.
func (c *collector) read(ctx context.Context, s link.ReplySession) error {
	ticking, done := context.WithTimeout(ctx, tick)
	defer done()
	for !c.full() {
		reply, err := s.Receive(ticking, 0)
		if err == nil {
			c.add(reply)
		}
		switch {
		case ctx.Err() != nil:
			return ended(ctx)
		case ticking.Err() != nil:
			return nil
		case err != nil:
			return err
		}
	}
	return nil
}

func (c *collector) add(reply link.Reply) {
	c.seen++
	c.bytes += len(reply.GetData())
	w, _, ok := read(reply, c.now)
	if !ok || c.known[w.ID] || len(c.fleet.Workers) >= maxWorkers {
		c.fleet.Dropped++
		return
	}
	c.known[w.ID] = true
	c.fleet.Workers = append(c.fleet.Workers, w)
}

// read reads an answer that came at a time, and after how long the next one comes at the latest.
func read(reply link.Reply, now time.Time) (w Worker, every time.Duration, ok bool) {
	body := reply.GetData()
	var a answer
	if len(body) > maxAnswer || json.Unmarshal(body, &a) != nil || a.ID == "" {
		return w, 0, false
	}
	w = Worker{ID: text(a.ID), Host: text(a.Host), Version: text(a.Version), Since: since(now, a.Age), More: bounded(a.More), Queues: []Queue{}, Running: []Running{}}
	for _, q := range a.Queues[:min(len(a.Queues), maxQueues)] {
		q.Name, q.Running, q.Stuck, q.Handled, q.Failed = text(q.Name), bounded(q.Running), bounded(q.Stuck), min(q.Handled, maxCount), min(q.Failed, maxCount)
		w.Queues = append(w.Queues, q)
	}
	for _, r := range a.Running[:min(len(a.Running), maxRunning)] {
		w.Running = append(w.Running, Running{text(r.Queue), text(r.ID), text(r.Type), text(r.Tenant), bounded(r.Attempt), since(now, r.Age), r.Stuck})
	}
	return w, time.Duration(min(max(a.Every, 0), (2*maxEvery).Milliseconds())) * time.Millisecond, true
}

func bounded(n int) int { return min(max(n, 0), maxCount) }

// since is when something started that has lasted for so many milliseconds.
func since(now time.Time, age int64) time.Time {
	return now.Add(-time.Duration(min(max(age, 0), maxAge.Milliseconds())) * time.Millisecond).UTC()
}
