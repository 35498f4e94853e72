//go:build unix

package chaos

import (
	"os"
	"syscall"
)

func pauseProcess(p *os.Process) error    { return p.Signal(syscall.SIGSTOP) }
func continueProcess(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// logStacks makes a Go process write its goroutines to its standard error and end.
func logStacks(p *os.Process) error { return p.Signal(syscall.SIGQUIT) }
