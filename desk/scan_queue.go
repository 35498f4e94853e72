package desk

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/link"
)

const (
	// batch is how many messages are asked for at a time.
	batch = 2000
	// maxHold is how long a walk holds messages. RabbitMQ 4.3 takes back what is held for
	// 30 minutes, its default. A walk that takes longer begins anew.
	maxHold = 15 * time.Minute
	// openLimit bounds the opening of a walk, stepLimit one batch, and endLimit what gives
	// back at the end.
	openLimit = 2 * time.Minute
	stepLimit = 5 * time.Minute
	endLimit  = 2 * time.Minute
	// reachLimit bounds the time that the order is worth to a walk that is to stop.
	reachLimit = 5 * time.Minute
	// requeue is how many messages are given back with one command of the broker.
	requeue = 1000
	// turnBatch is how many messages are asked for at a time in a queue that is out of
	// order, so that few are held behind its end. maxTurns is how often an operation begins
	// again to put a queue in order: others who consume from it could make it do so for ever.
	turnBatch = 100
	maxTurns  = 3
)

// scan holds the messages of a queue from its head on, unsettled, and gives them back in
// the end.
//
// The broker numbers the deliveries of a session without gaps. So what is held is a range
// of numbers, however many there are, and costs this process nothing.
type scan struct {
	queue       string
	in          *dedicated.Conn
	r           *dedicated.Receiver
	began       time.Time
	first, last uint32
	held        bool // first and last are set
	more        bool // there may be more in the queue
	returned    bool // the last one was given back before
	turn        turn
	othersToo   bool              // other consumers were accepted
	alone       bool              // no others consumed from the queue when it had no more
	unread      string            // who else did, so that messages may not have been read
	passed      func(seen uint64) // called for each batch of reach, unless nil
}

// begin attaches to a queue.
func (d *Desk) begin(ctx context.Context, queue string) (*scan, error) {
	source, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	in, err := dedicated.Open(ctx, d.conn.Internal())
	if err != nil {
		return nil, scanError(queue, err)
	}
	r, err := in.Receiver(ctx, source)
	if err != nil {
		abandon(in)
		return nil, scanError(queue, err)
	}
	return &scan{queue: queue, in: in, r: r, began: time.Now()}, nil
}

// next shows the next batch of messages. more is false where the queue has no more. An
// error of visit ends the batch: what follows is held and isn't shown. A nil visit shows
// nothing. ctx isn't looked at amid a batch, but by visit.
func (w *scan) next(ctx context.Context, n int, visit func(dedicated.Delivery, *deadLetter) error) (more bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	if w.turn.found {
		n = min(n, turnBatch)
	}
	var latest dedicated.Delivery
	var opened *deadLetter // is latest, unless nil
	var stop error
	got, last, err := w.r.Fetch(ctx, uint32(n), func(v dedicated.Delivery) error {
		if !w.held {
			w.held, w.first = true, v.ID
		}
		latest, opened = v, nil
		if stop == nil && visit != nil || !w.turn.over {
			opened = open(v.Payload)
		}
		w.turn.see(v.ID, opened)
		if stop == nil && visit != nil {
			stop = visit(v, opened)
		}
		return nil
	})
	if last != nil {
		w.last = *last
	}
	if got > 0 {
		if opened == nil {
			opened = open(latest.Payload)
		}
		w.returned = opened.returns() > 0
	}
	w.more = got == uint32(n) && err == nil
	w.alone = w.alone && !w.more
	if w.turned() && stop == nil && err == nil && visit != nil {
		stop = errTurned
	}
	return w.more, errors.Join(err, stop)
}

// returns is how often the message was given back to its queue, by whom and however. It
// may be too high for a message that was never given back.
func (l *deadLetter) returns() uint64 {
	for _, key := range []string{"x-acquired-count", "x-delivery-count"} {
		switch v, _ := l.annotations.Get(key); v := v.(type) {
		case uint64:
			return v
		case uint32:
			return uint64(v)
		case int64:
			return uint64(max(v, 0))
		}
	}
	if l.bad != nil || l.header != nil && l.header.DeliveryCount > 0 {
		return 1
	}
	return 0
}

// reach goes on to where what was given back before ends. A queue delivers that first, and
// puts what is given back at its end. So a walk that stops amid of it would put what it has
// seen behind what it hasn't.
func (w *scan) reach() error {
	for began := time.Now(); w.held && w.more && (w.returned || w.turn.found && !w.turn.over) && time.Since(began) < reachLimit; {
		if _, err := w.next(context.Background(), batch, nil); err != nil {
			return err
		}
		if w.passed != nil {
			w.passed(uint64(w.last-w.first) + 1)
		}
	}
	return nil
}

// turned says that the messages which were given back before are out of order, and that
// all of them are held. end puts them in order.
func (w *scan) turned() bool { return w.turn.found && (w.turn.over || !w.more) }

// errTurned ends a walk that has found its queue out of order.
var errTurned = errors.New("the queue is out of order")

