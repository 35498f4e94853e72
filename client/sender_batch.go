package client

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/Azure/go-amqp"

	"github.com/hopback/hopback/internal/failure"
)

// batch is the messages of one call of doAll.
type batch struct {
	s       *sender
	results func(i int, err error)
	out     []outgoing
	end     error // why no more is sent

	mu       sync.Mutex
	open     int // without a result
	failures []BatchFailure
	done     chan struct{} // closed when open is 0
}

// DoAll is do for n messages, which message returns one after the other. Many of them are in
// flight at once. results is called once for each of them. doAll returns those that weren't
// accepted, by index.
func (s *sender) DoAll(ctx context.Context, n int, message func(i int) (*amqp.Message, error), results func(i int, err error)) []BatchFailure {
	b := &batch{s: s, results: results, out: make([]outgoing, n), open: n, done: make(chan struct{})}
	if err := s.enter(); err != nil {
		b.rest(0, err)
		return b.failures
	}
	defer s.exit()
	for i := range n {
		if err := b.ended(ctx); err != nil {
			b.rest(i, err)
			break
		}
		if m, err := message(i); err != nil {
			b.result(i, m, err)
		} else {
			b.put(ctx, i, m)
		}
	}
	b.wait(ctx)
	slices.SortFunc(b.failures, func(x, y BatchFailure) int { return cmp.Compare(x.Index, y.Index) })
	return b.failures
}

// Answered is called by the sender.
func (b *batch) Answered(o *outgoing, err error) {
	m := o.msg
	o.msg = nil // it isn't needed any more, and the batch may go on for long
	b.result(o.index, m, err)
}

// result notes what became of the i-th message, which may be nil.
func (b *batch) result(i int, m *amqp.Message, err error) {
	b.results(i, err)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		f := BatchFailure{Index: i, Err: err}
		if m != nil && m.Properties != nil {
			f.ID = m.Properties.MessageID
		}
		b.failures = append(b.failures, f)
	}
	if b.open--; b.open == 0 {
		close(b.done)
	}
}

// ended is why no more should be sent, or nil.
func (b *batch) ended(ctx context.Context) error {
	if b.end != nil {
		return b.end
	}
	if ctx.Err() != nil {
		return b.s.ended(failure.ErrNotSent, ctx)
	}
	// Messages that are queued while the link is refused fail at the next attempt to open it. The rest of the batch fails now, rather than after one attempt per full queue.
	if refusal := b.s.refusal.Load(); refusal != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, f := range b.failures {
			if f.Err == error(refusal) {
				return refusal
			}
		}
	}
	return nil
}

// put queues a message, within ctx.
func (b *batch) put(ctx context.Context, i int, m *amqp.Message) {
	o := &b.out[i]
	o.msg, o.index, o.to = m, i, b
	if err := b.s.put(ctx, o); err != nil {
		o.state.Store(outOver)
		b.end = err
		b.result(i, m, err)
	}
}

// rest ends all messages from i on, which weren't sent.
func (b *batch) rest(i int, err error) {
	for ; i < len(b.out); i++ {
		b.result(i, nil, err)
	}
}

// wait waits for the answers, within ctx. What is unanswered then is withdrawn.
func (b *batch) wait(ctx context.Context) {
	select {
	case <-b.done:
		return
	case <-ctx.Done():
	case <-b.s.ctx.Done():
	}
	for i := range b.out {
		o := &b.out[i]
		if o.to == nil {
			continue // wasn't queued
		}
		if m, kind := b.s.leave(o); kind != nil {
			err := b.s.closed(kind)
			if ctx.Err() != nil {
				err = b.s.ended(kind, ctx)
			}
			b.result(i, m, err)
		}
	}
	<-b.done
}
