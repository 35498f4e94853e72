package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/schedule"
)

// Waiting is a trial: messages are parked, and callers cancel, run, and reschedule them close to
// their times, while connections and the broker are killed. Every answer is checked against what
// the handlers have seen.
type Waiting struct {
	// Messages wait, and Claimers make the calls.
	Messages, Claimers int
	// Due is how long a message waits at most.
	Due time.Duration
	// Connect opens a connection that Cut may cut.
	Connect func() *client.Conn
	Cut     func()
	// Kill kills the broker and starts it again; nil: not.
	Kill func()
	// CutEvery and KillEvery are the means of the times between faults.
	CutEvery, KillEvery time.Duration
	// Scheduled has the messages wait for schedule.Dispatch, not for the handler.
	Scheduled bool
	// ParkedNow is how many messages are parked in a queue; nil if the broker can't tell.
	ParkedNow func(queue string) int
	// Slack is how late a message may come that is ready.
	Slack time.Duration

	// Admin is a connection of Connect, once Run has returned.
	Admin *client.Conn

	mu      sync.Mutex
	all     map[string]*waitingMessage
	noise   map[string]int
	answers map[string]int
	wrong   []string
}

// waitingMessage is what is known of one.
type waitingMessage struct {
	parked  bool
	handled []time.Time
	first   time.Time // its first time
	due     time.Time
	calls   []waitingCall
}

type waitingCall struct {
	op         string
	began, end time.Time
	until      time.Time // of a reschedule
	n          int
	err        error
}

func (w *Waiting) handle(_ context.Context, d *client.Delivery) error {
	id := string(d.Message().GetData())
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.all[id]
	if m == nil {
		w.noise[id]++
		return nil
	}
	if _, again := d.Parked(); again || w.Scheduled {
		m.handled = append(m.handled, time.Now())
		return nil
	}
	if !m.parked {
		m.parked, m.due = true, time.Now().Add(w.Due/10+rand.N(w.Due))
		m.first = m.due
	}
	return client.Park{Token: id, Until: m.due}
}

// call makes one call, and notes its answer.
func (w *Waiting) call(ctx context.Context, c *client.Claimer, id string) {
	x := waitingCall{op: []string{"cancel", "run now", "reschedule"}[rand.N(3)], began: time.Now()}
	switch x.op {
	case "cancel":
		x.n, x.err = c.Cancel(ctx, id)
	case "run now":
		x.n, x.err = c.RunNow(ctx, id)
	default:
		x.until = time.Now().Add(w.Due/10 + rand.N(w.Due))
		x.n, x.err = c.Reschedule(ctx, id, x.until)
	}
	x.end = time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.all[id]
	m.calls = append(m.calls, x)
	if x.op == "reschedule" && x.n > 0 {
		m.due = x.until
	}
	kind := "none"
	switch {
	case errors.Is(x.err, client.ErrOutcomeUnknown):
		kind = "unknown"
	case errors.Is(x.err, client.ErrConnectionLost):
		kind = "lost"
	case x.err != nil:
		kind = x.err.Error()
	case x.n == 1:
		kind = "done"
	case x.n > 1:
		kind = "several"
	}
	w.answers[x.op+": "+kind]++
}

