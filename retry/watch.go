package retry

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/annotation"
)

const (
	// peekEvery is the shortest time from one check to the next that a failure triggers.
	peekEvery = time.Minute
	// peekSoon is the same when retries come back early, or not at all.
	peekSoon = 10 * time.Second
	// peekTimeout bounds a check: a broker with an alarm doesn't answer.
	peekTimeout = 30 * time.Second
	// overdue is how late a retry must be to count as missing.
	overdue = 5 * time.Second
)

// watch runs the checks again while a consumer runs. Somebody can delete a delay queue in that
// time and declare it with other settings. The broker doesn't notify clients of that, and asking
// for each message would cost more than the retry. So each failure is followed by a check, within a
// minute of the last one, and sooner if this consumer's retries come back early or not at all. That also
// holds for the last failure: if a delay queue is missing, a queue that another team has bound to the same
// exchange can have taken the retry copy, and then nothing else fails. A nil *watch does nothing: the broker
// can't be asked.
type watch struct {
	queue string
	log   *slog.Logger
	// oneWay: this consumer doesn't see retries when they return.
	oneWay bool
	peek   func(context.Context) (inspection, error)
	now    func() time.Time
	// began is when this watch was made. Times are counted from it on the monotonic clock, so
	// that the checks also run while a host's clock that was set back catches up.
	began time.Time

	// due is when the first retry that was sent should be back, in milliseconds. It is 0 if one
	// has come back since, or none was sent.
	due atomic.Int64
	// next is the time of the next check, and soon the earliest one.
	next, soon atomic.Int64
	busy       atomic.Bool
	// unchecked is how many retries were sent and messages given up since the last check began. armed says that a
	// timer waits for the next one.
	unchecked atomic.Int64
	armed     atomic.Bool
	// running ends with the consumer, by end.
	running context.Context
	end     context.CancelFunc
	// deaths counts the messages that this consumer has dead-lettered.
	deaths atomic.Int64
	// early is a retry that came early since the last check, or nil.
	early atomic.Pointer[earlyRetry]
	// losing is inspection.losing of the last check.
	losing atomic.Pointer[[]error]
	// moves reports that inspection.copies was nil; only Central uses it.
	moves atomic.Bool

	mu          sync.Mutex // protects the results of the last checks
	logged      string
	deadQueue   string // its name at the last check that found it
	loggedEarly bool
	counts      [2]deadCount // the older one first
	loggedStuck bool
}

// earlyRetry is a retry that came back too soon.
type earlyRetry struct {
	asked, had time.Duration
	died       annotation.DeadLettering // in the delay queue; zero if unknown
}

// deadCount is how many messages the dead-letter queue had at a check, and how many this consumer
// had dead-lettered by then.
type deadCount struct {
	known    bool
	messages uint64
	deaths   int64
}

func newWatch(log *slog.Logger, queue string, now func() time.Time, peek func(context.Context) (inspection, error)) *watch {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	w := &watch{queue: queue, log: log.With("queue", queue), peek: peek, now: now, began: now().Add(-time.Second)}
	w.running, w.end = context.WithCancel(context.Background())
	return w
}

// millis counts the milliseconds until t. They are never 0.
func (w *watch) millis(t time.Time) int64 { return t.Sub(w.began).Milliseconds() }

// start is the check before the first delivery. It returns its findings, except those of disabled
// checks and what the user isn't permitted to see.
func (w *watch) start(ctx context.Context) error {
	in, err := w.peek(ctx)
	if err != nil {
		return err
	}
	if err := in.err(); err != nil {
		return err
	}
	if len(in.unseen) > 0 {
		w.log.Warn("hopback: topology check: skipped checks that the user has no permission for; grant the listed permissions to run them",
			"not_checked", strings.Join(in.unseen, "; "), "permission", strings.Join(in.needs, "; "))
	}
	for _, e := range in.waived {
		w.log.Warn("hopback: topology check: a disabled check found a fault", "check", string(e.Guard), "at", e.Queue, "problem", e.Problem, "remedy", e.Remedy)
	}
	for _, e := range in.hangs {
		w.log.Warn("hopback: topology check: anyone who may publish to a queue can make it hang", "at", e.Queue, "problem", e.Problem, "remedy", e.Remedy)
	}
	if in.unsorted {
		w.log.Warn("hopback: topology check: the topology is older than this version: a queue that others bind to the dead-letter exchange would take this queue's dead letters; apply retry.Topology or retry.CentralTopology")
	}
	if w.oneWay && in.copies != nil {
		w.log.Info("hopback: Central copies the messages of this queue, because the topology doesn't allow moving them", "reason", in.copies)
	}
	w.record(&in, w.now(), 0)
	return nil
}

