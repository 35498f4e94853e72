package schedule

import (
	"container/heap"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
)

const (
	// standby is how much later than the worker that published last the others look whether it still does.
	standby = 5 * time.Second
	// silence is how long those who publish must be overdue before workers of another version take over.
	silence = time.Minute
	// longest is how long a worker waits without reading the broker's clock, which may be set.
	longest = 10 * time.Minute
	// visitPause is the pause between two visits.
	visitPause = 100 * time.Millisecond
	// ahead is how far ahead of the broker's clock a state may be: then that clock was set back, and no time is
	// published twice. Beyond, the clock was wrong, or the state is forged.
	ahead = 25 * time.Hour
	// anchorFor is how old anchors get: who starts calls Next for all times since then.
	anchorFor = time.Hour
	// refusedFor is how long a message is published again for a time at which its target refuses it.
	refusedFor = time.Hour
	// retryPause is the longest pause before it is published again.
	retryPause = 30 * time.Second
	// alarmPause is the pause in an alarm.
	alarmPause = time.Second
	// stepsOf and stepsOfAll bound the calls of Next in one visit, for one message and together.
	stepsOf, stepsOfAll = 100_000, 2_000_000
	publishTimeout      = 30 * time.Second
	// publishBatch and publishBytes bound the messages that are in hand to be published.
	publishBatch, publishBytes = 1000, 4 << 20
)

// item is a message of a running worker.
type item struct {
	Recurring
	sum    string
	anchor time.Time // one of its times, or when it was added; next follows from it
	next   time.Time // zero: there is none
	again  time.Time // not before this time; after a failure
	tries  int       // failures in a row
	place  int       // in the heap
}

// due is when there is something to do.
func (i *item) due() time.Time {
	if i.again.After(i.next) {
		return i.again
	}
	return i.next
}

// queue is a heap of items by due.
type queue []*item

func (q queue) Len() int           { return len(q) }
func (q queue) Less(a, b int) bool { return q[a].due().Before(q[b].due()) }
func (q queue) Swap(a, b int)      { q[a], q[b] = q[b], q[a]; q[a].place, q[b].place = a, b }
func (q *queue) Push(x any)        { i := x.(*item); i.place = len(*q); *q = append(*q, i) }
func (q *queue) Pop() any {
	old := *q
	i := old[len(old)-1]
	old[len(old)-1], *q = nil, old[:len(old)-1]
	i.place = -1
	return i
}

// runner is a running worker of a group. The goroutine of run changes it.
type runner struct {
	g       Group
	version int64
	id, sum string
	log     *slog.Logger
	p       *client.Publisher[*client.Message]
	all     map[string]*item
	waiting queue // the items with a next time
	left    int   // calls of Next that are left in this visit

	started  bool      // the first visit is done
	known    state     // as last seen
	anchored time.Time // when the catalog was written
	dirty    bool      // the catalog has to be written
	// aside: workers with other messages publish.
	aside  atomic.Bool
	byName map[string]Recurring // for requests; never changed
}

// Run publishes the group's messages at their times until ctx is canceled, and then returns nil. Run it in as many
// processes as you like: one of them publishes. If that one crashes, another one takes over within 5 s or so.
//
// It needs [GroupTopology]. The user needs the permissions to read and write the group's queues, and those of
// client.Conn.BrokerTime; without these, times are those of this host's clock.
//
// An *argument.Error means that cfg is invalid, for example because Next returns a time that isn't after its
// argument. If that happens later, or Next panics, the message stops, which is logged. client.ErrNotFound means that
// the topology isn't declared. Other errors are those of client.NewPublisher and client.Conn.Consume.
func (g Group) Run(ctx context.Context, cfg RunConfig) error {
	if err := g.check(); err != nil {
		return err
	}
	r, err := g.runner(cfg)
	if err != nil {
		return err
	}
	p, err := client.NewPublisher[*client.Message](ctx, g.Conn, address.Address{}, client.PublisherConfig{Pending: publishBatch})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closePatience)
		defer cancel()
		_ = p.Close(closing)
	}()
	r.p = p
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	requests := make(chan error, 1)
	go func() {
		err := g.Conn.Consume(ctx, g.Names.RunQueue(g.Name), client.HandlerFunc(r.runNow), client.ConsumerConfig{Concurrency: 4})
		if err != nil && ctx.Err() == nil {
			cancel(err)
		}
		requests <- err
	}()
	err = r.run(ctx)
	cancel(err)
	<-requests
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		err = cause
	}
	if errors.Is(err, client.ErrNotFound) {
		return fmt.Errorf("schedule: the queues of the group %q aren't declared in this virtual host; apply schedule.GroupTopology: %w", g.Name, err)
	}
	return err
}

