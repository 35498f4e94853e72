package client

import (
	"context"
	"errors"
	"time"
)

// The credit of a link session is granted and revoked here. flow is held from the moment
// when the window says what to grant until that is written, so that no credit follows a drain:
// the broker would answer that with a count that nobody waits for.

// grant grants what the window has room for, or revokes what is too much.
func (s *linkSession) grant() { s.adjust(false) }

// checkCredit notes whether credit is to be granted or revoked, now or after the wait for more. It is
// called with mu held.
func (s *linkSession) checkCredit(more bool, then *wakes) {
	then.credit = s.window.due(more)
	if !then.credit && !more && !s.gathering && s.window.gathers() {
		s.gathering = true
		then.gather = s.consumer.estimate.gather()
	}
}

// grantAfter grants what there is room for after a while.
func (s *linkSession) grantAfter(d time.Duration) {
	if s.gathered != nil {
		s.gathered.Reset(d)
		return
	}
	s.gathered = time.AfterFunc(d, func() {
		s.mu.Lock()
		s.gathering = false
		room := s.window.room()
		s.mu.Unlock()
		if room > 0 {
			s.adjust(true)
		}
	})
}

// nudge has a flow follow what was settled, if more can be delivered.
func (s *linkSession) nudge() { s.adjust(true) }

func (s *linkSession) adjust(flow bool) {
	s.flow.Lock()
	defer s.flow.Unlock()
	s.mu.Lock()
	credit, reclaim := s.window.take(time.Now(), flow)
	var done chan struct{}
	if reclaim {
		done = make(chan struct{})
		s.window.draining = done
	}
	s.mu.Unlock()
	switch {
	case credit > 0:
		// An error means that the link is gone, which its receive notices.
		_ = s.link.IssueCredit(uint32(credit))
	case reclaim:
		go s.reclaim(done)
	}
}

// reclaim takes credit back, and then grants what there is room for.
func (s *linkSession) reclaim(done chan struct{}) {
	answered := s.drainLink(s.dead, lowerTimeout, context.Background())
	s.mu.Lock()
	s.window.drained(answered)
	close(done)
	s.mu.Unlock()
	if !answered {
		s.die(errUndrained)
		return
	}
	s.grant()
}

// drainLink asks the broker to use or give up its credit, and waits for the answer
// until expedite is closed, or for limit. It reports whether the wait ended otherwise than by
// the limit. While the deliveries that are held leave no room for those that the broker has to
// send before its answer (see link.ReceiverLink.Full), the wait ends with patience instead.
func (s *linkSession) drainLink(expedite <-chan struct{}, limit time.Duration, patience context.Context) (answered bool) {
	for {
		wait := limit
		if s.link.Full() {
			if end, ok := patience.Deadline(); ok {
				wait = min(wait, time.Until(end))
			}
			if patience.Err() != nil {
				wait = 0
			}
		}
		answered = s.drainOnce(expedite, wait)
		if answered || patience.Err() != nil || !s.link.Full() {
			return answered
		}
	}
}

func (s *linkSession) drainOnce(expedite <-chan struct{}, limit time.Duration) (answered bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-expedite:
			cancel()
		case <-done:
		}
	}()
	return !errors.Is(s.link.Drain(ctx), context.DeadlineExceeded)
}

// stopCredit grants no more credit, and revokes what is granted, unless expedite is closed. patience
// is drainLink's.
func (s *linkSession) stopCredit(expedite <-chan struct{}, patience context.Context) {
	s.flow.Lock()
	s.mu.Lock()
	s.window.stopped = true
	running, granted := s.window.draining, s.window.granted
	s.mu.Unlock()
	s.flow.Unlock()
	if running != nil {
		limit := time.NewTimer(drainTimeout)
		defer limit.Stop()
		select {
		case <-running:
		case <-expedite:
		case <-limit.C:
		}
		return
	}
	if granted > 0 {
		answered := s.drainLink(expedite, drainTimeout, patience)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.window.unanswered = !answered
	}
}

// undrained reports whether nobody knows what credit the broker has left.
func (s *linkSession) undrained() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.window.unanswered
}

// resumeCredit undoes stopCredit.
func (s *linkSession) resumeCredit() {
	s.mu.Lock()
	unanswered := s.window.unanswered
	if !unanswered {
		s.window.resume()
	}
	s.mu.Unlock()
	if unanswered {
		s.die(errUndrained)
		return
	}
	s.grant()
}

const (
	// drainTimeout bounds the wait for the broker's answer to the drain at the end.
	drainTimeout = 10 * time.Second
	// lowerTimeout bounds it while the link lives on: it is lost without the answer.
	lowerTimeout = 30 * time.Second
)

// errUndrained is why a link counts as lost whose credit nobody knows.
var errUndrained = errors.New("the broker hasn't answered the drain of the link")
