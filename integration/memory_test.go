package integration

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/internal/broker"
)

// memoryBroker is a RabbitMQ in memory that the tests run with, too, in the place of a
// real one. The real one is the truth: where they differ, it is the one in memory that is
// wrong.
type memoryBroker struct {
	*broker.Broker
	memory *hopbacktest.Broker
	api    *http.Server
}

// memory are the brokers in memory.
var memory []*memoryBroker

func startMemory(version string) (*memoryBroker, error) {
	full := map[string]string{"4.3": "4.3.6", "4.0": "4.0.5"}[version]
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
	b := &memoryBroker{
		Broker: &broker.Broker{Version: version, FullVersion: full, URL: strings.TrimSuffix(url, "/"), ManagementURL: "http://guest:guest@" + l.Addr().String()},
		memory: m, api: &http.Server{Handler: m.HTTPHandler()},
	}
	go func() { _ = b.api.Serve(l) }()
	return b, nil
}

func (b *memoryBroker) close() {
	_ = b.api.Shutdown(context.Background())
	b.memory.Close()
}

// neighbours are the brokers of s's kind, in memory or not.
func neighbours(s *site) (all []*broker.Broker) {
	for _, b := range memory {
		all = append(all, b.Broker)
	}
	if slices.Contains(all, s.Broker) {
		return all
	}
	return brokers
}

// exempt returns the tests that aren't run with the brokers in memory, or the tests and
// versions, and the reasons: the lines of integration/memory.txt.
func exempt(path string) (map[string]string, error) {
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

// forEachInMemory is forEachBroker's part that needs no real one.
func forEachInMemory(t *testing.T, test func(t *testing.T, s *site)) {
	for _, b := range memory {
		if exempted[t.Name()] != "" || exempted[t.Name()+"/"+b.Version] != "" || strings.HasPrefix(*which, "memory-") && *which != "memory-"+b.Version {
			continue
		}
		t.Run("memory-"+b.Version, func(t *testing.T) {
			t.Parallel()
			test(t, newSite(t, b.Broker))
		})
	}
}

// What doesn't run in memory exists, has a reason, and is the smaller part.
func TestTheListOfWhatIsNotRunInMemoryIsTrue(t *testing.T) {
	all := map[string]bool{}
	exempted, err := exempt("memory.txt")
	require.NoError(t, err)
	files, err := filepath.Glob("*/*_test.go")
	require.NoError(t, err)
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					if s, ok := call.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(s.Sel.Name, "ForEach") {
						all[f.Name.Name] = all[f.Name.Name] || s.Sel.Name == "ForEachBroker"
					}
				}
				return true
			})
		}
	}
	require.NotEmpty(t, all)
	cases, not := 2*len(all), 0
	for name, every := range all {
		if !every {
			not += 2 // they reconfigure a real broker
		}
		_ = name
	}
	for name, reason := range exempted {
		test, version, one := strings.Cut(name, "/")
		assert.Contains(t, all, test, "there is no such test with brokers")
		assert.Greater(t, len(reason), 10, "%s: the reason", name)
		if one {
			assert.Contains(t, []string{"4.3", "4.0"}, version)
			not++
		} else {
			not += 2
		}
	}
	share := fmt.Sprintf("%d of %d cases with brokers run in memory, too, which is %d %%", cases-not, cases, (cases-not)*100/cases)
	t.Logf("REPORT %s", share)
	assert.GreaterOrEqual(t, (cases-not)*100, 85*cases, share)
}
