package ratelimit

import (
	"context"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/refusal"
	"github.com/hopback/hopback/internal/startcheck"
)

const (
	// every is how often a process asks how many consumers its queues have, and patience how long the broker has to
	// answer.
	every, patience = time.Second, 5 * time.Second
	// unknown is how many consumers a queue is taken to have that couldn't be asked for, as in an alarm.
	unknown = 100
)

// share is a process's part of a limit: that of its consumers among all consumers of their queues.
type share struct {
	mu      sync.Mutex
	part    float64
	changed chan struct{} // closed when part changes; nil: it never does
	queues  map[string]*sharedQueue
	stop    context.CancelFunc // ends run; nil: it doesn't run
}

// sharedQueue is a queue with the number of its consumers.
type sharedQueue struct {
	own        map[*refusal.Consumer]client.Start
	last, past int // of all, by the last two answers
}

func newShare(shared bool) *share {
	s := &share{part: 1}
	if shared {
		s.changed, s.queues = make(chan struct{}), map[string]*sharedQueue{}
	}
	return s
}

func (s *share) get() (part float64, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.part, s.changed
}

// join adds a consumer that starts.
func (s *share) join(ctx context.Context, start client.Start) error {
	if s.queues == nil || start.Control == nil && start.Management == nil { // the latter is a test without a broker
		return nil
	}
	consumer := refusal.Of(ctx)
	if consumer == nil || start.Management == nil {
		return argument.New("ratelimit.Config.Shared", true, "isn't possible here", "use it with Conn.Consume, or with a package that uses it")
	}
	n, alarm, err := startcheck.Check[int]{
		Run: func(ctx context.Context) (int, error) { return consumers(ctx, start) }, Alarms: inside.AlarmsOf(ctx),
	}.Start(ctx, func(int) {})
	if err != nil {
		return err
	}
	if alarm != nil {
		alarm.Cancel()
		n = unknown
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[start.Queue]
	if q == nil {
		q = &sharedQueue{own: map[*refusal.Consumer]client.Start{}, last: n, past: n}
		s.queues[start.Queue] = q
	}
	if _, again := q.own[consumer]; again { // its connection was lost while it started
		return nil
	}
	q.own[consumer] = start
	q.last, q.past = q.last+1, q.past+1
	s.compute()
	consumer.OnEnd(func() { s.leave(start.Queue, consumer) })
	if s.stop == nil {
		running, stop := context.WithCancel(context.WithoutCancel(ctx))
		s.stop = stop
		go s.run(running)
	}
	return nil
}

func (s *share) leave(queue string, consumer *refusal.Consumer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[queue]
	if delete(q.own, consumer); len(q.own) == 0 {
		delete(s.queues, queue)
	}
	if len(s.queues) == 0 {
		s.stop()
		s.stop = nil
	}
	s.compute()
}

// compute is called with mu held. A share grows only when two answers say so: after a restart of the broker,
// consumers come back one by one.
func (s *share) compute() {
	own, all := 0, 0
	for _, q := range s.queues {
		own += len(q.own)
		all += max(q.last, q.past, len(q.own))
	}
	part := 1.0
	if all > 0 {
		part = float64(own) / float64(all)
	}
	if part != s.part {
		s.part = part
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// run asks for the numbers of consumers until ctx ends.
func (s *share) run(ctx context.Context) {
	failing := map[string]bool{}
	for backoff.Sleep(ctx, every) {
		for _, start := range s.starts() {
			asking, done := context.WithTimeout(ctx, patience)
			n, err := consumers(asking, start)
			done()
			if err == nil {
				s.learn(start.Queue, n)
			} else if !failing[start.Queue] && start.Log != nil && ctx.Err() == nil {
				start.Log.Debug("hopback: the broker doesn't answer how many consumers share the rate limit; the last number counts", "queue", start.Queue, "error", err)
			}
			failing[start.Queue] = err != nil
		}
	}
}

// starts returns a consumer of each queue to ask with.
func (s *share) starts() (all []client.Start) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.queues {
		for _, start := range q.own {
			all = append(all, start)
			break
		}
	}
	return all
}

func (s *share) learn(queue string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[queue]; q != nil {
		q.past, q.last = q.last, n
		s.compute()
	}
}

// consumers asks how many consumers a queue has.
func consumers(ctx context.Context, start client.Start) (int, error) {
	info, err := declare.Inspect(ctx, start.Management, start.Queue)
	return int(min(info.Consumers, 1_000_000)), err
}