// end gives back what is held, in order, and closes the connection.
func (w *scan) end() error {
	err := w.reach()
	if w.held && err == nil {
		first := w.first
		if w.turned() {
			// What is behind the cut was before it.
			behind := w.last
			if w.turn.over {
				behind = w.turn.end - 1
			}
			err = errors.Join(w.back(w.turn.cut, behind), w.back(first, w.turn.cut-1))
			first = behind + 1
		}
		if first != w.last+1 {
			err = errors.Join(err, w.back(first, w.last))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	return errors.Join(err, w.in.Close(ctx))
}

// back gives back from first to last.
func (w *scan) back(first, last uint32) error {
	for at := first; ; {
		to := last
		if to-at >= requeue {
			to = at + requeue - 1
		}
		if err := w.r.Requeue(at, to); err != nil || to == last {
			return err
		}
		at = to + 1
	}
}

// abandon closes a connection that holds nothing, or whose messages go back by themselves.
func abandon(c *dedicated.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

// scanError is an error of package dedicated as one of package client.
func scanError(queue string, err error) error {
	var known *client.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &client.Error{Op: "walk", Target: queue, Kind: client.ErrConnectionLost, Err: err}
	var refused *dedicated.RefusedError
	if errors.As(err, &refused) {
		e.Condition, e.Text, e.Kind = refused.Condition, refused.Text, condition.OfLink(refused.Condition, refused.Text)
	}
	return e
}

// peekTries is how often a walk that changes nothing is begun again after the loss of its
// connection.
const peekTries = 5

// backoff is before a walk that is begun again.
var backoff = link.Backoff{Min: 200 * time.Millisecond, Max: 10 * time.Second}

// peeking is what a look tells. found and passed may be nil.
type peeking struct {
	reset func() // before each walk
	visit func(dedicated.Delivery, *deadLetter) error
	// found says that all was visited that is wanted. The messages are still held. It is
	// called once, although the look may begin again because the connection is lost.
	found func()
	// passed says how many messages the walk has read, while it goes on to keep the order.
	passed func(seen uint64)
	// unread gets what walk.unread is, before found is called.
	unread *string
	accept []WarningCode
}

// peek shows all messages of a queue from its head on, until visit returns errStop. It
// begins again where the connection is lost, after reset.
func (d *Desk) peek(ctx context.Context, queue string, l peeking) error {
	if found := l.found; found != nil {
		called := false
		l.found = func() {
			if !called {
				called = true
				found()
			}
		}
	}
	turns := 0
	for try := range link.Tries(ctx, backoff.Pause) {
		l.reset()
		err := d.peekOnce(ctx, queue, l, turns < maxTurns)
		if errors.Is(err, errTurned) {
			turns++
			try.Worked()
			continue
		}
		if err != nil && ctx.Err() != nil {
			break
		}
		if err == nil || try.Attempt() == peekTries || !errors.Is(err, client.ErrConnectionLost) {
			return err
		}
		d.log.Warn("hopback: the connection was lost while a queue was looked into, beginning again", "queue", queue, "error", err)
	}
	return context.Cause(ctx)
}

func (d *Desk) peekOnce(ctx context.Context, queue string, peek peeking, turn bool) error {
	w, err := d.begin(ctx, queue)
	if err != nil {
		return err
	}
	w.passed, w.othersToo = peek.passed, slices.Contains(peek.accept, WarningConsumers)
	var own error // of visit, such as a full disk
	for more := true; more && err == nil; {
		more, err = w.next(ctx, batch, func(v dedicated.Delivery, l *deadLetter) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			own = peek.visit(v, l)
			return own
		})
		if errors.Is(err, errTurned) && !turn {
			err = nil
		}
		if err == nil && !more {
			more = d.again(ctx, w)
		}
		if err == nil && time.Since(w.began) > maxHold {
			err = &holdError{Queue: queue, After: maxHold}
		}
	}
	if errors.Is(err, errStop) {
		err = nil
	}
	if peek.unread != nil {
		*peek.unread = w.unread
	}
	if err == nil && peek.found != nil {
		peek.found()
	}
	back := w.end()
	if err == nil || errors.Is(err, errTurned) && back != nil {
		err = back
	}
	if own != nil && !errors.Is(own, errStop) {
		return own
	}
	if ctx.Err() != nil || errors.Is(err, errTurned) || errors.As(err, new(*holdError)) {
		return err
	}
	return scanError(queue, err)
}

// holdError says that a walk stopped because it had held its messages for After, the limit
// of 15 minutes. A List then has the messages that were read. Callers see it as
// context.DeadlineExceeded.
type holdError struct {
	Queue string
	After time.Duration
}

// Is reports whether target is context.DeadlineExceeded.
func (e *holdError) Is(target error) bool { return target == context.DeadlineExceeded }

func (e *holdError) Error() string {
	return "hopback: looking into the queue " + e.Queue + " ended after " + e.After.String() + ": RabbitMQ takes back what is held longer"
}
