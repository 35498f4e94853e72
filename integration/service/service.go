package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Service is one running server. Its methods are safe for concurrent use.
type Service struct {
	// URL is where it serves, such as postgres://postgres@127.0.0.1:41234/postgres.
	URL string
	// Dir holds its data and its log. It is empty if the server is the environment's.
	Dir string

	kind kind
	out  io.Writer
	argv []string
	user *owner // nil: that of this process

	mu      sync.Mutex
	process *process // nil: it doesn't run
	closed  bool
}

// kind is what is particular to a server.
type kind struct {
	name     string // for people
	variable string // of the environment, for its URL
	program  string // what is looked for in PATH and in places
	places   []string
	pkg      string // Debian's package
	user     string // the user that root runs it as; empty: root
	// arguments returns the program's arguments, once its files are in dir.
	arguments func(ctx context.Context, s *Service, program string, port int) ([]string, error)
	url       func(port int) string
	// dying is what its log says when it can't start because processes of one that was
	// killed haven't ended yet; empty: that doesn't happen.
	dying string
	// ready returns nil once it serves.
	ready func(ctx context.Context, s *Service) error
}

// ErrNotOurs is the error of Kill, Stop and Start for a server of the environment.
var ErrNotOurs = errors.New("service: it comes from the environment and is not ours to start or stop")

// NoWayError says that a server can't be had here.
type NoWayError struct {
	Name     string // "PostgreSQL"
	Variable string // "HOPBACK_POSTGRES_URL"
	Package  string // "postgresql"
	Err      error
}

// Error says what to set or to install.
func (e *NoWayError) Error() string {
	return fmt.Sprintf("%s: none can be had (%v); set %s to the URL of one that runs, or install Debian's package %s, or be root on Debian", e.Name, e.Err, e.Variable, e.Package)
}

// Unwrap returns why installing it failed.
func (e *NoWayError) Unwrap() error { return e.Err }

// start finds the server or starts it. Slow steps are reported on out, which may be nil.
func start(ctx context.Context, out io.Writer, k kind) (*Service, error) {
	if out == nil {
		out = io.Discard
	}
	if url := os.Getenv(k.variable); url != "" {
		s := &Service{URL: url, kind: k, out: out}
		if err := s.awaitReady(ctx); err != nil {
			return nil, fmt.Errorf("%s of %s: %w", k.name, k.variable, err)
		}
		return s, nil
	}
	program, err := k.find(ctx, out)
	if err != nil {
		return nil, &NoWayError{Name: k.name, Variable: k.variable, Package: k.pkg, Err: err}
	}
	s := &Service{kind: k, out: out}
	if s.user, err = ownerOf(k.user); err != nil {
		return nil, err
	}
	if s.Dir, err = os.MkdirTemp("", "hopback-"+strings.ToLower(k.name)+"-"); err != nil {
		return nil, err
	}
	fail := func(err error) (*Service, error) {
		_ = s.Close()
		return nil, fmt.Errorf("%s: %w", k.name, err)
	}
	if err := s.user.own(s.Dir); err != nil {
		return fail(err)
	}
	port, err := freePort()
	if err != nil {
		return fail(err)
	}
	s.URL = k.url(port)
	if s.argv, err = k.arguments(ctx, s, program, port); err != nil {
		return fail(err)
	}
	if err := s.Start(ctx); err != nil {
		return fail(err)
	}
	return s, nil
}

// Program returns the path of a program, and installs pkg, the Debian package that has it, if
// it is missing. It says on out, which may be nil, that it installs something. It fails where
// the program is missing and this process isn't root on Debian.
func Program(ctx context.Context, out io.Writer, program, pkg string) (string, error) {
	if out == nil {
		out = io.Discard
	}
	return kind{name: program, program: program, pkg: pkg}.find(ctx, out)
}

