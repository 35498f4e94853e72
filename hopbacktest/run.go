package hopbacktest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/retry"
)

// Run publishes messages to a queue, lets a worker handle them with the policy's retries, and
// returns what happened to each message. Use it to test a policy together with a handler.
// Time is virtual, so Run takes milliseconds, however long the delays are. A handler that
// sleeps sleeps in virtual time, too.
//
//   - A *client.Message is sent unchanged. Any other value is sent as JSON.
//   - A message without a message-id gets its number: "1" for the first.
//   - Messages may share a message-id, to test a handler that drops duplicates. Each has a separate
//     Outcome. To tell them apart, Run gives them the annotation x-opt-hopbacktest-number.
//   - Run fails the test if the policy, the handler, or the worker returns an error.
//   - Don't call Run inside a testing/synctest bubble: it makes one itself.
//
// To configure more than the policy and the handler, use a [Scenario].
func Run(t *testing.T, policy retry.Policy, handler client.Handler, messages ...any) *Result {
	t.Helper()
	return Scenario{Policy: policy, Handler: handler, Messages: messages}.Run(t)
}

// Scenario configures a run of messages through a retry policy. Handler is required.
type Scenario struct {
	// Policy is the retry policy. Default: the zero retry.Policy, which retries five times.
	Policy retry.Policy
	// Handler is the worker's handler, without retry.With.
	Handler client.Handler
	// Messages are the messages to publish. See the function [Run].
	Messages []any
	// Queue is the work queue. Default: "work", with a delivery limit of 20.
	Queue declare.QuorumQueue
	// Broker configures the broker, such as its version.
	Broker Config
	// Consumer configures the workers. Default: each handles one message at a time.
	Consumer client.ConsumerConfig
	// Workers is the number of workers. Each has its own connection. Default: 1.
	Workers int
	// Disturb, if not nil, is called on a separate goroutine after the messages are
	// published. Use it to inject faults. It may sleep, and must return before Limit.
	Disturb func(b *Broker)
	// Limit is the maximum virtual time until all messages are settled. After it, the test
	// fails. Default: a year.
	Limit time.Duration
}

// Run runs the scenario like the function [Run].
func (s Scenario) Run(t *testing.T) *Result {
	t.Helper()
	if bubble() != "" {
		t.Fatalf("hopbacktest: Run makes its own testing/synctest bubble, and a bubble can't contain another one; call Run outside of synctest.Test, and not in a handler or Disturb of another Run")
	}
	if s.Queue.Name == "" {
		s.Queue.Name = "work"
		if s.Queue.DeliveryLimit == 0 {
			s.Queue.DeliveryLimit = 20
		}
	}
	if s.Workers <= 0 {
		s.Workers = 1
	}
	if s.Limit <= 0 {
		s.Limit = 365 * 24 * time.Hour
	}
	if s.Handler == nil {
		t.Fatalf("hopbacktest: Scenario.Handler is nil; set the handler to test")
	}
	names := s.Policy.Names
	r := &run{Scenario: s, dead: names.DeadLetterQueue(s.Queue.Name), parking: names.ParkingQueue(), result: &Result{t: t}, outcomes: map[string]*Outcome{}}
	var err error
	synctest.Test(t, func(t *testing.T) { err = r.play(t.Context()) })
	if err != nil {
		t.Fatalf("hopbacktest: %v", err)
	}
	return r.result
}

// run is a running Scenario.
type run struct {
	Scenario
	broker *Broker
	began  time.Time
	// dead and parking are the queues in which messages can stay.
	dead, parking string

	mu       sync.Mutex
	result   *Result
	outcomes map[string]*Outcome // by keyOf
	failed   error               // why a worker has stopped
}

