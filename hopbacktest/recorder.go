package hopbacktest

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/client"
)

// Publisher has the methods of a *client.Publisher that publish. Code that accepts a Publisher
// can be tested with a [Recorder], without a broker.
type Publisher[T any] interface {
	Publish(ctx context.Context, v T, edit ...func(*client.Message)) error
	PublishAll(ctx context.Context, vs []T, edit ...func(v T, m *client.Message)) error
}

var (
	_ Publisher[string] = (*client.Publisher[string])(nil)
	_ Publisher[string] = (*Recorder[string])(nil)
)

// Recorder is a [Publisher] that records messages instead of sending them. It encodes values
// and validates messages like a *client.Publisher. The zero value is ready to use and accepts
// every valid message. Set the fields before the first use; after that, it is safe for
// concurrent use.
type Recorder[T any] struct {
	// Codec encodes values. Default: client.JSONCodec.
	Codec client.Codec
	// Fail, if not nil, is called for each valid message. If it returns an error, such as
	// client.ErrUnroutable, Publish returns the error and doesn't record the message. Fail
	// must be safe for concurrent use. Default: no message fails.
	Fail func(v T) error

	mu      sync.Mutex
	all     []Published[T]
	changed chan struct{} // closed when all grows
}

// Published is one recorded message.
type Published[T any] struct {
	Value T
	// Message is the message as it would have been sent.
	Message *client.Message
	Time    time.Time
}

// Publish records v. The errors:
//
//   - [client.ErrNotSent]: ctx has ended.
//   - [*argument.Error]: the message is invalid.
//   - the errors of Codec and of Fail.
func (r *Recorder[T]) Publish(ctx context.Context, v T, edit ...func(*client.Message)) error {
	if ctx.Err() != nil {
		return &client.Error{Op: "publish", Kind: client.ErrNotSent, Err: context.Cause(ctx)}
	}
	m, err := r.message(v)
	if err != nil {
		return err
	}
	for _, e := range edit {
		if e != nil {
			e(m)
		}
	}
	if err := client.Validate(m); err != nil {
		return err
	}
	if r.Fail != nil {
		if err := r.Fail(v); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, Published[T]{v, m, time.Now()})
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
	return nil
}

// PublishAll records each value of vs. If some fail, the error is a [*client.BatchError].
func (r *Recorder[T]) PublishAll(ctx context.Context, vs []T, edit ...func(v T, m *client.Message)) error {
	failed := &client.BatchError{Of: len(vs)}
	for i, v := range vs {
		var id any
		err := r.Publish(ctx, v, func(m *client.Message) {
			for _, e := range edit {
				if e != nil {
					e(v, m)
				}
			}
			if m.Properties != nil {
				id = m.Properties.MessageID
			}
		})
		if err != nil {
			failed.Failed = append(failed.Failed, client.BatchFailure{Index: i, ID: id, Err: err})
		}
	}
	if len(failed.Failed) > 0 {
		return failed
	}
	return nil
}

func (r *Recorder[T]) message(v T) (*client.Message, error) {
	if m, ok := any(v).(*client.Message); ok {
		if m == nil {
			return nil, argument.New("message", nil, "is nil", "pass a message, such as client.NewMessage(body)")
		}
		// An edit must not change the caller's message.
		m = new(*m)
		if m.Header != nil {
			m.Header = new(*m.Header)
		}
		if m.Properties != nil {
			m.Properties = new(*m.Properties)
		}
		m.Annotations, m.ApplicationProperties = maps.Clone(m.Annotations), maps.Clone(m.ApplicationProperties)
		return m, nil
	}
	codec := r.Codec
	if codec == nil {
		codec = client.JSONCodec{}
	}
	m := client.NewMessage(nil)
	m.Data = nil
	return m, codec.Encode(v, m)
}

// Published returns the recorded messages, in order.
func (r *Recorder[T]) Published() []Published[T] {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

// Values returns the recorded values, in order.
func (r *Recorder[T]) Values() []T {
	r.mu.Lock()
	defer r.mu.Unlock()
	values := make([]T, len(r.all))
	for i := range r.all {
		values[i] = r.all[i].Value
	}
	return values
}

// Wait waits until at least n messages are recorded. If ctx ends first, the error is ctx's
// cause.
func (r *Recorder[T]) Wait(ctx context.Context, n int) error {
	for {
		r.mu.Lock()
		if len(r.all) >= n {
			r.mu.Unlock()
			return nil
		}
		if r.changed == nil {
			r.changed = make(chan struct{})
		}
		changed := r.changed
		r.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Reset drops all recorded messages.
func (r *Recorder[T]) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = nil
}