// retryReturned notes a delivery. Only the first one that comes back after one was sent
// matters.
func (w *watch) retryReturned(m *client.Message, now time.Time) {
	t := historyOf(m)
	asked := t.Delay
	if asked <= 0 {
		return
	}
	w.due.Store(0)
	last := millis(t.Last)
	if early := time.Duration(min(asked, maxDelay.Milliseconds())) * time.Millisecond / 2; !last.IsZero() && early > earlyTolerance && now.Sub(last) < early {
		e := &earlyRetry{asked: time.Duration(asked) * time.Millisecond, had: now.Sub(last)}
		if deaths := annotation.DeadLetterings(nil, m.Annotations); len(deaths) > 0 {
			e.died = deaths[0]
		}
		w.early.Store(e)
		w.expedite()
	}
}

// awaits reports whether a retry that was sent hasn't come back.
func (w *watch) awaits() bool { return w != nil && w.due.Load() != 0 }

// retrySent notes a retry that should come back after delay.
func (w *watch) retrySent(delay time.Duration) {
	if w == nil {
		return
	}
	ms := w.millis(w.now())
	if due := w.due.Load(); w.oneWay {
		// nothing is awaited
	} else if due == 0 {
		w.due.CompareAndSwap(0, ms+delay.Milliseconds())
	} else if ms > due+overdue.Milliseconds() {
		w.due.Store(0) // one check for each missing retry
		w.expedite()
	}
	w.tick(ms)
}

// messageGivenUp counts a dead-lettered message.
func (w *watch) messageGivenUp() {
	if w == nil {
		return
	}
	w.deaths.Add(1)
	w.tick(w.millis(w.now()))
}

func (w *watch) expedite() { w.next.Store(min(w.next.Load(), w.soon.Load())) }

// tick notes a failure at ms, which is followed by a check.
func (w *watch) tick(ms int64) {
	w.unchecked.Add(1)
	w.check(ms)
}

// check runs the checks if they are due, or else has a timer do it then.
func (w *watch) check(ms int64) {
	wait := w.next.Load() - ms
	switch {
	case w.running.Err() != nil:
	case wait <= 0:
		if w.busy.CompareAndSwap(false, true) {
			go w.again()
		}
	case w.armed.CompareAndSwap(false, true):
		time.AfterFunc(time.Duration(wait)*time.Millisecond, func() {
			w.armed.Store(false)
			if w.unchecked.Load() > 0 {
				w.check(w.millis(w.now()))
			}
		})
	}
}

// again is a check while the consumer runs. It stops when its connection is lost.
func (w *watch) again() {
	defer func() {
		w.busy.Store(false)
		if w.unchecked.Load() > 0 { // this check failed, or has begun before the last failure
			w.check(w.millis(w.now()))
		}
	}()
	ctx, cancel := context.WithTimeout(w.running, peekTimeout)
	defer cancel()
	deaths, unchecked := w.deaths.Load(), w.unchecked.Swap(0)
	in, err := w.peek(ctx)
	now := w.now()
	if w.running.Err() != nil {
		return
	}
	if err != nil {
		w.log.Debug("hopback: topology check: reading the topology failed; it will be tried again", "error", err)
		w.schedule(now, now.Add(peekSoon))
		w.unchecked.Add(unchecked)
		return
	}
	w.record(&in, now, deaths)
	text := ""
	if err := in.err(); err != nil {
		text = err.Error()
	}
	w.mu.Lock()
	logged := w.logged
	w.logged = text
	w.mu.Unlock()
	switch {
	case text == logged:
	case text == "":
		w.log.Info("hopback: topology check: the faults are fixed")
	default:
		w.log.Error("hopback: topology check: found a fault while the consumer runs; fix it as the error says", "error", text, "failures_since_last_check", unchecked)
	}
}

