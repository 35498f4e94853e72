package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/retry"
)

const (
	workQueue    = "orders"
	deadQueue    = workQueue + ".dead"
	foreignQueue = "foreign" // of another team
	workerName   = "worker"
	limit        = 5 // the work queue's delivery limit
	maxBody      = 64 << 10
	maxMessages  = 10_000  // of a run, with all its labs
	maxEntries   = 600_000 // of all messages
	maxEvents    = 200_000 // between two calls of catchUp
	maxLines     = 12
	startTimeout = time.Minute
	// latency of the network. So what happens at once takes some virtual time, and a page that runs thousands of
	// messages can draw in between.
	latency = time.Millisecond
)

// lab is a RabbitMQ in memory with a publisher and a worker, and what happened to their messages.
// The page and the tests run the same one: everything in it is the product's own code.
type lab struct {
	policy   retry.Policy
	topology declare.Topology
	steps    []step

	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	broker  *hopbacktest.Broker
	url     string
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	cut     func() // cuts the worker's connection, as a crash of its process does; the client reconnects
	logger  *slog.Logger
	conn    *client.Conn
	publish *client.Publisher[string]
	began   time.Time

	mu       sync.Mutex
	read     uint64 // the number of the last of the broker's events that is in messages
	most     int    // how many messages there may be
	messages []*message
	byID     map[string]*message
	exported []byte     // the broker's definitions when the lab had started
	noted    []*message // with results that aren't in their entries yet
	entries  int        // of all messages
	lines    []string   // what the client and the lab have logged, at most maxLines
	foreign  []string   // the exchanges that the foreign queue is bound to
	stop     func()     // stops the worker; nil if none runs
	alarm    bool
	problem  string // why the lab can't continue
}

// message is a published message, and where it is.
type message struct {
	ID      string  `json:"id"`
	Where   string  `json:"where"` // a queue, or "" if no queue has it; not the foreign queue, which gets copies
	State   string  `json:"state"` // "waits", "delivered", "handled", "dead", "lost", or "refused"; "" before the broker has it
	Entries []entry `json:"entries"`

	queues    []string // that have it, or a copy, the latest one last
	leaves    string   // a queue that has it until its dead-letter target has it
	reasoned  bool     // the reason why it is a dead letter is in Entries
	results   []entry  // of attempts, that aren't in Entries yet
	delivered bool     // the last event is a delivery
	succeeded bool     // the last attempt has
}

// entry is one event of a message: of the broker, or the result of an attempt.
type entry struct {
	At    int64  `json:"at"` // in ms since the lab began
	Kind  string `json:"kind"`
	Queue string `json:"queue,omitempty"`
	Text  string `json:"text,omitempty"`
}

// newLab starts one. Bad settings are an *argument.Error.
func newLab(ctx context.Context, s settings) (*lab, error) {
	l, err := prepare(ctx, s)
	if err != nil {
		return nil, err
	}
	if l.broker, err = hopbacktest.New(hopbacktest.Config{MaxEvents: maxEvents}); err != nil {
		return nil, err
	}
	l.broker.SetLatency(latency)
	l.url, l.dial = l.broker.URL(), l.broker.Dial
	l.cut = func() {
		for _, c := range l.broker.Connections() {
			if strings.HasPrefix(c.Info().Container, workerName) {
				c.Cut()
			}
		}
	}
	start, cancel := context.WithTimeout(l.ctx, startTimeout)
	defer cancel()
	if err = l.connect(start); err == nil {
		l.startWorker()
		// The first message doesn't wait for the worker.
		err = l.broker.Queue(workQueue).Await(start, func(c hopbacktest.Counts) bool { return c.Consumers > 0 })
	}
	if err == nil {
		l.exported, err = l.definitions(http.MethodGet, nil)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// prepare returns a lab without a broker.
func prepare(ctx context.Context, s settings) (l *lab, err error) {
	l = &lab{most: maxMessages, byID: map[string]*message{}, began: time.Now()}
	if l.policy, _, l.steps, err = s.parse(); err != nil {
		return nil, err
	}
	if l.topology, err = retry.Topology(l.policy, declare.QuorumQueue{Name: workQueue, DeliveryLimit: limit}); err != nil {
		return nil, err
	}
	l.logger = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelWarn}))
	l.ctx, l.cancel = context.WithCancel(ctx)
	return l, nil
}

