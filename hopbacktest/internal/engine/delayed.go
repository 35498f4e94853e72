package engine

import (
	"cmp"
	"container/heap"
	"maps"
	"slices"
)

// delayed has the messages that wait for their time, by time and then by index. Consumers can
// claim those that were parked under a token.
type delayed struct {
	h delayHeap
	// parked messages of a token, oldest first. A claimed one isn't among them.
	parked map[string][]*delayItem
}

// delayItem is a message that waits.
type delayItem struct {
	at    int64
	e     *entry
	token string // that it is parked under; only if it is among the parked or claimed ones
	index int    // in the heap; -1 once it has left
}

type delayHeap []*delayItem

func (h delayHeap) Len() int           { return len(h) }
func (h delayHeap) Less(i, j int) bool { return h[i].before(h[j]) < 0 }
func (h delayHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *delayHeap) Push(x any) {
	item := x.(*delayItem)
	item.index = len(*h)
	*h = append(*h, item)
}

func (h *delayHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	x.index = -1
	return x
}

func (d *delayItem) before(other *delayItem) int {
	return cmp.Or(cmp.Compare(d.at, other.at), cmp.Compare(d.e.index, other.e.index))
}

func (d *delayed) len() int { return len(d.h) }

func (d *delayed) push(at int64, e *entry) { heap.Push(&d.h, &delayItem{at: at, e: e}) }

// park is push for a message that can be claimed by its token.
func (d *delayed) park(at int64, e *entry, token string) {
	item := &delayItem{at: at, e: e, token: token}
	heap.Push(&d.h, item)
	if d.parked == nil {
		d.parked = map[string][]*delayItem{}
	}
	d.parked[token] = append(d.parked[token], item)
}

// next is when the first one is due, 0 if there is none.
func (d *delayed) next() int64 {
	if len(d.h) == 0 {
		return 0
	}
	return d.h[0].at
}

// pop takes the first one, whether it is due or not.
func (d *delayed) pop() *entry {
	if len(d.h) == 0 {
		return nil
	}
	item := heap.Pop(&d.h).(*delayItem)
	if all := d.parked[item.token]; len(all) > 0 {
		if all = slices.DeleteFunc(all, func(other *delayItem) bool { return other == item }); len(all) == 0 {
			delete(d.parked, item.token)
		} else {
			d.parked[item.token] = all
		}
	}
	return item.e
}

// take takes one that a consumer has claimed, unless it has left.
func (d *delayed) take(item *delayItem) (*entry, bool) {
	if item.index < 0 {
		return nil, false
	}
	heap.Remove(&d.h, item.index)
	return item.e, true
}

// claim gives the messages that are parked under the tokens to a consumer. RabbitMQ ignores
// tokens that it doesn't know.
func (d *delayed) claim(c *Consumer, tokens []string) {
	for _, token := range tokens {
		items := d.parked[token]
		if len(items) == 0 {
			continue
		}
		delete(d.parked, token)
		if c.claims == nil {
			c.claims = map[string][]*delayItem{}
		}
		c.claims[token] = append(c.claims[token], items...)
	}
}

// release returns to their tokens what a consumer has claimed and not got.
func (d *delayed) release(c *Consumer) {
	for token, items := range c.claims {
		items = slices.DeleteFunc(items, func(item *delayItem) bool { return item.index < 0 })
		if len(items) > 0 {
			d.parked[token] = append(items, d.parked[token]...)
		}
	}
	c.claims = nil
}

// claimed takes the next message that a consumer has claimed: by token, and then the oldest.
func (d *delayed) claimed(c *Consumer) *entry {
	for _, token := range slices.Sorted(maps.Keys(c.claims)) {
		for items := c.claims[token]; len(items) > 0; items = items[1:] {
			e, ok := d.take(items[0])
			if !ok {
				continue
			}
			if c.claims[token] = items[1:]; len(items) == 1 {
				delete(c.claims, token)
			}
			return e
		}
		delete(c.claims, token)
	}
	return nil
}

// deliverClaimed delivers what consumers have claimed, before everything that is ready.
func (q *queue) deliverClaimed() {
	for _, c := range q.consumers {
		for len(c.claims) > 0 && c.wants() {
			e := q.delayed.claimed(c)
			if e == nil {
				break
			}
			q.bytes -= q.size(e.msg)
			q.deliver(c, e)
		}
	}
}