// check compares a message's calls with what has become of it.
func (w *Waiting) check(id string, m *waitingMessage) {
	wrong := func(format string, args ...any) {
		text := fmt.Sprintf(format, args...)
		for _, x := range m.calls {
			text += fmt.Sprintf("\n   %s %v to %v until %v: %d %v", x.op, x.began.Format(time.StampMilli), x.end.Format(time.StampMilli), x.until.Format(time.StampMilli), x.n, x.err)
		}
		w.wrong = append(w.wrong, id+": "+text+fmt.Sprintf("\n   due %v, handled %v", m.due.Format(time.StampMilli), m.handled))
	}
	canceled, maybe, back := false, false, false // back: Dispatch may have parked it again
	due, certain := m.first, true                // certain: it waits until due
	for _, x := range m.calls {
		switch {
		case x.err != nil: // it is canceled, as before, or early
			maybe = maybe || x.op == "cancel" && errors.Is(x.err, client.ErrOutcomeUnknown)
			certain, back = false, w.Scheduled
		case x.n == 0:
			// Nothing waited, so it has come, or comes soon.
			if at := x.end.Add(w.Slack); !canceled && !maybe && !back && (len(m.handled) == 0 || m.handled[0].After(at)) {
				wrong("the answer was that nothing waits, and it wasn't handled within %v", w.Slack)
				return
			}
			certain = false
		case x.op == "cancel":
			canceled = true
		case x.op == "run now":
			if at := x.end.Add(w.Slack); len(m.handled) == 0 || m.handled[0].After(at) {
				wrong("run now had no effect within %v", w.Slack)
				return
			}
			certain = false
		default:
			due = x.until
			if certain = true; len(m.handled) > 0 && m.handled[0].Before(x.end) {
				wrong("it was rescheduled after it was handled")
				return
			}
		}
	}
	switch {
	case canceled && len(m.handled) > 0:
		wrong("canceled and handled")
	case !canceled && !maybe && len(m.handled) == 0:
		wrong("never handled")
	case !canceled && certain && len(m.handled) > 0 && m.handled[0].Before(due.Add(-5*time.Millisecond)):
		wrong("handled before %v", due.Format(time.StampMilli))
	case !canceled && certain && len(m.handled) > 0 && m.handled[0].After(due.Add(w.Slack)):
		wrong("handled long after %v", due.Format(time.StampMilli))
	}
}

// Run runs the trial.
func (w *Waiting) Run(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w.all, w.noise, w.answers = map[string]*waitingMessage{}, map[string]int{}, map[string]int{}
	admin := w.Connect()
	w.Admin = admin
	queue := Quorum("orders", declare.Drop())
	queue.DeliveryLimit = declare.Unlimited
	_, err := declare.Apply(ctx, admin.Management(), QueueOf(queue))
	require.NoError(t, err)
	consuming, stop := context.WithCancel(ctx)
	defer stop()
	var consumers sync.WaitGroup
	for range 2 {
		conn := w.Connect()
		consumers.Go(func() {
			assert.NoError(t, conn.Consume(consuming, "orders", client.HandlerFunc(w.handle), client.ConsumerConfig{NoIsolation: true}))
		})
	}
	p, err := client.NewPublisher[*client.Message](ctx, admin, address.Queue("orders"), client.PublisherConfig{})
	require.NoError(t, err)
	var ids []string
	var messages []*client.Message
	for i := range w.Messages {
		ids = append(ids, fmt.Sprintf("order-%d", i))
		m := client.NewMessage([]byte(ids[i]))
		m.Properties = &client.Properties{MessageID: ids[i]}
		messages = append(messages, m)
		w.all[ids[i]] = &waitingMessage{}
	}
	waits := "orders"
	if w.Scheduled {
		waits = schedule.Names{}.ClaimableQueue()
		w.schedule(consuming, t, &consumers, ids, messages)
	} else {
		require.NoError(t, p.PublishAll(ctx, messages))
	}
	for !w.allParked(waits) { // and no fault before
		time.Sleep(w.Due / 1000)
	}

	var claimers []*client.Claimer
	for range w.Claimers {
		c, err := client.NewClaimer(ctx, w.Connect(), waits)
		require.NoError(t, err)
		claimers = append(claimers, c)
	}

	faults, noFaults := context.WithCancel(ctx)
	var injecting sync.WaitGroup
	every := func(mean time.Duration, do func()) {
		injecting.Go(func() {
			for pause(faults, rand.N(2*mean)) {
				do()
			}
		})
	}
	every(w.CutEvery, w.Cut)
	if w.Kill != nil {
		every(w.KillEvery, w.Kill)
	}
	noise := 0
	every(w.CutEvery/10, func() { // a backlog, and forged annotations
		noise++
		_ = p.Publish(faults, client.NewMessage(fmt.Appendf(nil, "noise-%d", noise)), func(m *client.Message) {
			m.Annotations = map[any]any{annotation.DeferralToken: ids[rand.N(len(ids))], annotation.DeliveryTime: time.Now().UnixMilli()}
		})
	})
	w.makeCalls(ctx, claimers, ids)
	noFaults()
	injecting.Wait()
	time.Sleep(time.Until(w.last()) + w.Slack)
	stop()
	consumers.Wait()
	w.verdict(t, noise)
}