// Write adds a line of the log, with the lab's time.
func (l *lab) Write(line []byte) (int, error) {
	_, text, _ := strings.Cut(strings.TrimSpace(string(line[:min(len(line), 1000)])), " ")
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%.1f s  %s", float64(l.since(time.Now()))/1000, strings.ToValidUTF8(text, "")))
	l.lines = l.lines[max(0, len(l.lines)-maxLines):]
	return len(line), nil
}

func (l *lab) open(ctx context.Context, name string) (*client.Conn, error) {
	return client.Connect(ctx, l.url, client.Config{Name: name, Logger: l.logger, Dial: l.dial})
}

// connect declares the topology, and opens the publisher.
func (l *lab) connect(ctx context.Context) (err error) {
	if l.conn, err = l.open(ctx, "publisher"); err != nil {
		return err
	}
	if err := l.apply(ctx); err != nil {
		return err
	}
	l.publish, err = client.NewPublisher[string](ctx, l.conn, address.Queue(workQueue), client.PublisherConfig{})
	return err
}

// close ends everything that the lab has started.
func (l *lab) close() {
	l.stopWorker()
	l.cancel()
	l.wg.Wait()
	if l.conn != nil {
		closeConn(l.conn)
	}
	l.broker.Close()
}

func closeConn(conn *client.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	_ = conn.Close(ctx)
}

// startWorker starts a worker if none runs.
func (l *lab) startWorker() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(l.ctx)
	l.stop = cancel
	l.wg.Go(func() {
		conn, err := l.open(ctx, workerName)
		if err == nil {
			defer closeConn(conn)
			err = conn.Consume(ctx, workQueue, retry.With(l.policy)(client.HandlerFunc(l.handle)), client.ConsumerConfig{})
		}
		if err != nil && ctx.Err() == nil {
			l.stopWorker()
			l.logger.Error("the worker has stopped", "error", err)
		}
	})
}

// stopWorker stops the worker if one runs. Its handlers end first.
func (l *lab) stopWorker() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop != nil {
		l.stop()
		l.stop = nil
	}
}

// send publishes a body n times, and returns before the broker has confirmed it. What is beyond the
// bounds is an *argument.Error.
func (l *lab) send(body string, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case len(body) > maxBody:
		return argument.New("message", nil, fmt.Sprintf("has more than %d bytes", maxBody), "publish a shorter one")
	case n < 1 || n > l.most-len(l.messages):
		return argument.New("number", n, fmt.Sprintf("isn't between 1 and %d, which are left of the %d messages that a run may have", l.most-len(l.messages), l.most), "publish fewer, or start again")
	}
	sent := make([]*message, n)
	for i := range sent {
		sent[i] = &message{ID: strconv.Itoa(len(l.messages) + 1), Entries: []entry{}}
		l.messages = append(l.messages, sent[i])
		l.byID[sent[i].ID] = sent[i]
	}
	l.wg.Go(func() {
		next := 0
		err := l.publish.PublishAll(l.ctx, slices.Repeat([]string{body}, n), func(_ string, out *client.Message) {
			out.Properties.MessageID = sent[next].ID
			next++
		})
		if batch := new(client.BatchError); errors.As(err, &batch) && l.ctx.Err() == nil {
			for _, f := range batch.Failed {
				l.note(sent[f.Index].ID, "refused", f.Err.Error())
			}
		}
	})
	return nil
}

// handle calls the handler, and adds its result to the message's history.
func (l *lab) handle(ctx context.Context, d *client.Delivery) (err error) {
	id, _ := d.Message().Properties.MessageID.(string)
	attempt := fmt.Sprintf("attempt %d", retry.Attempt(ctx))
	defer func() {
		switch v := recover(); {
		case v != nil:
			l.note(id, "panicked", fmt.Sprintf("%s: %v", attempt, v))
			panic(v)
		case errors.Is(err, errCrash):
			l.note(id, "crashed", attempt+": "+err.Error())
			l.cut()
			err = client.Requeue{}
		case err != nil:
			l.note(id, "failed", attempt+": "+err.Error())
		default:
			l.note(id, "succeeded", attempt)
		}
	}()
	return l.run(ctx)
}

// note adds a result, which catchUp puts between the events of the broker. To catch up here, for each attempt, would take
// time with the square of the number of messages.
func (l *lab) note(id, kind, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.byID[id]; m != nil {
		if len(m.results) == 0 {
			l.noted = append(l.noted, m)
		}
		m.results = append(m.results, entry{At: l.since(time.Now()), Kind: kind, Text: text})
	}
}

func (l *lab) since(t time.Time) int64 { return t.Sub(l.began).Milliseconds() }

