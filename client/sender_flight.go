package client

import (
	"context"
	"sync"

	"github.com/hopback/hopback/internal/userid"

	"github.com/hopback/hopback/internal/failure"
	"github.com/hopback/hopback/internal/link"
)

// flight is the messages in flight on one link. It sends what earlier links
// have left unanswered, then what is queued, and ends with the link. Then every message
// that it took is answered, or is kept to be sent again.
type flight struct {
	s       *sender
	sess    link.Session
	link    *flightLink
	answers *answers

	// mu is held by the goroutine that sends: the flight's goroutine, or a caller that finds nothing
	// before its message. It guards what follows.
	mu sync.Mutex
	// over says that nothing more is sent on this link.
	over bool
	rest []*outgoing // to be sent again, before what is queued
	// alone says that messages are sent one at a time, since one of them may be what the
	// broker has ended the last link for.
	alone bool
	end   landing
}

// landing is how a flight has ended.
type landing struct {
	// lost says that the link has ended, why what ended it, as far as a message has shown it.
	lost bool
	why  error
	// exhausted says that the session must be replaced by another.
	exhausted bool
	// unanswered is how many messages were sent and get no answer on this link.
	unanswered int
	// overdue says that the link was given up over an unanswered message, silent that
	// the connection gave no sign of life either.
	overdue, silent bool
}

func newFlight(s *sender, sess link.Session, link *flightLink) *flight {
	return &flight{
		s: s, sess: sess, link: link, answers: newAnswers(s, sess, link),
		rest: s.again, alone: s.poison && len(s.again) > 0,
	}
}

// run sends until the link ends, the session is worn out, or the sender is stopped and
// nobody waits for it any more.
func (f *flight) run() landing {
	// A caller that waits for answers when the sender is aborted gets none.
	unwatch := context.AfterFunc(f.s.ctx, f.link.end)
	defer unwatch()
	f.send()
	f.land()
	return f.end
}

// send is run without what follows.
func (f *flight) send() {
	stop := f.s.stop
	var idle <-chan struct{} // once the sender is stopped
	defer f.close()
	for {
		in := f.sess.Intake().Now()
		queue, more := f.first(in.Blocked)
		if more {
			continue
		}
		if f.Closed() || idle != nil && f.s.callers.Load() == 0 {
			return
		}
		select {
		case out := <-queue:
			f.put(out)
		case <-f.answers.more:
		case <-in.Changed:
		case <-f.answers.lost:
			f.lose()
			return
		case <-f.sess.Broken():
			f.lose()
			return
		case <-f.s.ctx.Done():
			return
		case <-stop:
			stop, idle = nil, f.s.idle
		case <-idle:
		}
	}
}

// first sends the first message that may be sent, and says whether there was one. If there was
// none, it returns the queue to wait for; nil: none may be sent now.
func (f *flight) first(blocked bool) (queue <-chan *outgoing, more bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		return nil, false
	}
	out, from, queue := f.next(blocked)
	if out == nil {
		f.over = f.end.lost
		return queue, false
	}
	f.over = !f.take(out, from)
	return nil, !f.over
}

// put sends a message that was queued. If a caller has found out by then that the link is over,
// the next link sends it.
func (f *flight) put(out *outgoing) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		f.rest = append(f.rest, out)
		return
	}
	f.over = !f.take(out, outQueued)
}

// try sends a message for its caller, past the queue, and says whether it has: not if another
// is before it.
func (f *flight) try(out *outgoing) bool {
	if f == nil || f.sess.Intake().Now().Blocked {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over || f.alone || len(f.rest) > 0 || len(f.s.queue) > 0 || f.answers.overdue.Load() || !f.answers.room() {
		return false
	}
	if f.over = !f.take(out, outQueued); f.over {
		f.answers.signal()
	}
	return true
}

// settle returns when no message is being handed to the link.
func (f *flight) settle() {
	if f != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
	}
}

// lose notes that the link has ended.
func (f *flight) lose() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.end.lost = true
}

func (f *flight) Closed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.over
}

// close has no caller send any more.
func (f *flight) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
}

// next returns the message to send now, and its state. If there is none, it returns the
// queue to wait for; nil: none may be sent now.
func (f *flight) next(blocked bool) (out *outgoing, from int32, queue <-chan *outgoing) {
	switch {
	case blocked, f.answers.overdue.Load(), f.alone && f.s.unanswered() > 0, !f.answers.room():
		return nil, 0, nil
	case len(f.rest) > 0:
		if failure.IsClosed(f.answers.lost) {
			f.end.lost = true
			return nil, 0, nil
		}
		out, f.rest = f.rest[0], f.rest[1:]
		return out, out.state.Load(), nil
	}
	f.alone = false
	select {
	case out = <-f.s.queue: // what is mostly so, and cheaper to ask for by itself
		return out, outQueued, nil
	default:
		return nil, 0, f.s.queue
	}
}

// take sends a message, and says whether to go on.
func (f *flight) take(out *outgoing, from int32) bool {
	s := f.s
	out.on.Store(nil) // what an earlier link had says nothing of this one
	if from != outQueued && from != outAgain || !out.state.CompareAndSwap(from, outSending) {
		return true // taken back, and its caller told so
	}
	if out.abandoned != nil && failure.IsClosed(out.abandoned) {
		s.answer(out, outSending, &failure.Error{Op: s.op, Target: s.target, Kind: failure.ErrNotSent, Err: failure.ErrConnectionLost})
		return true
	}
	m := out.msg
	login := f.sess.Login()
	if s.copies {
		m = userid.Signed(login, m)
	} else if login.Refuses(userid.Of(m)) {
		s.answer(out, outSending, s.userIDRefused(m, from == outAgain && out.by != login))
		return true
	}
	out.by = login
	x := f.answers.await(out, m, f.alone)
	handle, lost, err := f.link.Send(m, x)
	if err == nil {
		f.answers.taken(x, handle)
		f.end.exhausted = f.sess.Exhaust() >= 1
		return !f.end.exhausted
	}
	f.answers.drop(x)
	switch {
	case lost:
		f.end.lost = true
		if from == outQueued { // else an earlier link may have sent it
			err = &link.NeverSent{Err: err}
		}
		f.answers.lose(x, err)
		return false
	case from == outAgain: // on an earlier link it may have arrived
		s.answer(out, outSending, s.unknown(err))
	default:
		s.answer(out, outSending, failure.NewError(s.op, s.target, failure.ErrNotSent, err))
	}
	return true
}

// land waits for the answers, and leaves to the next flight what it is to send again, in
// the order of the first time.
func (f *flight) land() {
	a, end := f.answers, &f.end
	a.finish()
	end.why, end.unanswered = a.noAnswer, a.without
	end.overdue = a.overdue.Load()
	end.silent = end.overdue && a.silent()
	f.s.again = append(a.kept, f.rest...)
	f.s.poison = a.poison || f.alone
}
