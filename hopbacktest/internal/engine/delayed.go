package engine

import "container/heap"

// delayed has the messages that wait for their time, by time and then by index.
type delayed struct{ h delayHeap }

type delayItem struct {
	at int64
	e  *entry
}

type delayHeap []delayItem

func (h delayHeap) Len() int { return len(h) }
func (h delayHeap) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].e.index < h[j].e.index
}
func (h delayHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *delayHeap) Push(x any)   { *h = append(*h, x.(delayItem)) }
func (h *delayHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = delayItem{}
	*h = (*h)[:last]
	return x
}

func (d *delayed) len() int { return len(d.h) }

func (d *delayed) push(at int64, e *entry) { heap.Push(&d.h, delayItem{at, e}) }

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
	return heap.Pop(&d.h).(delayItem).e
}