// Python returns the path of a Python 3 that has a module, and installs pkg, the Debian package
// of that module, if there is none. It is like Program otherwise.
func Python(ctx context.Context, out io.Writer, module, pkg string) (string, error) {
	if out == nil {
		out = io.Discard
	}
	find := func() string {
		// The first one in PATH may be one that Debian's modules aren't for.
		for _, python := range []string{"python3", "/usr/bin/python3"} {
			if exec.CommandContext(ctx, python, "-c", "import "+module).Run() == nil {
				return python
			}
		}
		return ""
	}
	if python := find(); python != "" {
		return python, nil
	}
	if err := (kind{name: module, program: "Python module " + module, pkg: pkg}).install(ctx, out); err != nil {
		return "", err
	}
	if python := find(); python != "" {
		return python, nil
	}
	return "", fmt.Errorf("the package %s brought no Python module %s", pkg, module)
}

// find returns the path of the program, and installs its package if it is missing.
func (k kind) find(ctx context.Context, out io.Writer) (string, error) {
	if path := k.installed(); path != "" {
		return path, nil
	}
	if err := k.install(ctx, out); err != nil {
		return "", err
	}
	if path := k.installed(); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("the package %s brought no %s", k.pkg, k.program)
}

// install installs the package.
func (k kind) install(ctx context.Context, out io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("no " + k.program + " is installed, and only root can install it")
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("no " + k.program + " is installed, and there is no apt-get")
	}
	fmt.Fprintf(out, "%s: installing %s by apt-get\n", k.name, k.pkg)
	install := func() error {
		cmd := exec.CommandContext(ctx, "apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends", k.pkg)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		output, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("apt-get install %s: %w: %s", k.pkg, err, lastLine(output))
		}
		return nil
	}
	err := install()
	if err != nil {
		// A fresh machine has no package lists yet, or old ones.
		if output, updated := exec.CommandContext(ctx, "apt-get", "update", "-qq").CombinedOutput(); updated != nil {
			return fmt.Errorf("apt-get update: %w: %s", updated, lastLine(output))
		}
		err = install()
	}
	return err
}

// installed returns the path of the newest program, or "".
func (k kind) installed() string {
	if path, err := exec.LookPath(k.program); err == nil {
		return path
	}
	for _, pattern := range k.places {
		found, _ := filepath.Glob(pattern)
		slices.Sort(found)
		if len(found) > 0 {
			return found[len(found)-1]
		}
	}
	return ""
}

// Start starts the server again after Kill or Stop, on the same port and with its data,
// and returns when it serves. A server that runs is left alone.
func (s *Service) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.argv == nil:
		return ErrNotOurs
	case s.closed:
		return errors.New("service: it is closed")
	case s.process != nil:
		return nil
	}
	log, err := os.OpenFile(filepath.Join(s.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	before, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	for began := time.Now(); ; {
		p, err := run(s.argv, s.Dir, s.user, log)
		if err != nil {
			return err
		}
		err = s.awaitReadyOf(ctx, p)
		if err == nil {
			s.process = p
			return nil
		}
		p.kill()
		text, _ := os.ReadFile(log.Name())
		text = text[min(before, int64(len(text))):]
		if s.kind.dying == "" || !bytes.Contains(text, []byte(s.kind.dying)) || time.Since(began) > readyWithin {
			return fmt.Errorf("it doesn't serve: %w: %s", err, bytes.TrimSpace(text))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Kill ends the server at once, as kill -9 does. Its data stay for Start.
func (s *Service) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.argv == nil {
		return ErrNotOurs
	}
	if s.process != nil {
		s.process.kill()
		s.process = nil
	}
	return nil
}

// Close ends the server and removes its data. It leaves a server of the environment alone.
func (s *Service) Close() error {
	err := s.Kill()
	if errors.Is(err, ErrNotOurs) && s.Dir == "" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return os.RemoveAll(s.Dir)
}

// readyWithin is how long a server may take to serve. PostgreSQL repairs itself first
// when it was killed.
const readyWithin = 60 * time.Second

func (s *Service) awaitReady(ctx context.Context) error { return s.awaitReadyOf(ctx, nil) }

// awaitReadyOf waits until the server serves, or p has ended.
func (s *Service) awaitReadyOf(ctx context.Context, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	var ended <-chan struct{}
	if p != nil {
		ended = p.ended
	}
	for {
		once, done := context.WithTimeout(ctx, 5*time.Second)
		err := s.kind.ready(once, s)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return errors.New("it has ended")
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// freePort returns a port of 127.0.0.1 that nobody listens on now.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// lastLine returns the last line that isn't empty.
func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
