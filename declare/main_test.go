package declare_test

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sent is a request as a Requester saw it.
type sent struct {
	method, path string
	body         any
}

func (s sent) String() string { return s.method + " " + s.path }

// fakeBroker is a Requester that answers as RabbitMQ does, as far as the tests
// need it, and remembers what it was asked.
type fakeBroker struct {
	// intercept may answer in the broker's place; handled says whether it did.
	intercept func(ctx context.Context, n int, s sent) (status int, reply any, err error, handled bool)

	mu       sync.Mutex
	requests []sent
	inFlight int
	most     int
	things   map[string]any
}

func (f *fakeBroker) Request(ctx context.Context, method, path string, body any) (int, any, error) {
	s := sent{method, path, body}
	f.mu.Lock()
	f.requests = append(f.requests, s)
	n := len(f.requests)
	f.inFlight++
	f.most = max(f.most, f.inFlight)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.inFlight--
		f.mu.Unlock()
	}()
	if f.intercept != nil {
		if status, reply, err, handled := f.intercept(ctx, n, s); handled {
			return status, reply, err
		}
	}
	return f.answer(s)
}

func (f *fakeBroker) answer(s sent) (int, any, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.things == nil {
		f.things = map[string]any{}
	}
	old, exists := f.things[s.path]
	switch {
	case s.method == "PUT" && !exists:
		f.things[s.path] = s.body
		if strings.HasPrefix(s.path, "/queues/") {
			return 201, map[string]any{}, nil
		}
		return 204, nil, nil
	case s.method == "PUT" && !reflect.DeepEqual(old, s.body):
		return 409, "inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '2000' but current is '1000'", nil
	case s.method == "PUT" && strings.HasPrefix(s.path, "/queues/"):
		return 200, map[string]any{}, nil
	case s.method == "GET" && strings.HasPrefix(s.path, "/bindings?"):
		return 200, []any{}, nil
	case s.method == "GET":
		return 404, "queue not found", nil
	case s.method == "DELETE" && strings.HasPrefix(s.path, "/queues/"):
		delete(f.things, s.path)
		return 200, map[string]any{"message_count": uint64(3)}, nil
	default:
		delete(f.things, s.path)
		return 204, nil, nil
	}
}

// sentPaths is what was asked, in order.
func (f *fakeBroker) sentPaths() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]string, len(f.requests))
	for i, s := range f.requests {
		list[i] = s.method + " " + s.path
		if b, ok := s.body.(map[string]any); ok && s.path == "/bindings" {
			list[i] += fmt.Sprintf(" %v>%v%v", b["source"], b["destination_queue"], b["binding_key"])
		}
	}
	return list
}
