package desk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
	"github.com/hopback/hopback/internal/dedicated"
	"github.com/hopback/hopback/internal/inside"
)

const (
	// batch is how many messages a scan requests at a time.
	batch = 2000
	// maxHold is how long a scan holds messages. RabbitMQ 4.3 reclaims messages that are held
	// for 30 minutes, its default. A scan that takes longer starts over.
	maxHold = 15 * time.Minute
	// openLimit is the timeout for opening a scan, stepLimit for one batch, and endLimit for
	// returning the messages at the end.
	openLimit = 2 * time.Minute
	stepLimit = 5 * time.Minute
	endLimit  = 2 * time.Minute
	// reachLimit is how long a stopping scan reads on to keep the order.
	reachLimit = 5 * time.Minute
	// requeue is how many messages one settlement returns.
	requeue = 1000
	// turnBatch is how many messages a scan requests at a time in a queue that is out of
	// order, so that few are held behind the turned part. maxTurns is how often an operation
	// starts over to restore the order: with other consumers that might never end.
	turnBatch = 100
	maxTurns  = 3
)

// scan holds the messages of a queue from its head on, unsettled, and returns them at the end.
//
// The broker numbers the deliveries of a session without gaps. So the held messages are a
// range of numbers, which needs no memory, however many there are.
type scan struct {
	queue       string
	in          *dedicated.Conn
	r           *dedicated.Receiver
	began       time.Time
	first, last uint32
	held        bool // first and last are set
	more        bool // there may be more in the queue
	returned    bool // an earlier scan returned the last one
	turn        turn
	accept      []WarningCode     // what the caller accepts
	alone       bool              // there was no other consumer at the queue's end
	unread      string            // why messages may not have been read
	passed      func(seen uint64) // if not nil, called for each batch of reach
}

// begin attaches to a queue.
func (d *Desk) begin(ctx context.Context, queue string) (*scan, error) {
	source, err := address.Queue(queue).Build()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openLimit)
	defer cancel()
	in, err := dedicated.Open(ctx, inside.Of(d.conn))
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

// next passes the next batch of messages to visit, unless visit is nil. more is false if the
// queue has no more messages. After an error of visit, the rest of the batch is held and not
// visited. Within a batch, only visit can check ctx.
func (w *scan) next(ctx context.Context, n int, visit func(dedicated.Delivery, *deadLetter) error) (more bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepLimit)
	defer cancel()
	if w.turn.found {
		n = min(n, turnBatch)
	}
	var latest dedicated.Delivery
	var opened *deadLetter // latest, decoded, or nil
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

// returns is how often the message was returned to its queue, by any consumer and with any
// outcome. It may be too high for a message that was never returned.
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

// reach reads on to the end of the messages that earlier scans returned. A queue delivers
// them first, and puts newly returned ones behind them. So a scan that stopped in between
// would put the messages it has read behind those it hasn't.
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

// turned reports whether the returned messages are out of order, and all of them are held. end
// then restores the order.
func (w *scan) turned() bool { return w.turn.found && (w.turn.over || !w.more) }

// errTurned stops a scan that has found its queue out of order.
var errTurned = errors.New("the queue is out of order")

// end returns the held messages in order, and closes the connection.
func (w *scan) end() error {
	err := w.reach()
	if w.held && err == nil {
		first := w.first
		if w.turned() {
			// The messages behind the cut belong before the others.
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

// back returns the deliveries from first to last.
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

// abandon closes a connection that holds no messages, or lets the broker requeue them.
func abandon(c *dedicated.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

// scanError turns an error of package dedicated into one of package client.
func scanError(queue string, err error) error {
	var known *client.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &client.Error{Op: "scan", Target: queue, Kind: client.ErrConnectionLost, Err: err}
	var refused *dedicated.RefusedError
	if errors.As(err, &refused) {
		e.Condition, e.Text, e.Kind = refused.Condition, refused.Text, condition.OfLink(refused.Condition, refused.Text)
	}
	return e
}

// peekTries is how often a scan that changes nothing is tried when its connection is lost.
const peekTries = 5

// pauses is the delay before a scan starts over.
var pauses = backoff.Exponential{Min: 200 * time.Millisecond, Max: 10 * time.Second}

// peeking are the callbacks of peek. found and passed may be nil.
type peeking struct {
	reset func() // before each scan
	visit func(dedicated.Delivery, *deadLetter) error
	// found is called when everything needed was visited. The messages are still held. It is
	// called once, even if peek starts over after a lost connection.
	found func()
	// passed gets the number of messages read while the scan reads on to keep the order.
	passed func(seen uint64)
	// unread is set to scan.unread before found is called.
	unread *string
	accept []WarningCode
}

// peek visits all messages of a queue from its head on, until visit returns errStop. After a
// lost connection it calls reset and starts over.
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
	for try := range backoff.Tries(ctx, pauses.Pause) {
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
		d.log.Warn("hopback: the connection was lost while a queue was read; reading it again from the start", "queue", queue, "error", err)
	}
	return context.Cause(ctx)
}

func (d *Desk) peekOnce(ctx context.Context, queue string, peek peeking, turn bool) error {
	w, err := d.begin(ctx, queue)
	if err != nil {
		return err
	}
	w.passed, w.accept = peek.passed, peek.accept
	var own error // visit's error, such as a full disk
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

// holdError means that a scan stopped since it had held its messages for After, the limit of
// 15 minutes. A List then has the messages that were read. Callers match it with
// context.DeadlineExceeded.
type holdError struct {
	Queue string
	After time.Duration
}

// Is reports whether target is context.DeadlineExceeded.
func (e *holdError) Is(target error) bool { return target == context.DeadlineExceeded }

func (e *holdError) Error() string {
	return fmt.Sprintf("hopback: reading the queue %q stopped after %s, since RabbitMQ reclaims messages that are held too long; "+
		"the queue is too large or the connection too slow to read all of it in that time", e.Queue, e.After)
}
