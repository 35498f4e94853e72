package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	workerName   = "worker"
	limit        = 5 // the work queue's delivery limit
	maxBody      = 64 << 10
	maxMessages  = 1000
	maxEvents    = 200_000
	startTimeout = time.Minute
)

// lab is a RabbitMQ in memory with a publisher and a worker, and what happened to their messages.
// The page and the tests run the same one: everything in it is the product's own code.
type lab struct {
	settings settings
	policy   retry.Policy
	topology declare.Topology
	handler  *handler

	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	broker  *hopbacktest.Broker
	conn    *client.Conn
	publish *client.Publisher[string]
	began   time.Time

	mu       sync.Mutex
	read     int // how many of the broker's events are in messages
	messages []*message
	byID     map[string]*message
	stop     func() // stops the worker; nil if none runs
	alarm    bool
	err      error // why the lab can't continue
}

// message is a published message, and where it is.
type message struct {
	ID      string  `json:"id"`
	Body    string  `json:"body"`
	Where   string  `json:"where"` // a queue, or "" if no queue has it
	State   string  `json:"state"` // "waits", "handled", or "dead"; in a worker "delivered"
	Entries []entry `json:"entries"`

	reasoned  bool    // the reason why it is a dead letter is in Entries
	results   []entry // of attempts, that aren't in Entries yet
	delivered bool    // the last event is a delivery
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
	policy, err := s.policy()
	if err != nil {
		return nil, err
	}
	topology, err := retry.Topology(policy, declare.QuorumQueue{Name: workQueue, DeliveryLimit: limit})
	if err != nil {
		return nil, err
	}
	broker, err := hopbacktest.New(hopbacktest.Config{MaxEvents: maxEvents})
	if err != nil {
		return nil, err
	}
	l := &lab{settings: s, policy: policy, topology: topology, handler: handlerNamed(s.Handler), broker: broker, byID: map[string]*message{}, began: time.Now()}
	l.ctx, l.cancel = context.WithCancel(ctx)
	if err := l.connect(); err != nil {
		l.close()
		return nil, err
	}
	l.startWorker()
	return l, nil
}

func (l *lab) dial(name string) (*client.Conn, error) {
	ctx, cancel := context.WithTimeout(l.ctx, startTimeout)
	defer cancel()
	return client.Connect(ctx, l.broker.URL(), client.Config{Name: name, Dial: l.broker.Dial, Logger: slog.New(slog.DiscardHandler)})
}

// connect declares the topology, and opens the publisher.
func (l *lab) connect() (err error) {
	if l.conn, err = l.dial("publisher"); err != nil {
		return err
	}
	if _, err := declare.Apply(l.ctx, l.conn.Management(), l.topology); err != nil {
		return err
	}
	l.publish, err = client.NewPublisher[string](l.ctx, l.conn, address.Queue(workQueue), client.PublisherConfig{})
	return err
}

// close ends everything that the lab has started.
func (l *lab) close() {
	l.stopWorker()
	l.cancel()
	l.wg.Wait()
	if l.conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		_ = l.conn.Close(ctx)
	}
	l.broker.Close()
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
		if err := l.work(ctx); err != nil && ctx.Err() == nil {
			l.fail(fmt.Errorf("the worker stopped: %w", err))
		}
	})
}

func (l *lab) work(ctx context.Context) error {
	conn, err := l.dial(workerName)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	return conn.Consume(ctx, workQueue, retry.With(l.policy)(client.HandlerFunc(l.handle)), client.ConsumerConfig{})
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

// cutWorker cuts the worker's connection, as a crash of its process or of the network does. The
// client reconnects.
func (l *lab) cutWorker() {
	for _, c := range l.broker.Connections() {
		if strings.HasPrefix(c.Info().Container, workerName) {
			c.Cut()
		}
	}
}

func (l *lab) setAlarm(on bool) {
	l.broker.SetMemoryAlarm(on)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alarm = on
}

func (l *lab) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = errors.Join(l.err, err)
}