// play runs the scenario inside the bubble.
func (r *run) play(ctx context.Context) (err error) {
	cfg := r.Broker
	if cfg.MaxEvents == 0 {
		cfg.MaxEvents = 10_000 + 200*len(r.Messages)
	}
	if cfg.Heartbeat == 0 { // heartbeats have no use here, and a year would have many of them
		cfg.Heartbeat = 24 * time.Hour
	}
	if r.broker, err = New(cfg); err != nil {
		return err
	}
	defer r.broker.Close()
	r.began = time.Now()
	topology, err := retry.Topology(r.Policy, r.Queue)
	if err != nil {
		return err
	}
	conn, err := r.connect(ctx)
	if err != nil {
		return err
	}
	defer r.close(conn)
	if _, err := declare.Apply(ctx, conn.Management(), topology); err != nil {
		return err
	}
	if err := r.publish(ctx, conn); err != nil {
		return err
	}
	working, stop := context.WithCancel(ctx)
	var workers sync.WaitGroup
	for i := range r.Workers {
		workers.Go(func() {
			if err := r.work(working, i, conn); err != nil {
				r.mu.Lock()
				r.failed = errors.Join(r.failed, err)
				r.mu.Unlock()
			}
		})
	}
	if r.Disturb != nil {
		workers.Go(func() { r.Disturb(r.broker) })
	}
	err = r.await(working)
	stop()
	workers.Wait()
	r.conclude()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, r.result.Timeline())
	}
	return nil
}

func (r *run) connect(ctx context.Context) (*client.Conn, error) {
	return client.Connect(ctx, r.broker.URL(), client.Config{
		Dial: r.broker.Dial, IdleTimeout: 12 * time.Hour, Logger: slog.New(slog.DiscardHandler),
		Reconnect: client.ReconnectBackoff{Min: time.Millisecond, Max: 100 * time.Millisecond},
	})
}

func (r *run) close(conn *client.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_ = conn.Close(ctx)
}

// publish publishes the messages and adds an Outcome for each.
func (r *run) publish(ctx context.Context, conn *client.Conn) error {
	p, err := client.NewPublisher[any](ctx, conn, address.Queue(r.Queue.Name), client.PublisherConfig{})
	if err != nil {
		return err
	}
	given := map[string]int{} // how many messages have a message-id
	for _, v := range r.Messages {
		if id, ok := givenID(v); ok {
			given[id]++
		}
	}
	next := 0
	var taken error
	err = p.PublishAll(ctx, r.Messages, func(v any, m *client.Message) {
		// Edits are called in order, once for each message.
		next++
		id, ok := givenID(v)
		if !ok {
			id = strconv.Itoa(next)
			m.Properties.MessageID = id
			if given[id] > 0 {
				taken = fmt.Errorf("message %d has no message-id, so it gets its number, which is the message-id of another one; give each message one", next)
			}
		}
		o := &Outcome{t: r.result.t, began: r.began, queue: r.Queue.Name, ID: id, name: id}
		if given[id] > 1 {
			o.shared, o.name = true, fmt.Sprintf("%s (number %d)", id, next)
			m.Annotations = maps.Clone(m.Annotations)
			if m.Annotations == nil {
				m.Annotations = map[any]any{}
			}
			m.Annotations[numberAnnotation] = int64(next)
		}
		r.result.Messages = append(r.result.Messages, o)
		r.outcomes[keyOf(m)] = o
	})
	return errors.Join(taken, err, p.Close(ctx))
}

// numberAnnotation tells messages with the same message-id apart. Retry copies and dead letters keep it.
const numberAnnotation = "x-opt-hopbacktest-number"

// givenID is the message-id that a message of a Scenario has.
func givenID(v any) (id string, ok bool) {
	m, ok := v.(*client.Message)
	if !ok || m == nil || m.Properties == nil || m.Properties.MessageID == nil {
		return "", false
	}
	return fmt.Sprint(m.Properties.MessageID), true
}

// keyOf tells which of the published messages m is, or which one it is a copy of.
func keyOf(m *client.Message) string {
	if n, ok := m.Annotations[numberAnnotation].(int64); ok {
		return "number " + strconv.FormatInt(n, 10)
	}
	if id, ok := givenID(m); ok {
		return "id " + id
	}
	return ""
}

// work is a worker.
func (r *run) work(ctx context.Context, i int, conn *client.Conn) error {
	if i > 0 {
		var err error
		if conn, err = r.connect(ctx); err != nil {
			return err
		}
		defer r.close(conn)
	}
	handler := retry.With(r.Policy)(client.Wrap(r.Handler, r.observe))
	return conn.Consume(ctx, r.Queue.Name, client.Wrap(handler, func(ctx context.Context, d *client.Delivery) error {
		err := handler.Handle(ctx, d)
		r.mu.Lock()
		defer r.mu.Unlock()
		if o := r.outcomes[keyOf(d.Message())]; o != nil {
			o.acknowledged = err == nil
		}
		return err
	}), r.Consumer)
}

