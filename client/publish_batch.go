package client

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client/instrument"
	"github.com/hopback/hopback/client/internal/instrumented"
)

// BatchError lists the messages of a PublishAll that were not accepted. All others
// were.
type BatchError struct {
	// Of is how many messages PublishAll was called with.
	Of int
	// Failed holds the messages that were not accepted, ordered by Index.
	Failed []BatchFailure
}

// BatchFailure is one message that wasn't accepted.
type BatchFailure struct {
	// Index is the index of the value in PublishAll's vs.
	Index int
	// ID is the message-id. It is nil if the value was never encoded.
	ID any
	// Err is the error that Publish would have returned. SafeToRetry(Err) reports
	// whether sending the value again can't make a duplicate.
	Err error
}

func (e *BatchError) Error() string {
	first := e.Failed[0]
	return fmt.Sprintf("hopback: publish: %d of %d messages were not accepted, the first at index %d: %v", len(e.Failed), e.Of, first.Index, first.Err)
}

// Unwrap returns the error of each message in Failed.
func (e *BatchError) Unwrap() []error {
	errs := make([]error, len(e.Failed))
	for i, f := range e.Failed {
		errs[i] = f.Err
	}
	return errs
}

// SafeToRetry reports whether no message of the batch can have been stored. If so,
// sending the whole batch again makes no duplicate. If not, look at the errors in
// Failed.
func (e *BatchError) SafeToRetry() bool {
	if len(e.Failed) < e.Of {
		return false
	}
	return !slices.ContainsFunc(e.Failed, func(f BatchFailure) bool { return !SafeToRetry(f.Err) })
}

// batch is a PublishAll under way.
type batch struct {
	s   *sender
	out []outgoing
	end error // why no more is sent

	// hooks, followed and each are set where an Instrument follows the batch.
	hooks    *hooks
	followed instrument.Batch
	each     []instrument.Publication

	mu       sync.Mutex
	open     int // without an answer
	failures []BatchFailure
	done     chan struct{} // closed when open is 0
}

func newBatch(s *sender, n int) *batch {
	return &batch{s: s, out: make([]outgoing, n), open: n, done: make(chan struct{})}
}

// observe has an Instrument follow the batch; none if followed is nil.
func (b *batch) observe(h *hooks, followed instrument.Batch) {
	if followed != nil {
		b.hooks, b.followed, b.each = h, followed, make([]instrument.Publication, len(b.out))
	}
}

// begin has the Instrument follow the i-th message, which isn't checked yet.
func (b *batch) begin(i int, to address.Address, m *Message) {
	if b.followed != nil {
		complete(m)
		b.each[i] = b.hooks.publishOf(b.followed, instrumented.New(to, m, b.hooks.server.Load()))
	}
}

// answered is called by the sender.
func (b *batch) answered(o *outgoing, err error) {
	m := o.msg
	o.msg = nil // it isn't needed any more, and the batch may go on for long
	b.tell(o.index, m, err)
}

func (b *batch) failed(i int, m *Message, err error) { b.tell(i, m, err) }

func (b *batch) tell(i int, m *Message, err error) {
	if b.followed != nil {
		b.hooks.published(b.each[i], err)
	}
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
		return b.s.ended(ErrNotSent, ctx)
	}
	// What is queued while the link is refused is told so at the next attempt to open
	// it; the rest needn't wait for as many attempts as there are queues full of it.
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
func (b *batch) put(ctx context.Context, i int, m *Message) {
	o := &b.out[i]
	o.msg, o.index, o.to = m, i, b
	if err := b.s.put(ctx, o); err != nil {
		o.state.Store(outOver)
		b.end = err
		b.failed(i, m, err)
	}
}

// rest tells all from i on that they weren't sent.
func (b *batch) rest(i int, err error) {
	for ; i < len(b.out); i++ {
		b.failed(i, nil, err)
	}
}

// wait waits for the answers, within ctx. What is unanswered then is taken back.
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
			b.tell(i, m, err)
		}
	}
	<-b.done
}

// err is nil if all were accepted. Nothing is under way any more.
func (b *batch) err() error {
	err := b.result()
	if b.followed != nil {
		b.hooks.publishedAll(b.followed, err)
	}
	return err
}

func (b *batch) result() error {
	if len(b.failures) == 0 {
		return nil
	}
	slices.SortFunc(b.failures, func(x, y BatchFailure) int { return cmp.Compare(x.Index, y.Index) })
	return &BatchError{Of: len(b.out), Failed: b.failures}
}
