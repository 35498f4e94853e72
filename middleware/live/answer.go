package live

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/link"
	"github.com/hopback/hopback/internal/oldbroker"
)

const (
	// patience is how long the broker has for a request, and a worker for an answer.
	patience, answerLimit = 10 * time.Second, 2 * time.Second
	// between is the time between two answers of a worker, however many questions there are.
	between = 50 * time.Millisecond
	// renewEvery is how often a worker binds its queue again, in case somebody has deleted the exchange, and
	// refusedPause is how long it waits after it was refused.
	renewEvery, refusedPause = 10 * time.Minute, 5 * time.Minute
	// questionLife is how long a question is of interest, and answerLife an answer.
	questionLife, answerLife = 2 * time.Second, 10 * time.Second

	// A question may ask for an answer every so often, for so long, but not more often or longer than this. Unless something
	// changes, such an answer comes every calm.
	minEvery, maxEvery, maxFor, calm = time.Second, time.Minute, time.Minute, 6 * time.Second
	// maxWatchers is how many such questions a worker has at a time. To others it answers once.
	maxWatchers = 4

	maxAnswer  = 64_000 // bytes
	maxRunning = 500    // of an answer
	maxQueues  = 200
)

// answer is the body of a worker's message, in JSON. It has ages in milliseconds, because clocks differ.
type answer struct {
	ID      string          `json:"id"`
	Host    string          `json:"host"`
	Version string          `json:"version,omitempty"`
	Age     int64           `json:"age"`
	Queues  []Queue         `json:"queues"`
	Running []answerRunning `json:"running"`
	More    int             `json:"more,omitempty"`
	// Every is after how many milliseconds another answer comes at the latest; 0: none does without a question.
	Every int64 `json:"every,omitempty"`
}

type answerRunning struct {
	Queue   string `json:"q"`
	ID      string `json:"i,omitempty"`
	Type    string `json:"t,omitempty"`
	Tenant  string `json:"n,omitempty"`
	Attempt int    `json:"a"`
	Age     int64  `json:"age"`
	Stuck   bool   `json:"s,omitempty"`
}

// body returns the worker's answer, of at most maxAnswer bytes.
func (w *worker) body(now time.Time, every time.Duration) []byte {
	s := w.tracker.snapshot(now, w.cfg.StuckAfter, maxRunning)
	a := answer{ID: w.id, Host: w.cfg.Host, Version: w.cfg.Version, Age: now.Sub(w.tracker.born).Milliseconds(), Queues: s.queues[:min(len(s.queues), maxQueues)], Every: every.Milliseconds()}
	for _, r := range s.oldest {
		x, age := r.describe(), now.Sub(r.began)
		a.Running = append(a.Running, answerRunning{x.Queue, x.ID, x.Type, x.Tenant, x.Attempt, age.Milliseconds(), age >= w.cfg.StuckAfter})
	}
	for {
		a.More = s.running - len(a.Running)
		b, err := json.Marshal(a)
		switch {
		case err == nil && len(b) <= maxAnswer:
			return b
		case len(a.Running) > 0:
			a.Running = a.Running[:len(a.Running)/2]
		default:
			a.Queues = a.Queues[:len(a.Queues)/2]
		}
	}
}

// answerer answers the questions to a worker until the worker's last consumer has ended, or its Conn is closed.
type answerer struct {
	worker *worker
	place  link.ReplyPlace
	queue  string
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}

	// Only run uses these.
	publisher *client.Publisher[*client.Message] // nil before the first answer
	failing   bool                               // the last try failed, and the log has it
	refused   bool
	watchers  map[string]*watcher // by the queue that they want their answers in
}

// watcher is a question that asks for answers until a time.
type watcher struct {
	to         address.Address
	every      time.Duration
	until, due time.Time
	sent       time.Time
	mark       mark // of what it knows
}