// observe calls the handler and records the attempt.
func (r *run) observe(ctx context.Context, d *client.Delivery) (err error) {
	m := d.Message()
	at := Attempt{Number: retry.Attempt(ctx), Began: time.Now(), DeliveryCount: d.DeliveryCount(), Annotations: annotationsOf(m)}
	defer func() {
		v := recover()
		at.Ended, at.Err = time.Now(), err
		if v != nil {
			at.Panic = v
		}
		r.note(at, m)
		if v != nil {
			panic(v)
		}
	}()
	return r.Handler.Handle(ctx, d)
}

// note adds an attempt. The message has the delay that was wanted before it.
func (r *run) note(at Attempt, m *client.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.outcomes[keyOf(m)]
	if o == nil {
		return // not one of the published messages
	}
	if n := len(o.Attempts); n > 0 {
		last := &o.Attempts[n-1]
		last.ActualDelay = at.Began.Sub(last.Ended)
		last.WantedDelay = askedOf(m)
		last.Retried = true
	}
	o.Attempts = append(o.Attempts, at)
}

// askedOf is the delay that the worker wanted, which is in the message.
func askedOf(m *client.Message) time.Duration {
	if text, ok := m.Annotations[annotation.History].(string); ok {
		var history struct {
			Delay int64 `json:"delay"`
			Asked int64 `json:"asked"` // if the message passed several delay queues
		}
		if json.Unmarshal([]byte(text), &history) == nil {
			return time.Duration(max(history.Delay, history.Asked)) * time.Millisecond
		}
	}
	return 0
}

func annotationsOf(m *client.Message) map[string]any {
	all := make(map[string]any, len(m.Annotations))
	for k, v := range m.Annotations {
		if name, ok := k.(string); ok && name != numberAnnotation {
			all[name] = v
		}
	}
	return all
}

// await waits until all messages are settled. It checks whenever only the passing of time can
// change anything.
func (r *run) await(ctx context.Context) error {
	limit := time.NewTimer(r.Limit)
	defer limit.Stop()
	for {
		r.broker.settle()
		changed := r.broker.engine.Changed()
		r.mu.Lock()
		failed := r.failed
		r.mu.Unlock()
		left := r.left()
		switch {
		case failed != nil:
			return fmt.Errorf("a worker stopped: %w", failed)
		case left == 0:
			return nil
		}
		select {
		case <-changed:
		case <-limit.C:
			return fmt.Errorf("after %v, the number of unsettled messages is %d", r.Limit, left)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// left is how many messages are neither handled nor in their last queue.
func (r *run) left() int {
	n := 0
	if !r.broker.Running() {
		return 1
	}
	for _, q := range r.broker.engine.Queues("/") {
		switch q.Name {
		case r.dead, r.parking:
			n += q.Unacknowledged
		default:
			n += q.Messages
		}
	}
	return n
}

// conclude finds out the fate of each message.
func (r *run) conclude() {
	r.mu.Lock()
	defer r.mu.Unlock()
	res := r.result
	res.Elapsed = time.Since(r.began)
	last := map[string]Event{}
	for _, e := range r.broker.Events() {
		if e.MessageID != nil {
			last[fmt.Sprint(e.MessageID)] = e
		}
	}
	for _, o := range res.Messages {
		e := last[o.ID]
		n := len(o.Attempts)
		if o.Ended = e.Time; o.shared && n > 0 { // the event may be another message's
			o.Ended = o.Attempts[n-1].Ended
		}
		switch {
		case n > 0 && o.Attempts[n-1].Err == nil && o.Attempts[n-1].Panic == nil:
			o.Fate = fateHandled
		case o.shared && o.acknowledged, !o.shared && e.Kind == "accepted":
			o.Fate = fateDiscarded
		default:
			o.Fate = fateLost
		}
	}
	for _, q := range r.broker.engine.Queues("/") {
		fate := fateUnsettled
		switch q.Name {
		case r.dead:
			fate = fateDeadLettered
		case r.parking:
			fate = fateParked
		}
		for _, m := range r.broker.Queue(q.Name).Messages() {
			if m.Message == nil {
				continue
			}
			o := r.outcomes[keyOf(m.Message)]
			if o == nil {
				continue
			}
			if o.Final != nil {
				o.Duplicates++
			}
			o.Fate, o.In, o.Final = fate, q.Name, m.Message
			o.Annotations = annotationsOf(m.Message)
			if fate == fateDeadLettered || fate == fateParked {
				o.DeadLetter = retry.DeadLetterOf(m.Message)
			}
		}
	}
}
