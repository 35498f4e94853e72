package client

import (
	"time"

	"github.com/hopback/hopback/internal/link"
)

// settler writes the settlements of a link session, on one goroutine, so that they are written in order,
// and so that nobody who has decided about a delivery waits for the connection. The goroutine starts with
// the first settlement, and stops when nothing has been delivered for a while. deliveries.mu guards all
// fields that change.
type settler struct {
	of        *deliveries
	next      chan settlement // to it while it is idle; has room for one
	exited    chan struct{}   // closed when it has ended, and doesn't start again
	started   bool            // it runs
	idle      bool
	finishing bool // no further settlement will come
	// backlog is what waits while it isn't idle, in order. spare was before.
	backlog, spare []settlement
}

type settlement struct {
	delivery *delivery
	d        link.Disposition
}

// finished is what a worker has done.
type finished struct {
	delivery *delivery // nil: nothing
	// settle says that d is to be written.
	settle bool
	d      link.Disposition
	// again says that the handler is called again after a delay.
	again bool
	after time.Duration
	// took is for how long the handler has run; 0: it hasn't.
	took time.Duration
}

// queue has x written. It is called with mu held.
func (t *settler) queue(x settlement, then *followUps) {
	switch {
	case t.of.over():
		then.late = x.delivery
	case t.finishing:
	case !t.started:
		t.started = true
		go t.run(x)
	case t.idle:
		t.idle = false
		then.settle = x
	default:
		t.backlog = append(t.backlog, x)
	}
}

// finish returns when all that was to be settled is written.
func (t *settler) finish() {
	t.of.mu.Lock()
	t.finishing = true
	started, idle := t.started, t.idle
	t.of.mu.Unlock()
	if idle {
		close(t.next)
	}
	if started {
		<-t.exited
	}
}

// run writes settlements until finish is called, or the link session rests.
func (t *settler) run(first settlement) {
	restful := time.NewTimer(restAfter)
	defer restful.Stop()
	one := []settlement{first}
	for batch := one; batch != nil; {
		for i := range batch {
			t.write(&batch[i])
		}
		more, ended := t.written(batch)
		if more != nil || ended {
			batch = more
			continue
		}
		x, ok := t.await(restful)
		if !ok {
			return
		}
		if x.delivery == nil {
			break
		}
		one[0] = x
		batch = one
	}
	close(t.exited)
}

// await waits for a settlement. It returns none if no others follow, and false if the settler
// has stopped until there is another.
func (t *settler) await(restful *time.Timer) (x settlement, ok bool) {
	for {
		select {
		case x = <-t.next:
			return x, true
		case <-restful.C:
			left := t.rest()
			if left == 0 {
				return x, false
			}
			restful.Reset(left)
		}
	}
}

// restAfter is how long nothing may have been delivered until an idle consumer stops the goroutines
// that it starts when it needs them.
const restAfter = 15 * time.Second

// rest stops the settler and the workers that are idle, if nothing is unsettled and nothing has been
// delivered for a while. Otherwise it returns when to look again.
func (t *settler) rest() (left time.Duration) {
	t.of.mu.Lock()
	left = restAfter - time.Since(t.of.credit.window.last)
	if !t.idle || t.finishing || left <= 0 && t.of.credit.window.unsettled+t.of.aside > 0 {
		left = restAfter
	}
	if left > 0 {
		t.of.mu.Unlock()
		return left
	}
	t.started, t.idle = false, false
	t.backlog, t.spare = nil, nil
	if t.of.leases != nil && len(t.of.leases) == 0 {
		t.of.leases = leases{}
	}
	idle := t.of.workers.retire()
	t.of.mu.Unlock()
	for _, w := range idle {
		w.wake()
	}
	return 0
}

// write writes a settlement, or reports that it is too late for it. x has no delivery then.
func (t *settler) write(x *settlement) {
	var err error
	if t.of.over() {
		err = t.of.why
	} else {
		err = t.of.link.Settle(x.delivery.id, x.d)
	}
	if err == nil {
		x.delivery.watched.Load().Settled(nil)
		return
	}
	t.of.die(err)
	x.delivery.linkLost()
	x.delivery = nil
}

// written notes that settlements were written, which gives the broker room for more. It
// returns those that follow; ended says that no others do.
func (t *settler) written(batch []settlement) (more []settlement, ended bool) {
	var then followUps
	t.of.mu.Lock()
	for _, x := range batch {
		if x.delivery != nil {
			t.of.forget(x.delivery, &then)
		}
	}
	if len(t.backlog) > 0 {
		more = t.backlog
		clear(t.spare)
		t.backlog, t.spare = t.spare[:0], more
	} else {
		t.idle, ended = !t.finishing, t.finishing
	}
	t.of.credit.check(more != nil, &then)
	t.of.mu.Unlock()
	t.of.followUp(&then)
	return more, ended
}