// answer starts the answers. It returns nil if the Conn is closed.
func (w *worker) answer() *answerer {
	a := &answerer{worker: w, queue: questions + strings.ToLower(rand.Text()), done: make(chan struct{}), watchers: map[string]*watcher{}}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	var err error
	if a.place, err = inside.Of(w.conn).ReserveReplies(a.close, w.count); err != nil {
		a.cancel()
		return nil
	}
	go a.run()
	return a
}

// close stops the answers, and waits for that within ctx.
func (a *answerer) close(ctx context.Context) {
	a.cancel()
	select {
	case <-a.done:
	case <-ctx.Done():
	}
}

func (a *answerer) run() {
	defer close(a.done)
	defer a.place.Leave()
	defer a.closePublisher()
	for try := range backoff.Tries(a.ctx, a.pause) {
		s, err := a.place.Open(a.ctx, a.source)
		if err == nil {
			try.Up()
			a.failing, a.refused = false, false
			err = a.serve(s)
			s.Close()
		}
		a.report(err)
	}
}

// pause is how long to wait before the next try. An attempt without the permission for it costs the broker a
// session, so there are few.
func (a *answerer) pause(failures int) time.Duration {
	if a.refused {
		return refusedPause
	}
	return a.place.Pause(failures)
}

// report logs why the worker can't be asked, once.
func (a *answerer) report(err error) {
	if err == nil || a.ctx.Err() != nil || errors.Is(err, client.ErrConnectionLost) {
		return
	}
	a.refused = errors.Is(err, client.ErrUnauthorized)
	if !a.failing {
		a.failing = true
		a.worker.log().Warn("hopback: this worker isn't shown among the live ones; its handlers continue", "queue", a.queue, "error", err)
	}
}

// source declares the queue for questions. They are for now, so it keeps few.
func (a *answerer) source(oldbroker.Quirks) (link.ReplySource, error) {
	if err := a.declare(a.ctx); err != nil {
		return link.ReplySource{}, err
	}
	to, err := address.Queue(a.queue).Build()
	return link.ReplySource{Queue: to, Links: 1, Credit: 4, Settled: true}, err
}

func (a *answerer) declare(ctx context.Context) error {
	ctx, done := context.WithTimeout(ctx, patience)
	defer done()
	_, err := declare.Apply(ctx, a.worker.conn.Management(), declare.Topology{
		Exchanges: []declare.Exchange{{Name: exchange, Type: declare.ExchangeFanout}},
		Queues:    []declare.Queue{passingQueue(a.queue, 20, 64_000, questionLife)},
		Bindings:  []declare.Binding{{Source: exchange, Queue: a.queue}},
	})
	return err
}

// passingQueue is a queue for messages that are of interest for so long. RabbitMQ deletes it when its consumer is gone, or if
// there is none for a minute, and doctor knows by AutoDelete that it doesn't have to keep anything.
func passingQueue(name string, messages, bytes int64, life time.Duration) declare.Queue {
	return declare.RawQueue{Name: name, Durable: true, AutoDelete: true, Arguments: map[string]any{
		"x-queue-type": "classic", "x-expires": time.Minute.Milliseconds(), "x-message-ttl": life.Milliseconds(), "x-max-length": messages, "x-max-length-bytes": bytes,
	}}
}

// serve answers questions until the session ends.
func (a *answerer) serve(s link.ReplySession) error {
	ctx, cancel := context.WithCancel(a.ctx)
	renewing := make(chan struct{})
	go func() {
		defer close(renewing)
		for backoff.Sleep(ctx, renewEvery) {
			_ = a.declare(ctx)
		}
	}()
	defer func() { cancel(); <-renewing }()
	for {
		question, err := a.receive(ctx, s)
		if err != nil {
			return err
		}
		if to, ok := answersTo(question.Message); ok {
			a.report(refusedOnly(a.answerTo(ctx, to, question.Message)))
		}
		backoff.Sleep(ctx, between)
	}
}

