//go:build unix

package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// flock is a lock on a file that ends with the process, however that ends.
// The files stay: removing one that another process waits for would let two
// in. A child process doesn't inherit it.
type flock struct{ f *os.File }

// tryLock returns nil, nil if another one holds it.
func tryLock(path string, shared bool) (*flock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	how := syscall.LOCK_EX
	if shared {
		how = syscall.LOCK_SH
	}
	for {
		err = syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		if err == nil {
			return &flock{f}, nil
		}
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// waitLock polls, as a blocked flock call can't be cancelled. held is called
// once, if somebody else has it.
func waitLock(ctx context.Context, path string, shared bool, held func()) (*flock, error) {
	for first := true; ; first = false {
		k, err := tryLock(path, shared)
		if k != nil || err != nil {
			return k, err
		}
		if first && held != nil {
			held()
		}
		if err := wait(ctx, 100*time.Millisecond); err != nil {
			return nil, fmt.Errorf("lock %s, held by another process: %w", path, err)
		}
	}
}

// unlock does more than close the file: a child that another goroutine has just forked
// holds it, too, until it runs its program.
func (k *flock) unlock() {
	_ = syscall.Flock(int(k.f.Fd()), syscall.LOCK_UN)
	_ = k.f.Close()
}

// ownGroup makes a command's process group its own, so that Ctrl-C reaches us
// alone, who then end it, with all its children, in order.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func killGroup(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