// record stores the result of a check. deaths is how many messages had been dead-lettered before
// it.
func (w *watch) record(in *inspection, now time.Time, deaths int64) {
	w.losing.Store(&in.losing)
	if w.oneWay && w.moves.Swap(in.copies == nil) && in.copies != nil {
		w.log.Warn("hopback: Central can no longer move messages, so it copies them", "reason", in.copies)
	}
	expedited := w.soon.Load() != 0 && w.next.Load() <= w.soon.Load()
	wrong := w.arriving(in.dead, deaths) || len(in.found) > 0
	soon := now.Add(peekSoon)
	if expedited && !wrong {
		soon = now.Add(peekEvery) // it checked early and found nothing
	}
	w.policies(in, wrong)
	w.schedule(now, soon)
	if wrong {
		w.expedite() // so that it notices the fix, too
	}
}

// policies reports what a RabbitMQ policy may have caused. AMQP shows no policies, so the checks
// can't find it.
func (w *watch) policies(in *inspection, wrong bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case in.dead != nil:
		w.deadQueue = in.dead.Name
	case in.gone && w.deadQueue != "":
		w.log.Error("hopback: the dead-letter queue is gone, so dead letters go to the parking queue. A RabbitMQ policy with expires may have deleted it. Remove expires from the policy, and apply the topology again",
			"dead_letter_queue", w.deadQueue)
		w.deadQueue = "" // until it exists again
	}
	e := w.early.Swap(nil)
	if e != nil && !wrong && !w.loggedEarly {
		w.log.Error("hopback: a retry came back early, and the topology check finds no cause. Check for a RabbitMQ policy that sets message-ttl, max-length, or expires on the delay queue (rabbitmqctl list_policies), and for clocks that differ between workers",
			"delay_queue", e.died.Queue, "left_by", e.died.Reason, "delay", e.asked, "came_after", e.had.Round(time.Millisecond))
	}
	w.loggedEarly = e != nil && (w.loggedEarly || !wrong)
}

func (w *watch) schedule(now, soon time.Time) {
	w.soon.Store(w.millis(soon))
	w.next.Store(w.millis(now.Add(peekEvery)))
}

// arriving compares what this consumer dead-letters with what arrives in the dead-letter queue. A
// queue without consumers that grows by less, and then stops growing, is full: a policy has set a
// maximum length, which AMQP doesn't show. An empty queue isn't full. It returns whether the
// queue may be full.
func (w *watch) arriving(q *declare.QueueInfo, deaths int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if q == nil || q.Consumers > 0 {
		w.counts = [2]deadCount{}
		return false
	}
	now := deadCount{true, q.Messages, deaths}
	first, last := w.counts[0], w.counts[1]
	w.counts = [2]deadCount{last, now}
	missing := func(from deadCount, deaths int64) bool {
		return from.known && now.messages >= from.messages && now.messages-from.messages < uint64(deaths-from.deaths)
	}
	// Messages that were dead-lettered before the previous check have had time to arrive.
	stuck := last.known && now.messages > 0 && now.messages == last.messages && missing(first, last.deaths)
	if stuck {
		w.counts[0] = first // until some come
	}
	if stuck && !w.loggedStuck {
		w.log.Error("hopback: dead letters don't arrive in the dead-letter queue, which may be full. "+
			"They wait in the work queue, and so do its retries with StrategyDeadLetter. Make room in the dead-letter queue or remove its limit, which a RabbitMQ policy may have set. The broker tries again after its dead_letter_worker_publisher_confirm_timeout, by default three minutes",
			"dead_letter_queue", q.Name, "messages", q.Messages, "given_up", last.deaths-first.deaths, "arrived", now.messages-first.messages)
	}
	w.loggedStuck = stuck
	return stuck || now.messages > 0 && missing(last, deaths)
}

// usable returns the level to use in place of i, which may be losing messages: the next longer
// one that isn't, or else the next shorter one. It returns an error if none is left.
func (w *watch) usable(i int) (int, error) {
	if w == nil {
		return i, nil
	}
	losing := w.losing.Load()
	if losing == nil || i < 0 || i >= len(*losing) || (*losing)[i] == nil {
		return i, nil
	}
	for j := i + 1; j < len(*losing); j++ {
		if (*losing)[j] == nil {
			return j, nil
		}
	}
	for j := i - 1; j >= 0; j-- {
		if (*losing)[j] == nil {
			return j, nil
		}
	}
	return i, (*losing)[i]
}