func (g Group) runner(cfg RunConfig) (*runner, error) {
	at := argument.Root("RunConfig")
	if len(cfg.Recurring) > maxRecurring {
		return nil, argument.At(at.Field("Recurring"), argument.CodeTooLong, len(cfg.Recurring), "are more than 20,000 messages", "make several groups")
	}
	if len(cfg.Worker) > maxGroup {
		return nil, argument.At(at.Field("Worker"), argument.CodeTooLong, cfg.Worker, "has more than 100 bytes", "use a short name, or leave it out")
	}
	if cfg.Worker == "" {
		cfg.Worker, _ = os.Hostname()
	}
	r := &runner{
		g: g, version: cfg.Version, id: strings.ToValidUTF8(cfg.Worker[:min(len(cfg.Worker), maxGroup-10)], "") + "#" + rand.Text()[:8], log: inside.Of(g.Conn).Log(),
		all: map[string]*item{}, byName: map[string]Recurring{},
	}
	sums := sha256.New()
	for n, d := range cfg.Recurring {
		here := at.Field("Recurring").Index(n)
		if err := d.check(here); err != nil {
			return nil, err
		}
		if r.all[d.Name] != nil {
			return nil, argument.At(here.Field("Name"), argument.CodeConflict, d.Name, "is the name of an earlier message", "give each message another name")
		}
		sum, err := d.sum(here)
		if err != nil {
			return nil, err
		}
		r.all[d.Name], r.byName[d.Name] = &item{Recurring: d, sum: sum, place: -1}, d
		_, _ = fmt.Fprintln(sums, sum)
	}
	r.sum = hex.EncodeToString(sums.Sum(nil)[:8])
	return r, nil
}

// run takes the token whenever something is due.
func (r *runner) run(ctx context.Context) error {
	failures, warned := 0, ""
	for ctx.Err() == nil {
		err := r.visit(ctx)
		switch {
		case err == nil:
			if failures > 0 {
				r.log.Info("hopback: recurring messages are published again", "group", r.g.Name)
			}
			failures, warned = 0, ""
			r.sleep(ctx)
			continue
		case ctx.Err() != nil:
		case errors.Is(err, client.ErrClosed):
			return err
		case !r.started && (errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrUnauthorized)):
			return err
		case err.Error() != warned:
			warned = err.Error()
			r.log.Warn("hopback: the token of a group of recurring messages can't be received; trying again", "group", r.g.Name, "error", err)
		}
		if errors.Is(err, errAlarm) {
			backoff.Sleep(ctx, alarmPause)
			continue
		}
		backoff.Sleep(ctx, inside.Of(r.g.Conn).Pause(failures))
		failures++
	}
	if r.known.By == r.id { // so that another worker doesn't wait for a sign of life
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if h, err := r.g.take(ending, nil); err == nil {
			if s := h.state; s.By == r.id {
				s.By = ""
				s.Serial++
				_ = h.change(s)
			}
			h.close(ending)
		}
	}
	return nil
}

// sleep waits until something is due.
func (r *runner) sleep(ctx context.Context) {
	for ctx.Err() == nil {
		at := r.when()
		d := longest
		if !at.IsZero() {
			now, err := r.g.now(ctx)
			if err != nil {
				return // the visit reports it
			}
			d = min(max(at.Sub(now)+time.Millisecond-1, 0).Truncate(time.Millisecond), longest)
		}
		if d <= 0 {
			backoff.Sleep(ctx, visitPause)
			return
		}
		backoff.Sleep(ctx, d)
		if at.IsZero() || d == longest {
			continue
		}
		if now, err := r.g.now(ctx); err != nil || !now.Before(at) {
			return
		}
	}
}

