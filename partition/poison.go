package partition

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/annotation"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/inside"
	"github.com/hopback/hopback/internal/message"
	"github.com/hopback/hopback/retry"
)

// When a worker crashes, RabbitMQ counts a failed delivery for all that it held, so the count doesn't
// show which message has crashed it. And a worker has to hold the whole window, or its messages would
// return in another order. So the queues have no delivery limit, and the workers find out:
//
//   - A message with two failures that nobody has reported counts as poison. Such are tried one after
//     the other, in their order, while the worker handles nothing else, in all its partitions. So if
//     one of them crashes the worker, it is the first that is left.
//   - If the first has a third failure, the worker marks it with its count, and returns all that it
//     holds. That reports the failures of the others, so these count as poison no more.
//   - From then on, each further failure of the marked message is a crash while it was tried. It is
//     given up when the group's delivery limit is reached.
//   - If its handler returns, it isn't the culprit. Nothing else is handled before RabbitMQ has its
//     settlement, which another crash would undo. If it stays in hand, the worker returns all that it
//     holds, without the mark: a connection that is lost later isn't a crash.
//
// A worker that only lost its connection while it tried a message knows that it didn't crash.

const (
	// poisonAfter failures that nobody has reported make a message count as poison, and markedAfter have
	// it marked.
	poisonAfter = 2
	markedAfter = 3
	// leastTrials is how often a marked message must have crashed a worker before it is given up,
	// however low the limit is.
	leastTrials = 2
	// arriving is how long those behind the first one have to arrive, so that all are returned.
	arriving = 100 * time.Millisecond
	// comingBack is how long a marked message has to come back to the worker that has marked it.
	comingBack = 5 * time.Second
	// takenWithin is how long RabbitMQ has to take what became of a message that was tried; a copy of it may
	// wait for its target for longer.
	takenWithin = 5 * time.Second
	// defaultLimit is RabbitMQ's default for other queues.
	defaultLimit = 20

	// argLimit is the argument with the group's delivery limit; -1: none.
	argLimit = "x-hopback-delivery-limit"
	// markKey is the annotation with the delivery count at which a message was marked, an int64;
	// noMark: it isn't any more.
	markKey = "x-opt-hopback-marked-at"
	noMark  = int64(-1)
)

// suspicion is what the delivery count of a message says.
type suspicion struct {
	failures int64 // that nobody has reported
	count    int64 // of all
	mark     int64 // the count at which it was marked; 0: it isn't
}

func suspicionOf(m *client.Message) (s suspicion) {
	if m.Header == nil {
		return s
	}
	s.count, s.failures = int64(m.Header.DeliveryCount), int64(annotation.Unreported(m))
	// A publisher can write a mark, too. It counts only with failures that the broker has counted.
	if mark, _ := m.Annotations[markKey].(int64); mark >= markedAfter && mark <= s.count {
		s.mark = mark
	}
	return s
}

func (s suspicion) poison() bool { return s.failures >= poisonAfter || s.mark > 0 }

// poisons are those messages of a turn that count as poison and weren't tried yet, in their order.
type poisons struct {
	mu   sync.Mutex
	all  []waiting
	held map[string]bool // keys with a message in hand: the others don't wait for those
}

type waiting struct {
	d   *client.Delivery
	key string
}

// reset is called at the beginning of a turn.
func (s *poisons) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all, s.held = nil, map[string]bool{}
}

func (s *poisons) add(d *client.Delivery, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held[key] {
		s.all = append(s.all, waiting{d, key})
	}
}

// tried is called when d was tried, or needs no trial.
func (s *poisons) tried(d *client.Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(x waiting) bool { return x.d == d })
}

// waits is called when a message stays in hand, so that others don't wait for those behind it of its
// key. Each of these is tried when it comes.
func (s *poisons) waits(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held != nil {
		s.held[key] = true
	}
	s.all = slices.DeleteFunc(s.all, func(x waiting) bool { return x.key == key })
}

// before reports whether others are to be tried before d.
func (s *poisons) before(d *client.Delivery) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.IndexFunc(s.all, func(x waiting) bool { return x.d == d }) > 0
}

