package rpc

import (
	"fmt"
	"sync"

	"github.com/hopback/hopback/client"
)

// remembered is how many finished calls are remembered, to distinguish a late reply from a second
// one.
const remembered = 4096

// calls are those of one requester, by correlation-id.
type calls struct {
	mu    sync.Mutex
	byID  map[string]*call
	over  []string // the finished calls, starting with the oldest at next
	next  int
	stats Stats
}

func newCalls() *calls { return &calls{byID: map[string]*call{}} }

// call is one Call. The mu of calls protects the fields after events.
type call struct {
	id string
	// events has room for all that can come until the next attempt: the reply, and the loss
	// of the links.
	events chan event

	links    *links // whose address the request names as reply-to; nil between attempts
	cancel   func() // ends the publish of the attempt
	answered bool
	tooLarge uint64 // the size of a reply without its body; 0: it has one
	left     bool   // its caller has left
}

// event is a reply, or why none can come.
type event struct {
	reply *client.Message
	lost  error
}

// enroll starts an attempt to send c's request. ok is false if l is lost already. It returns the
// reply if an earlier attempt got it in the meantime.
func (s *calls) enroll(c *call, l *links, cancel func()) (reply *client.Message, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.links, c.cancel = nil, nil
	for len(c.events) > 0 {
		if e := <-c.events; e.reply != nil {
			return e.reply, true
		}
	}
	for l.next != nil {
		l = l.next
	}
	if l.lost {
		return nil, false
	}
	if s.byID[c.id] == nil {
		s.byID[c.id] = c
		s.stats.Calls++
		s.stats.Waiting++
	}
	c.links, c.cancel = l, cancel
	return nil, true
}

// complete is nil if c's reply has a body, as it does unless it is too large.
func (s *calls) complete(c *call, to string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.tooLarge == 0 {
		return nil
	}
	return fmt.Errorf("hopback: call %s: %w: it has %d bytes, and Config.MaxMessageSize allows fewer", to, ErrUndecodable, c.tooLarge)
}

// leave ends a call.
func (s *calls) leave(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[c.id] != c {
		return // it was never sent
	}
	c.left, c.links, c.cancel = true, nil, nil
	s.stats.Waiting--
	if len(s.over) < remembered {
		s.over = append(s.over, c.id)
		return
	}
	delete(s.byID, s.over[s.next])
	s.over[s.next] = c.id
	s.next = (s.next + 1) % remembered
}

// dispatch passes a reply to its call. Only the first counts. tooLarge is that of link.Reply.
func (s *calls) dispatch(m *client.Message, tooLarge uint64) {
	var c *call
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.Properties != nil {
		if id, ok := m.Properties.CorrelationID.(string); ok {
			c = s.byID[id]
		}
	}
	switch {
	case c == nil:
		s.stats.Strays++
	case c.answered:
		s.stats.Duplicates++
	case c.left:
		s.stats.Late++
		c.answered = true
	default:
		c.answered, c.tooLarge = true, tooLarge
		s.stats.Replies++
		c.events <- event{reply: m}
		if c.cancel != nil {
			c.cancel()
		}
	}
}

// lose notifies the calls that wait for a reply on l that none can come.
func (s *calls) lose(l *links, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.lost {
		return
	}
	l.lost = true
	for _, c := range s.byID {
		if c.links != l {
			continue
		}
		c.links = nil
		if c.answered {
			continue
		}
		c.events <- event{lost: why}
		if c.cancel != nil {
			c.cancel()
		}
	}
}

// move makes the calls that wait for a reply on one session's links wait on those of the
// next, which has the same queue.
func (s *calls) move(from, to *links) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from.next = to
	for _, c := range s.byID {
		if c.links == from {
			c.links = to
		}
	}
}

func (s *calls) snapshot() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

func (s *calls) count(change func(*Stats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.stats)
}