// when is the next visit; zero: there is nothing to do.
func (r *runner) when() time.Time {
	if r.aside.Load() {
		if r.known.Next == 0 {
			return time.Time{}
		}
		return time.Unix(0, r.known.Next).Add(silence + standby)
	}
	if len(r.waiting) == 0 {
		return time.Time{}
	}
	at := r.waiting[0].due()
	if r.known.By == r.id || r.known.By == "" {
		return at
	}
	if planned := time.Unix(0, r.known.Next); planned.After(at) {
		at = planned
	}
	return at.Add(standby)
}

// visit takes the token, publishes what is due, and returns it.
func (r *runner) visit(ctx context.Context) error {
	if _, err := r.g.now(ctx); err != nil { // it may take time, so the token isn't in hand
		return err
	}
	h, err := r.g.take(ctx, r.create)
	if err != nil {
		return err
	}
	defer h.close(ctx)
	r.left = stepsOfAll
	now, err := r.g.now(ctx)
	if err != nil {
		return err
	}
	s := h.state
	if s.Done > now.Add(ahead).UnixNano() {
		r.log.Warn("hopback: the state of a group of recurring messages is far ahead of the broker's clock; it starts over now", "group", r.g.Name, "state", time.Unix(0, s.Done).UTC())
		s.Done, s.Head = now.UnixNano(), now.UnixNano()
		r.dirty = true
	}
	if !r.serves(s, now) {
		r.aside.Store(true)
		r.known, r.started = s, true
		return nil
	}
	r.aside.Store(false)
	if r.started && r.known.Serial > s.Serial { // it was created by one who didn't know the former one, or a change was lost
		s.merge(r.known)
		s.Serial, s.Done = r.known.Serial, min(s.Done, r.known.Done)
		r.dirty = true
	}
	if !r.started || r.known.Sum != r.sum || r.known.Catalog != s.Catalog {
		r.adopt(h.body, s, now)
	}
	r.catchUp(time.Unix(0, s.Done))
	r.started = true
	overdue := len(r.waiting) > 0 && !r.waiting[0].due().After(now)
	mine := s.By == r.id || s.By == "" || s.Next == 0 || now.UnixNano() >= s.Next+standby.Nanoseconds()
	if s.Sum == r.sum && s.Version == r.version && !r.dirty && !(overdue && mine) {
		r.known = s
		return nil
	}
	failed := r.publish(ctx, s, now)
	s.Version, s.Sum, s.By = r.version, r.sum, r.id
	before := s.Done
	s.Head, s.Done = max(s.Head, now.UnixNano()), max(s.Done, now.UnixNano())
	if !failed.IsZero() {
		s.Done = max(before, failed.UnixNano()-1)
	}
	s.Next = 0
	if len(r.waiting) > 0 {
		s.Next = r.waiting[0].due().UnixNano()
	}
	s.Holds = current(s.Holds, s.Done)
	return r.write(ctx, h, s, now)
}

// write returns the token with the state s, or replaces it if the catalog has changed or is old.
func (r *runner) write(ctx context.Context, h *grip, s state, now time.Time) error {
	s.Serial = max(s.Serial, h.state.Serial) + 1
	if !r.dirty && now.Sub(r.anchored).Abs() < anchorFor {
		r.known = s
		return h.change(s)
	}
	s.Catalog = rand.Text()
	m, err := newToken(s, r.catalog())
	if err != nil {
		return err
	}
	if err := r.put(ctx, m); err != nil {
		return err
	}
	r.known, r.anchored, r.dirty = s, now, false
	return h.replaced()
}

// put publishes a token.
func (r *runner) put(ctx context.Context, m *client.Message) error {
	ctx, end := r.sending(ctx)
	defer end()
	err := r.p.Publish(ctx, m, client.PublishTo(address.Queue(r.g.Names.TokenQueue(r.g.Name))))
	return orAlarm(ctx, err)
}

// sending returns the ctx for something to publish. It ends with errAlarm in an alarm: who waited for the broker with the
// token in hand would keep Pause from changing it, and in time others would create another one.
func (r *runner) sending(ctx context.Context) (sending context.Context, end func()) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	ctx, stop := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		if inside.Of(r.g.Conn).AwaitAlarm(ctx) {
			stop(errAlarm)
		}
	})
	return ctx, func() {
		stop(nil)
		cancel()
		watching.Wait()
	}
}