// begin takes the right to call the handler of a delivery, which end returns; became is what becomes of the
// delivery. Without end, instead is that.
func (h handler) begin(ctx context.Context, d *client.Delivery, again *inside.Again, was *attempts) (end func(became error), instead error) {
	w, p := h.of, h.part
	s := suspicionOf(d.Message())
	if !s.poison() || was.tried {
		if !w.slot(ctx, p) {
			return nil, h.keep(again, *was)
		}
		if instead := h.admitted(again, *was); instead != nil {
			w.free(1)
			return nil, instead
		}
		return func(error) { <-w.slots }, nil
	}
	if p.poisons.before(d) { // without a worker, which the first may need
		wait := &inside.Again{Delay: markerPause, Retries: was.retries, State: *was}
		if again != nil {
			wait.Annotations = again.Annotations
		}
		return nil, wait
	}
	if !w.takeReserved(p) {
		select {
		case w.trial <- struct{}{}:
		case <-p.leaving:
			return nil, h.keep(again, *was)
		case <-ctx.Done():
			return nil, h.keep(again, *was)
		}
	}
	over := func() { <-w.trial }
	instead, marked := h.trial(ctx, d, again, was, s)
	if marked {
		w.reserve(p)
		return nil, instead
	}
	if instead != nil {
		over()
		return nil, instead
	}
	for n := range cap(w.slots) {
		if !w.slot(ctx, p) {
			w.free(n)
			over()
			return nil, h.keep(again, *was)
		}
	}
	if instead := h.admitted(again, *was); instead != nil {
		w.free(cap(w.slots))
		over()
		return nil, instead
	}
	p.trying = s
	was.tried = true
	return func(became error) {
		p.poisons.tried(d)
		end := func() {
			w.free(cap(w.slots))
			over()
		}
		if taken := p.taken(d, became); taken != nil {
			go func() {
				select {
				case <-taken:
				case <-time.After(takenWithin):
				}
				end()
			}()
			return
		}
		end()
	}, nil
}

// taken returns a channel that is closed when RabbitMQ knows what became of a message that was tried. Until
// then nothing else is handled: if that crashed the worker at once, the message would come back, and be
// blamed for the crash. nil: it stays in hand.
func (p *part) taken(d *client.Delivery, became error) <-chan struct{} {
	turn := p.current.Load()
	if again, ok := became.(*inside.Again); turn == nil || ok && again.Delay > 0 {
		return nil
	}
	return (*turn).Taken(d)
}

// reserve keeps the right to try a message for the one of p that was marked and returned, until it comes
// back. Otherwise one of another partition could crash the worker, and the marked one would be blamed.
func (w *worker) reserve(p *part) {
	w.reservation.Lock()
	defer w.reservation.Unlock()
	w.reserved = p
	w.reservedUntil = time.AfterFunc(comingBack, func() { // another worker has it
		if w.takeReserved(p) {
			<-w.trial
		}
	})
}

// takeReserved takes the right to try a message if it is reserved for p.
func (w *worker) takeReserved(p *part) bool {
	w.reservation.Lock()
	defer w.reservation.Unlock()
	if w.reserved != p {
		return false
	}
	w.reserved = nil
	w.reservedUntil.Stop()
	return true
}

func (w *worker) free(slots int) {
	for range slots {
		<-w.slots
	}
}

// trial decides whether the first delivery that counts as poison is tried: nil. marked says that it is
// returned with a mark. It is called with the worker's right to try one.
func (h handler) trial(ctx context.Context, d *client.Delivery, again *inside.Again, was *attempts, s suspicion) (instead error, marked bool) {
	p := h.part
	limit := h.of.limit.Load()
	survived := s.mark > 0 && p.trying.mark == s.mark && p.trying.count == s.count-1
	crashes := s.count - s.mark
	switch {
	case s.mark == 0 && s.failures >= markedAfter, survived:
		if s.mark == 0 && !backoff.Sleep(ctx, arriving) { // so that those behind it are returned with it
			return h.keep(again, *was), false
		}
		h.of.log.Warn("hopback: a message may have crashed its workers; it is tried alone", "queue", p.queue, "message_id", message.ID(d.Message()), "deliveries", s.count)
		return h.returnAll(&inside.Again{Retries: was.retries, State: *was}, s.count), true
	case s.mark > 0 && limit >= 0 && crashes >= max(limit-markedAfter, leastTrials) && !was.blocked:
		p.poisons.tried(d)
		return h.giveUp(d, *was, retry.ReasonDeliveryLimit, fmt.Errorf("%d workers have crashed while they handled this message alone", crashes)), false
	}
	return nil, false
}

// survivor is what becomes of a delivery whose handler has returned err. One that counted as poison and
// stays in hand doesn't any more, and neither do the others.
func (h handler) survivor(d *client.Delivery, err error) error {
	if again, ok := err.(*inside.Again); ok && suspicionOf(d.Message()).poison() {
		return h.returnAll(again, noMark)
	}
	return err
}

// returnAll has the consumer return all that it holds, with a mark for this delivery.
func (h handler) returnAll(again *inside.Again, mark int64) error {
	p := h.part
	annotations := map[string]any{markKey: mark}
	for k, v := range again.Annotations {
		if k != markKey {
			annotations[k] = v
		}
	}
	if turn := p.current.Load(); turn != nil {
		p.of.do(func() {
			if p.turn == *turn && p.detach != nil && !p.detaching && !p.passing() {
				p.of.pass(p)
			}
		})
	}
	back := *again
	back.Annotations, back.Delay = annotations, 0
	return &back
}
