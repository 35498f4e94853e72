package audit_test

import (
	"context"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeBroker is a Requester that remembers what it was asked, and has nothing.
type fakeBroker struct {
	mu       sync.Mutex
	requests []string
}

func (f *fakeBroker) Request(_ context.Context, method, path string, _ any) (int, any, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, method+" "+path)
	return 404, "not found", nil
}