var errAlarm = errors.New("the broker accepts no messages, because of a memory or disk alarm")

// orAlarm is err, or errAlarm if that is why.
func orAlarm(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errAlarm) && !errors.Is(err, errAlarm) {
		return fmt.Errorf("%w: %w", errAlarm, err)
	}
	return err
}

// create publishes a token, from memory if it has disappeared.
func (r *runner) create(ctx context.Context) error {
	s, all := r.known, r.catalog()
	if !r.started {
		at, err := r.g.now(ctx)
		if err != nil {
			return err
		}
		now := at.UnixNano()
		s, all = state{Done: now, Head: now, Serial: 1}, nil
	} else {
		r.log.Warn("hopback: the token of a group of recurring messages has disappeared; it is created again", "group", r.g.Name)
		s.Serial++
	}
	m, err := newToken(s, all)
	if err != nil {
		return err
	}
	return r.put(ctx, m)
}

// serves reports whether this worker publishes, and not those that have other messages.
func (r *runner) serves(s state, now time.Time) bool {
	switch {
	case s.Sum == "" || s.Sum == r.sum && s.Version == r.version:
		return true
	case r.version != s.Version:
		if r.version > s.Version {
			return true
		}
	case !r.started:
		return true
	}
	return s.Next != 0 && now.UnixNano() > s.Next+silence.Nanoseconds()
}

// adopt takes the anchors of the messages from the catalog.
func (r *runner) adopt(body []byte, s state, now time.Time) {
	all, err := unpack(body)
	if err != nil {
		r.log.Warn("hopback: the list of recurring messages can't be read; their times count from now on", "group", r.g.Name, "error", err)
	}
	before := map[string]entry{}
	for _, e := range all {
		before[e.Name] = e
	}
	r.waiting = r.waiting[:0]
	for _, i := range r.all {
		i.place, i.tries, i.again = -1, 0, time.Time{}
		i.anchor = now
		if e, ok := before[i.Name]; ok && e.Sum == i.sum && e.Anchor <= now.Add(ahead).UnixNano() {
			i.anchor = time.Unix(0, e.Anchor)
		} else {
			r.dirty = true
		}
		r.follow(i, i.anchor)
	}
	r.dirty = r.dirty || len(all) != len(r.all)
	if !r.dirty {
		r.anchored = now
	}
}

// follow sets the next time of an item after one of its times.
func (r *runner) follow(i *item, after time.Time) {
	at, err := next(i.Times, i.in(after))
	r.left--
	r.set(i, at, err)
}

// set sets the next time of an item.
func (r *runner) set(i *item, at time.Time, err error) {
	if err != nil {
		r.log.Error("hopback: a recurring message stops: its times can't be used", "group", r.g.Name, "name", i.Name, "error", err)
		at = time.Time{}
	}
	i.next = at
	switch {
	case at.IsZero() && i.place >= 0:
		heap.Remove(&r.waiting, i.place)
	case at.IsZero():
	case i.place >= 0:
		heap.Fix(&r.waiting, i.place)
	default:
		heap.Push(&r.waiting, i)
	}
}

// catchUp passes over times up to done, which others have published for.
func (r *runner) catchUp(done time.Time) {
	var over []*item
	for _, i := range r.waiting {
		if !i.next.After(done) {
			over = append(over, i)
		}
	}
	for _, i := range over {
		i.again, i.tries = time.Time{}, 0
		r.advance(i, done, 1)
	}
}

// advance returns the times of an item until a time, at most the last most of them, how many there are, and passes
// over them.
func (r *runner) advance(i *item, until time.Time, most int) (all []time.Time, n int) {
	left := min(stepsOf, r.left)
	had := left
	all, n, at, cut, err := timesOf(i.Times, i.next, until, most, &left)
	r.left -= had - left
	if len(all) > 0 {
		i.anchor = all[len(all)-1]
	}
	if cut {
		r.log.Warn("hopback: a recurring message has too many times to catch up with; its times count from now on", "group", r.g.Name, "name", i.Name)
		i.anchor, r.dirty = until, true
		at, err = next(i.Times, i.in(until))
	}
	r.set(i, at, err)
	return all, n
}
