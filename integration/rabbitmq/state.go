package rabbitmq

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// state is the record of a broker that we started, in run/NAME/state.json of
// the cache folder. It is written before the broker is started, so that a
// process that finds it can always stop the broker that it describes.
type state struct {
	Name    string    `json:"name"`    // "4.3", or "4.3-own-…" for a separate one
	Version string    `json:"version"` // "4.3"
	How     How       `json:"how"`
	Source  string    `json:"source"` // image name, or folder of the tree
	Ports   ports     `json:"ports"`
	Keep    bool      `json:"keep"` // until Down, even if nobody uses it
	Started time.Time `json:"started"`

	// For Docker: the compose project, which is known before there is a
	// container, so that a half-started one can be ended.
	Project string `json:"project,omitempty"`
	// Nodes are the ports of a cluster's nodes; Ports are the first one's then.
	Nodes []ports `json:"nodes,omitempty"`

	service string // of compose, for one node of a cluster; empty: the single node's

	// Lean is what HOPBACK_BROKER_LEAN asks for.
	Lean bool `json:"lean,omitempty"`

	// For a chroot: the folder of its data, and the first process of its pid
	// namespace, as seen from outside, with its start time, lest a reused number
	// be taken for it.
	Data     string `json:"data,omitempty"`
	PID      int    `json:"pid,omitempty"`
	PIDStart uint64 `json:"pid_start,omitempty"`
}

// ports on 127.0.0.1. Dist and EPMD are Erlang's, used by a chroot only, as a
// container has its own network.
type ports struct {
	AMQP int `json:"amqp"`
	HTTP int `json:"http"`
	Dist int `json:"dist"`
	EPMD int `json:"epmd"`
}

// node is the record of one node of a cluster, as if it stood alone.
func (s *state) node(i int) *state {
	n := *s
	n.Ports, n.service = s.Nodes[i], fmt.Sprintf("rabbit%d", i+1)
	return &n
}

// composeService is the service whose container stands for s.
func (s *state) composeService() string {
	switch {
	case s.service != "":
		return s.service
	case len(s.Nodes) > 0:
		return s.node(0).service
	}
	return composeService
}

// claims are the first ports of the blocks that it has.
func (s *state) claims() []int {
	if len(s.Nodes) == 0 {
		return []int{s.Ports.AMQP}
	}
	var all []int
	for _, n := range s.Nodes {
		all = append(all, n.AMQP)
	}
	return all
}

func (s *state) amqpURL() string {
	return fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d", s.Ports.AMQP)
}

func (s *state) managementURL() string {
	return fmt.Sprintf("http://guest:guest@127.0.0.1:%d", s.Ports.HTTP)
}

func (l *launcher) runDir(name string) string { return filepath.Join(l.dir, "run", name) }

func (l *launcher) statePath(name string) string {
	return filepath.Join(l.runDir(name), "state.json")
}

// load returns nil, nil where there is no record, or one that can't be read:
// then there is nothing to reuse and the name is free.
func (l *launcher) load(name string) (*state, error) {
	text, err := os.ReadFile(l.statePath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var s state
	if json.Unmarshal(text, &s) != nil || s.Name != name || l.driver(s.How) == nil {
		return nil, nil
	}
	return &s, nil
}

func (l *launcher) save(s *state) error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(l.runDir(s.Name), 0o755); err != nil {
		return err
	}
	return writeFile(l.statePath(s.Name), append(text, '\n'))
}

// writeFile replaces a file at once, so that no reader sees half of it.
func writeFile(path string, text []byte) error {
	if err := os.WriteFile(path+".tmp", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// loadAll returns every readable record, sorted by name.
func (l *launcher) loadAll() ([]*state, error) {
	entries, err := os.ReadDir(filepath.Join(l.dir, "run"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var all []*state
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		s, err := l.load(e.Name())
		if err != nil {
			return nil, err
		}
		if s != nil {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *state) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// Ports are taken in blocks of four from a range below the one that systems
// take for outgoing connections (Linux: from 32768 on), each version from its
// own hundred, so that a broker is mostly found where it was the last time.
const (
	portBlock  = 4
	portBlocks = 25
)

func firstPort(version string) int {
	_, minor, _ := strings.Cut(version, ".")
	n, _ := strconv.Atoi(minor)
	return 24000 + 100*n
}

// choosePorts returns the first block that no record claims and whose ports
// are all free. The caller holds the lock "ports" until the record is saved.
func choosePorts(version string, claimed map[int]bool, free func(port int) bool) (ports, error) {
	first := firstPort(version)
	for block := range portBlocks {
		n := first + block*portBlock
		usable := !claimed[n]
		for p := n; usable && p < n+portBlock; p++ {
			usable = free(p)
		}
		if usable {
			return ports{AMQP: n, HTTP: n + 1, Dist: n + 2, EPMD: n + 3}, nil
		}
	}
	return ports{}, fmt.Errorf("no four free ports on 127.0.0.1 from %d to %d", first, first+portBlock*portBlocks-1)
}

func portFree(port int) bool {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return ln.Close() == nil
}