// catchUp adds the broker's new events to the histories. The caller holds mu.
func (l *lab) catchUp() {
	events := l.broker.EventsAfter(l.read)
	if len(events) > 0 && events[0].Number > l.read+1 || l.entries > maxEntries {
		l.problem = "this run has too many events to show; start again"
		return
	}
	for _, e := range events {
		l.read = e.Number
		at := l.since(e.Time)
		id, _ := e.MessageID.(string)
		of := []*message{l.byID[id]}
		if e.Kind == "queue deleted" {
			of = l.messages
		}
		for _, m := range of {
			if m != nil && (e.MessageID != nil || slices.Contains(m.queues, e.Queue)) {
				m.add(e, at)
				l.entries++
			}
		}
	}
	for _, m := range l.noted {
		for len(m.results) > 0 {
			m.result()
		}
	}
	l.noted = nil
}

// clockError is how many ms the times of events and of attempts may differ: in a browser, Go's wall clock has milliseconds,
// and its monotonic one microseconds.
const clockError = 2

// append adds an entry, which isn't earlier than the one before it.
func (m *message) append(e entry) {
	if n := len(m.Entries); n > 0 {
		e.At = max(e.At, m.Entries[n-1].At)
	}
	m.Entries = append(m.Entries, e)
}

// result moves the next result to the entries.
func (m *message) result() {
	m.succeeded = m.results[0].Kind == "succeeded"
	if m.results[0].Kind == "refused" {
		m.State = "refused"
	}
	m.append(m.results[0])
	m.results = m.results[1:]
}

// add adds an event. A retry copy is confirmed before its original is acknowledged, so for a moment
// two queues have the message; it is where it was published last.
func (m *message) add(e hopbacktest.Event, at int64) {
	// What a handler did with a delivery came before the broker's next event. Not every delivery reaches the handler: a
	// message may pass several delay queues for one retry.
	until := at + clockError
	if e.Kind == "returned" || e.Kind == "delivered" {
		until = at - clockError // a result at this time is that of the next delivery, except for a crash
	}
	for m.delivered && len(m.results) > 0 && (m.results[0].At <= until || m.results[0].Kind == "crashed" && m.results[0].At <= at+clockError) {
		m.result()
	}
	m.delivered = e.Kind == "delivered"
	m.append(entry{At: at, Kind: e.Kind, Queue: e.Queue})
	gone := ""
	switch e.Kind {
	case "published":
		gone, m.leaves = m.leaves, ""
		m.queues = append(m.queues, e.Queue)
	case "dead-lettered":
		m.leaves = e.Queue
	case "accepted", "dropped", "queue deleted":
		gone = e.Queue
	}
	if i := slices.Index(m.queues, gone); i >= 0 {
		m.queues = slices.Delete(m.queues, i, i+1)
	}
	m.Where = ""
	for _, q := range m.queues {
		if q != foreignQueue {
			m.Where = q
		}
	}
	switch {
	case m.Where == deadQueue:
		m.State = "dead"
	case m.delivered:
		m.State = "delivered"
	case m.Where != "":
		m.State = "waits"
	case m.succeeded:
		m.State = "handled"
	default:
		m.State = "lost"
	}
}

// explain adds to a dead letter why it is one. The caller holds mu.
func (l *lab) explain(m *message) {
	if m.State == "dead" && !m.reasoned {
		if dead, ok := l.broker.Queue(deadQueue).Message(m.ID); ok && dead.Message != nil {
			m.explain(dead.Message)
		}
	}
}

func (m *message) explain(deadLetter *client.Message) {
	m.reasoned = true
	why := retry.DeadLetterOf(deadLetter)
	text := "reason: " + string(why.Reason)
	if why.Error != "" {
		text += "; error: " + why.Error
	}
	m.append(entry{Kind: "is a dead letter", Queue: deadQueue, Text: text})
}

// history is what happened to each message, as text. Times count from the first event of the first message. They are
// in tenths of a second, since a browser's timers have milliseconds.
func (l *lab) history() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.catchUp()
	var b strings.Builder
	first := int64(-1)
	for _, m := range l.messages {
		l.explain(m)
		fmt.Fprintf(&b, "message %s\n", m.ID)
		for _, e := range m.Entries {
			if first < 0 {
				first = e.At
			}
			fmt.Fprintf(&b, "%s\n", strings.TrimRight(fmt.Sprintf("%9.1fs  %-16s %-12s %s", float64(e.At-first)/1000, e.Kind, e.Queue, e.Text), " "))
		}
	}
	return b.String()
}
