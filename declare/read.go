package declare

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/hopback/hopback/argument"
)

// Sources is where a live topology is read from: one of them, or both.
type Sources struct {
	// AMQP answers for single queues and bindings, with no more permission than
	// a worker has.
	AMQP Requester
	// HTTP tells everything about a virtual host. See package httpapi.
	HTTP Reader
}

// Reader reads the management HTTP API of one virtual host. Package httpapi has
// one; it must be safe for concurrent use.
type Reader interface {
	// Get requests a path below /api, percent-encoded, and returns the body of a
	// reply with a status of 2xx. Any other is an error, which says what to do
	// and matches [ErrNotFound], [ErrForbidden] or [ErrUnavailable] where it is
	// one of those.
	Get(ctx context.Context, path string) ([]byte, error)
	// VHost is the virtual host.
	VHost() string
}

// Read takes a snapshot: by the HTTP API of the whole virtual host, and where
// that isn't given or doesn't answer, over AMQP of the queues and bindings of
// of. Snapshot.Blind says what is missing then and why.
//
// An error means that nothing could be read, or that a source failed half way.
func Read(ctx context.Context, src Sources, of Topology) (Snapshot, error) {
	if src.AMQP == nil && src.HTTP == nil {
		return Snapshot{}, argument.New("Sources", nil, "has neither AMQP nor HTTP", "give the management of a connection, or httpapi.New")
	}
	whyNot := "over AMQP: RabbitMQ's management node doesn't list, and has no way to ask for an exchange; give the HTTP API for it"
	if src.HTTP != nil {
		s, err := readHTTP(ctx, src.HTTP)
		if err == nil {
			return s, nil
		}
		if src.AMQP == nil || ctx.Err() != nil {
			return Snapshot{}, err
		}
		whyNot = fmt.Sprintf("over AMQP, and the HTTP API couldn't be read: %v", err)
	}
	s, err := readAMQP(ctx, src.AMQP, of)
	if err != nil {
		return Snapshot{}, err
	}
	s.hide(whyNot, PartExchanges, PartQueues, PartBindings, PartPolicies, PartNodes, PartCounts, PartVersion)
	s.sort()
	return s, nil
}

// readAMQP asks for what can be named.
func readAMQP(ctx context.Context, r Requester, of Topology) (Snapshot, error) {
	var s Snapshot
	var mu sync.Mutex
	var asks []func() error
	seen := map[string]bool{}
	for _, q := range of.Queues {
		if isNil(q) || seen[q.Address().QueueName()] {
			continue
		}
		name := q.Address().QueueName()
		seen[name] = true
		asks = append(asks, func() error {
			info, err := retried(ctx, func() (QueueInfo, error) { return Inspect(ctx, r, name) })
			if errors.Is(err, ErrNotFound) {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			if notPermitted(err) {
				s.Refused = append(s.Refused, Unseen{Thing{KindQueue, name}, err.Error()})
				return nil
			}
			if err == nil {
				s.Queues = append(s.Queues, info)
				s.VHost = info.VHost
			}
			return err
		})
	}
	listed := map[string]bool{}
	for _, b := range of.Bindings {
		if listed[b.listPath()] {
			continue
		}
		listed[b.listPath()] = true
		asks = append(asks, func() error {
			found, err := retried(ctx, func() ([]Binding, error) { return Bindings(ctx, r, b) })
			mu.Lock()
			defer mu.Unlock()
			if notPermitted(err) {
				s.Refused = append(s.Refused, Unseen{Thing{KindBinding, b.listPath()}, err.Error()})
				return nil
			}
			s.Bindings = append(s.Bindings, found...)
			return err
		})
	}
	errs := make([]error, len(asks))
	turns := make(chan struct{}, maxInFlight)
	var wg sync.WaitGroup
	for i, ask := range asks {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			errs[i] = ask()
		})
	}
	wg.Wait()
	err := errors.Join(errs...)
	if err == nil && len(asks) > 0 && len(s.Refused) == len(asks) {
		return s, errors.New("hopback: nothing may be read: " + s.Refused[0].Why)
	}
	return s, err
}

// retried repeats a question of which no reply came: another one under way may
// have ended the session.
func retried[T any](ctx context.Context, ask func() (T, error)) (v T, err error) {
	for attempt := range maxAttempts {
		if attempt > 0 {
			pause(ctx, attempt)
		}
		if v, err = ask(); err == nil || !errors.Is(err, ErrNoReply) || ctx.Err() != nil || notPermitted(err) {
			return v, err
		}
	}
	return v, err
}

// sameBinding compares what makes two bindings one.
func sameBinding(a, b Binding) bool {
	if a.Source != b.Source || a.Queue != b.Queue || a.Exchange != b.Exchange || a.Key != b.Key {
		return false
	}
	argsA, _ := a.arguments("")
	argsB, _ := b.arguments("")
	return reflect.DeepEqual(argsA, argsB)
}
