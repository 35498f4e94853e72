package engine

import "slices"

// service has the consumers that wait for messages: those of the highest priority in
// turn, before all others.
type service struct{ levels []*level }

type level struct {
	priority int64
	waiting  ring[*Consumer]
}

func (s *service) add(c *Consumer) {
	if c.waiting || !c.wants() {
		return
	}
	c.waiting = true
	for _, l := range s.levels {
		if l.priority == c.priority {
			l.waiting.push(c)
			return
		}
	}
	l := &level{priority: c.priority}
	l.waiting.push(c)
	s.levels = append(s.levels, l)
	slices.SortFunc(s.levels, func(a, b *level) int {
		if a.priority > b.priority {
			return -1
		}
		return 1
	})
}

// next takes the consumer whose turn it is, nil if none wants a message.
func (s *service) next() *Consumer {
	for _, l := range s.levels {
		for l.waiting.len() > 0 {
			c := l.waiting.pop()
			c.waiting = false
			if c.wants() {
				return c
			}
		}
	}
	return nil
}

// maxUntaken is how many deliveries of a consumer may wait for the wire to take them. So a
// client that grants much credit and reads nothing has no more of them made for it.
const maxUntaken = 1000

// wants says whether the consumer can be given a message.
func (c *Consumer) wants() bool {
	return c.attached && c.credit > 0 && c.untaken < maxUntaken && !c.timedOut && !c.quiescing && (!c.queue.single || c.queue.active == c)
}
