package rules

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hopback/hopback/argument"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/internal/backoff"
	"github.com/hopback/hopback/internal/condition"
)

// Sources is where [Read] takes a snapshot from: AMQP, HTTP, or both.
type Sources struct {
	// AMQP answers for single queues and bindings. It needs no more permissions than a worker
	// has.
	AMQP declare.Requester
	// HTTP answers for the whole virtual host. Create one with package operate/httpapi.
	HTTP Reader
}

// Reader reads the management HTTP API of one virtual host. Package operate/httpapi implements
// it. It must be safe for concurrent use.
type Reader interface {
	// Get requests a percent-encoded path below /api and returns the body of a reply with a 2xx
	// status. Any other reply is an error that says what to do and matches [declare.ErrNotFound],
	// [declare.ErrForbidden], or [declare.ErrUnavailable] if it is one of those.
	Get(ctx context.Context, path string) ([]byte, error)
	// VHost returns the name of the virtual host.
	VHost() string
}

// Read takes a snapshot. It reads the whole virtual host from the HTTP API. Without src.HTTP, or
// if that fails, it reads the queues and bindings of the topology of over AMQP. [Snapshot.Unread]
// lists what is missing, and why.
//
// An error means that nothing could be read, or that a source failed halfway.
func Read(ctx context.Context, src Sources, of declare.Topology) (Snapshot, error) {
	if src.AMQP == nil && src.HTTP == nil {
		return Snapshot{}, argument.New("Sources", nil, "has neither AMQP nor HTTP set", "pass conn.Management(), or httpapi.New")
	}
	if err := of.Validate(); err != nil {
		return Snapshot{}, err
	}
	whyNot := "AMQP can't list resources, and can't read exchanges; use the HTTP API"
	if src.HTTP != nil {
		s, err := ReadHTTP(ctx, src.HTTP)
		if err == nil {
			return s, nil
		}
		if src.AMQP == nil || ctx.Err() != nil {
			return Snapshot{}, err
		}
		whyNot = fmt.Sprintf("AMQP can't list resources, and the HTTP API couldn't be read: %v", err)
	}
	s, err := ReadAMQP(ctx, src.AMQP, of)
	if err != nil {
		return Snapshot{}, err
	}
	Hide(&s, whyNot, PartExchanges, partQueues, PartBindings, PartPolicies, PartNodes, PartCounts, PartVersion)
	Sort(&s)
	return s, nil
}

// ReadAMQP reads the queues and bindings of a topology.
func ReadAMQP(ctx context.Context, r declare.Requester, of declare.Topology) (Snapshot, error) {
	var s Snapshot
	var mu sync.Mutex
	var asks []func() error
	for _, name := range QueueNames(of) {
		asks = append(asks, func() error {
			info, err := retried(ctx, func() (declare.QueueInfo, error) { return declare.Inspect(ctx, r, name) })
			if errors.Is(err, declare.ErrNotFound) {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			if condition.NotPermitted(err) {
				s.Refused = append(s.Refused, UnreadResource{QueueResource(name), err.Error()})
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
		question := bindingQuestion(b)
		if listed[question] {
			continue
		}
		listed[question] = true
		asks = append(asks, func() error {
			found, err := retried(ctx, func() ([]declare.Binding, error) { return declare.Bindings(ctx, r, b) })
			mu.Lock()
			defer mu.Unlock()
			if condition.NotPermitted(err) {
				s.Refused = append(s.Refused, UnreadResource{declare.Resource{Kind: "binding", Name: question}, err.Error()})
				return nil
			}
			s.Bindings = append(s.Bindings, found...)
			return err
		})
	}
	errs := make([]error, len(asks))
	turns := make(chan struct{}, backoff.RequestsInFlight)
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
		return s, errors.New("hopback: the user has no permission to read any resource of the topology: " + s.Refused[0].Why)
	}
	return s, err
}

// retried repeats a request without a reply: another one in flight may have ended the session.
func retried[T any](ctx context.Context, ask func() (T, error)) (v T, err error) {
	for n := range backoff.MaxRequests {
		if n > 0 {
			backoff.PauseRequest(ctx, n)
		}
		if v, err = ask(); err == nil || !errors.Is(err, declare.ErrNoReply) || ctx.Err() != nil || condition.NotPermitted(err) {
			return v, err
		}
	}
	return v, err
}
