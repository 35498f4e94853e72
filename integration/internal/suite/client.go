package suite

import (
	"context"
	"net"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
)

// Secret is the password in every URL of these tests.
const Secret = "s3cr3t-p%ss/w:rd"

// RefusedIn is how long it may take until a wrong setup is reported.
const RefusedIn = 15 * time.Second

// Refused connects and wants an error of the kind, in time, without the password.
func Refused(t *testing.T, url string, kind error, in time.Duration, edit ...func(*client.Config)) *client.Error {
	t.Helper()
	var cfg client.Config
	for _, e := range edit {
		e(&cfg)
	}
	began := time.Now()
	conn, err := client.Connect(t.Context(), url, cfg)
	took := time.Since(began)
	if err == nil {
		_ = conn.Close(context.Background())
	}
	require.Error(t, err)
	assert.ErrorIs(t, err, kind, "%v", err)
	assert.Less(t, took, in, "%v", err)
	assert.True(t, client.SafeToRetry(err))
	AssertNoSecret(t, err)
	var e *client.Error
	require.ErrorAs(t, err, &e)
	t.Logf("after %v: %v", took.Round(time.Millisecond), err)
	return e
}

// AssertNoSecret looks for the password in every error of the chain, in each form
// that it takes in a URL.
func AssertNoSecret(t *testing.T, err error) {
	t.Helper()
	for _, form := range []string{Secret, url.QueryEscape(Secret), url.PathEscape(Secret), url.UserPassword("", Secret).String()[1:], "s3cr3t"} {
		var scan func(error)
		scan = func(err error) {
			if err == nil {
				return
			}
			assert.NotContains(t, err.Error(), form)
			switch u := err.(type) {
			case interface{ Unwrap() error }:
				scan(u.Unwrap())
			case interface{ Unwrap() []error }:
				for _, e := range u.Unwrap() {
					scan(e)
				}
			}
		}
		scan(err)
	}
}

// Listen starts a server that does one thing with each connection, and closes it.
func Listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				serve(c)
			}()
		}
	}()
	return ln.Addr().String()
}

// Events keeps the events of Config.OnEvent.
type Events struct {
	mu  sync.Mutex
	all []client.Event
}

func (e *Events) Observe(ev client.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

// Of returns those of an op and a kind, oldest first.
func (e *Events) Of(op string, kind client.EventKind) []client.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var found []client.Event
	for _, ev := range e.all {
		if ev.Op == op && ev.Kind == kind {
			found = append(found, ev)
		}
	}
	return found
}

// HeldNow is what a process and its broker hold.
type HeldNow struct {
	Goroutines, Files, Sessions int
	Heap                        uint64
}

func (s *Site) HeldNow(t *testing.T) HeldNow {
	t.Helper()
	debug.FreeOSMemory() // which collects first
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return HeldNow{Goroutines: runtime.NumGoroutine(), Files: len(files), Heap: m.HeapAlloc, Sessions: s.sessions(t)}
}

// Connections is how many connections the broker has with the site.
func (s *Site) Connections(t *testing.T) []string {
	t.Helper()
	var connections []struct{ Name string }
	s.HTTP(t, "GET", "/vhosts/"+s.VHost+"/connections?disable_stats=true", nil, &connections)
	names := make([]string, len(connections))
	for i, c := range connections {
		names[i] = c.Name
	}
	return names
}

// sessions is how many sessions the broker has with the site; 4.0 doesn't tell.
func (s *Site) sessions(t *testing.T) (n int) {
	t.Helper()
	if !s.Newer() {
		return 0
	}
	for _, name := range s.Connections(t) {
		var sessions []any
		s.HTTP(t, "GET", "/connections/"+url.PathEscape(name)+"/sessions", nil, &sessions)
		n += len(sessions)
	}
	return n
}

// Eventually publishes until the broker accepts, as a caller does that may make
// duplicates.
func Eventually[T any](t *testing.T, p *client.Publisher[T], v T) {
	t.Helper()
	var last error
	Poll(t, "it is published", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		last = p.Publish(ctx, v)
		if last != nil {
			t.Logf("publish: %v", last)
		}
		return last == nil
	})
}

const Everything = ".*"

func IsOver(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