// receive returns the next question. Until then it sends what watchers are to get.
func (a *answerer) receive(ctx context.Context, s link.ReplySession) (link.Reply, error) {
	for {
		now := time.Now()
		next := now.Add(time.Hour)
		for queue, w := range a.watchers {
			if now.After(w.until) {
				delete(a.watchers, queue)
				continue
			}
			if !w.due.After(now) {
				if err := a.update(ctx, w, now); err != nil { // it is gone, or asks again
					delete(a.watchers, queue)
					a.report(refusedOnly(err))
					continue
				}
				for !w.due.After(now) {
					w.due = w.due.Add(w.every)
				}
			}
			if w.due.Before(next) {
				next = w.due
			}
		}
		waiting, done := context.WithDeadline(ctx, next)
		question, err := s.Receive(waiting, 0)
		late := waiting.Err() != nil && ctx.Err() == nil
		done()
		if err == nil || !late {
			return question, err
		}
	}
}

// update sends a watcher what has changed.
func (a *answerer) update(ctx context.Context, w *watcher, now time.Time) error {
	m := a.worker.tracker.mark(now, a.worker.cfg.StuckAfter)
	if m == w.mark && now.Sub(w.sent) < calm {
		return nil
	}
	w.mark, w.sent = m, now
	return a.send(ctx, w.to, calm+w.every)
}

// answerTo answers a question, or notes that it asks for several answers.
func (a *answerer) answerTo(ctx context.Context, to address.Address, question *client.Message) error {
	of := func(key string, most time.Duration) (time.Duration, bool) {
		ms, ok := question.ApplicationProperties[key].(int64)
		return time.Duration(min(max(ms, 0), most.Milliseconds())) * time.Millisecond, ok
	}
	every, several := of(propertyEvery, maxEvery)
	w, now := a.watchers[to.QueueName()], time.Now()
	if !several || w == nil && len(a.watchers) == maxWatchers {
		return a.send(ctx, to, 0)
	}
	lasts, _ := of(propertyFor, maxFor)
	every = max(every, minEvery)
	fresh := w == nil
	if fresh {
		w = &watcher{to: to}
		a.watchers[to.QueueName()] = w
	}
	if w.every != every {
		// Not all workers answer at the same time, but those of one show do: then the broker, and who watches, wake up once
		// for all of them.
		w.due = now.Add(showEvery * mathrand.N(max(1, every/showEvery)))
	}
	w.until, w.every = now.Add(lasts), every
	if !fresh {
		return nil
	}
	return a.update(ctx, w, now)
}

// propertyEvery and propertyFor are the application properties of a question that asks for several answers. Their values
// are milliseconds.
const propertyEvery, propertyFor = "x-hopback-every", "x-hopback-for"

// refusedOnly is an error that a user can do something about. That nobody waits for an answer any more is none.
func refusedOnly(err error) error {
	if errors.Is(err, client.ErrUnauthorized) {
		return err
	}
	return nil
}

// answersTo returns the queue that a question wants its answers in.
func answersTo(question *client.Message) (to address.Address, ok bool) {
	p := question.Properties
	if p == nil || p.ReplyTo == nil {
		return to, false
	}
	to, err := address.Parse(*p.ReplyTo)
	return to, err == nil && to.IsQueue() && strings.HasPrefix(to.QueueName(), answers)
}

// send sends an answer. every is after how long the next one comes at the latest.
func (a *answerer) send(ctx context.Context, to address.Address, every time.Duration) (err error) {
	ctx, done := context.WithTimeout(ctx, answerLimit)
	defer done()
	if a.publisher == nil {
		if a.publisher, err = client.NewPublisher[*client.Message](ctx, a.worker.conn, address.Address{}, client.PublisherConfig{NoResend: true}); err != nil {
			return err
		}
	}
	m := client.NewMessage(a.worker.body(time.Now(), every))
	m.Header = &client.Header{Priority: 4, TTL: answerLife} // it doesn't have to survive a restart
	return a.publisher.Publish(ctx, m, client.PublishTo(to))
}

func (a *answerer) closePublisher() {
	if a.publisher != nil {
		cleanUp(a.ctx, func(ctx context.Context) { _ = a.publisher.Close(ctx) })
	}
}
