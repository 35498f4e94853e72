package suite

import (
	"context"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/integration/rabbitmq"
)

// MemoryBroker is a RabbitMQ in memory that the tests run with, too, in the place of a
// real one. The real one is the truth: where they differ, it is the one in memory that is
// wrong.
type MemoryBroker struct {
	*rabbitmq.Broker
	memory *hopbacktest.Broker
	api    *http.Server
}

// Memory are the brokers in memory.
var Memory []*MemoryBroker

// FullVersion is the version in memory of a release series.
func FullVersion(series string) string {
	return map[string]string{"4.4": "4.4.0", "4.3": "4.3.6", "4.0": "4.0.5"}[series]
}

func startMemory(version string) (*MemoryBroker, error) {
	full := FullVersion(version)
	// DeadLetterRetry is what docker-compose.yml sets.
	m, err := hopbacktest.New(hopbacktest.Config{Version: full, DeadLetterRetry: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	url, err := m.Listen("127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &MemoryBroker{
		Broker: &rabbitmq.Broker{Version: version, FullVersion: full, URL: strings.TrimSuffix(url, "/"), ManagementURL: "http://guest:guest@" + l.Addr().String()},
		memory: m, api: &http.Server{Handler: m.HTTPHandler()},
	}
	go func() { _ = b.api.Serve(l) }()
	return b, nil
}

func (b *MemoryBroker) close() {
	_ = b.api.Shutdown(context.Background())
	b.memory.Close()
}

// InMemory says whether s's broker is one in memory.
func InMemory(s *Site) bool {
	return slices.ContainsFunc(Memory, func(b *MemoryBroker) bool { return b.Broker == s.Broker })
}

// Neighbours are the brokers of s's kind, in memory or not.
func Neighbours(s *Site) (all []*rabbitmq.Broker) {
	for _, b := range Memory {
		all = append(all, b.Broker)
	}
	if slices.Contains(all, s.Broker) {
		return all
	}
	return Brokers
}

// Exempt returns the tests that aren't run with the brokers in memory, or the tests and
// versions, and the reasons: the lines of integration/memory.txt.
func Exempt(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	reasons := map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, reason, _ := strings.Cut(line, " ")
		reasons[name] = strings.TrimSpace(reason)
	}
	return reasons, nil
}

// exempted is exempt of the list, once the tests have started.
var exempted map[string]string

// forEachInMemory is ForEachBroker's part that needs no real one.
func forEachInMemory(t *testing.T, test func(t *testing.T, s *Site)) {
	for _, b := range Memory {
		if exempted[t.Name()] != "" || exempted[t.Name()+"/"+b.Version] != "" || !slices.Contains(inMemory(), b.Version) {
			continue
		}
		t.Run("memory-"+b.Version, func(t *testing.T) {
			t.Parallel()
			test(t, NewSite(t, b.Broker))
		})
	}
}