// send publishes a message, and returns before the broker has confirmed it. A body beyond the
// bounds is an *argument.Error.
func (l *lab) send(body string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case len(body) > maxBody:
		return argument.New("message", nil, fmt.Sprintf("has more than %d bytes", maxBody), "publish a shorter one")
	case len(l.messages) >= maxMessages:
		return argument.New("message", nil, fmt.Sprintf("would be one more than the %d of a run", maxMessages), "start again")
	}
	m := &message{ID: strconv.Itoa(len(l.messages) + 1), Body: body, Entries: []entry{}}
	l.messages = append(l.messages, m)
	l.byID[m.ID] = m
	l.wg.Go(func() {
		err := l.publish.Publish(l.ctx, body, func(out *client.Message) { out.Properties.MessageID = m.ID })
		if err != nil && l.ctx.Err() == nil {
			l.note(m.ID, "refused", err.Error())
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
			err = client.Requeue{}
		case err != nil:
			l.note(id, "failed", attempt+": "+err.Error())
		default:
			l.note(id, "succeeded", attempt)
		}
	}()
	return l.handler.run(ctx, l, d)
}

// note adds a result, which catchUp puts between the events of the broker. To catch up here, for each attempt, would take
// time with the square of the number of messages.
func (l *lab) note(id, kind, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.byID[id]; m != nil {
		m.results = append(m.results, entry{At: l.since(time.Now()), Kind: kind, Text: text})
	}
}

func (l *lab) since(t time.Time) int64 { return t.Sub(l.began).Milliseconds() }

// catchUp adds the broker's new events to the histories. The caller holds mu.
func (l *lab) catchUp() {
	all := l.broker.Events()
	if len(all) >= maxEvents {
		l.err = errors.New("this run has too many events to show; start again")
		return
	}
	for _, e := range all[l.read:] {
		id, _ := e.MessageID.(string)
		if m := l.byID[id]; m != nil {
			m.add(e, l.since(e.Time))
		}
	}
	l.read = len(all)
	for _, m := range l.messages {
		for _, result := range m.results {
			m.append(result)
		}
		m.results = nil
	}
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

// add adds an event. A retry copy is confirmed before its original is acknowledged, so for a moment
// two queues have the message; it is where it was published last.
func (m *message) add(e hopbacktest.Event, at int64) {
	// What a handler did with a delivery came before the broker's next event. Not every delivery reaches the handler: a
	// message may pass several delay queues for one retry.
	for m.delivered && len(m.results) > 0 && m.results[0].At <= at+clockError {
		m.append(m.results[0])
		m.results = m.results[1:]
	}
	m.delivered = e.Kind == "delivered"
	m.append(entry{At: at, Kind: e.Kind, Queue: e.Queue})
	switch e.Kind {
	case "published":
		m.Where, m.State = e.Queue, "waits"
		if e.Queue == deadQueue {
			m.State = "dead"
		}
	case "delivered":
		m.Where, m.State = e.Queue, "delivered"
	case "returned", "delayed", "revoked":
		m.Where, m.State = e.Queue, "waits"
	case "accepted":
		if m.Where == e.Queue {
			m.Where, m.State = "", "handled"
		}
	}
}

// update brings the histories up to date, with the reasons of new dead letters. The caller holds mu.
func (l *lab) update() {
	l.catchUp()
	pending := false
	for _, m := range l.messages {
		pending = pending || m.State == "dead" && !m.reasoned
	}
	if !pending {
		return
	}
	for _, dead := range l.broker.Queue(deadQueue).Messages() {
		if dead.Message == nil {
			continue
		}
		m := l.byID[dead.ID()]
		if m == nil || m.State != "dead" || m.reasoned {
			continue
		}
		m.reasoned = true
		why := retry.DeadLetterOf(dead.Message)
		text := "reason: " + string(why.Reason)
		if why.Error != "" {
			text += "; error: " + why.Error
		}
		m.append(entry{Kind: "is a dead letter", Queue: deadQueue, Text: text})
	}
}

// history is what happened to each message, as text. Times count from the first event of the first message. They are
// in tenths of a second, since a browser's timers have milliseconds.
func (l *lab) history() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.update()
	var b strings.Builder
	var first int64
	if len(l.messages) > 0 && len(l.messages[0].Entries) > 0 {
		first = l.messages[0].Entries[0].At
	}
	for _, m := range l.messages {
		fmt.Fprintf(&b, "message %s\n", m.ID)
		for _, e := range m.Entries {
			fmt.Fprintf(&b, "%s\n", strings.TrimRight(fmt.Sprintf("%9.1fs  %-16s %-12s %s", float64(e.At-first)/1000, e.Kind, e.Queue, e.Text), " "))
		}
	}
	return b.String()
}