// schedule has the messages wait for schedule.Dispatch, which runs until ctx ends.
func (w *Waiting) schedule(ctx context.Context, t *testing.T, dispatching *sync.WaitGroup, ids []string, messages []*client.Message) {
	topology, err := schedule.ClaimableTopology(schedule.Names{})
	require.NoError(t, err)
	_, err = declare.Apply(ctx, w.Admin.Management(), topology)
	require.NoError(t, err)
	for range 2 {
		conn := w.Connect()
		dispatching.Go(func() {
			assert.NoError(t, schedule.Dispatch(ctx, conn, schedule.DispatchConfig{Claimable: true}))
		})
	}
	later, err := schedule.NewPublisher[*client.Message](ctx, w.Admin, address.Queue("orders"), schedule.PublisherConfig{Claimable: true})
	require.NoError(t, err)
	all, err := later.PublishAll(ctx, messages, func(*client.Message) schedule.When { return schedule.After(w.Due/10 + rand.N(w.Due)) })
	require.NoError(t, err)
	for i, id := range ids {
		require.Equal(t, id, all[i].ID)
		w.all[id].first, w.all[id].due = all[i].Due, all[i].Due
	}
}

// makeCalls makes one to three calls about each message, and waits for their answers.
func (w *Waiting) makeCalls(ctx context.Context, claimers []*client.Claimer, ids []string) {
	var callers sync.WaitGroup
	for i, id := range ids {
		callers.Go(func() {
			for call := range 1 + rand.N(3) {
				w.mu.Lock()
				left := time.Until(w.all[id].due)
				w.mu.Unlock()
				switch {
				case call > 0 && rand.N(2) == 0: // at once
				case rand.N(2) == 0: // in a race with its time
					pause(ctx, left-1500*time.Millisecond+rand.N(2*time.Second))
				default:
					pause(ctx, rand.N(max(left, time.Second)))
				}
				w.call(ctx, claimers[i%len(claimers)], id)
			}
		})
	}
	callers.Wait()
}

// last is when the last message is due.
func (w *Waiting) last() time.Time {
	last := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.all {
		for _, at := range append([]time.Time{m.due}, untils(m.calls)...) {
			if at.After(last) {
				last = at
			}
		}
	}
	return last
}

// allParked reports whether all messages are parked. A broker's count is late, so it isn't asked.
func (w *Waiting) allParked(queue string) bool {
	switch {
	case w.ParkedNow != nil:
		return w.ParkedNow(queue) == w.Messages
	case w.Scheduled:
		time.Sleep(w.Due / 12)
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.all {
		if !m.parked {
			return false
		}
	}
	return true
}

func untils(calls []waitingCall) (all []time.Time) {
	for _, x := range calls {
		all = append(all, x.until)
	}
	return all
}

func (w *Waiting) verdict(t *testing.T, noise int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	twice, calls := 0, 0
	for id, m := range w.all {
		w.check(id, m)
		calls += len(m.calls)
		if len(m.handled) > 1 {
			twice++
		}
	}
	var lines []string
	for what, n := range w.answers {
		lines = append(lines, fmt.Sprintf("%7d %s", n, what))
	}
	slices.Sort(lines)
	t.Logf("%d messages, %d calls, %d handled more than once, %d of noise\n%s", len(w.all), calls, twice, noise, strings.Join(lines, "\n"))
	for i, text := range w.wrong {
		if i < 10 {
			t.Error(text)
		}
	}
	assert.Zero(t, len(w.wrong), "wrong answers")
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
