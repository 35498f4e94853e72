//go:build unix

package chaos

import (
	"os"
	"syscall"
)

func pauseProcess(p *os.Process) error    { return p.Signal(syscall.SIGSTOP) }
func continueProcess(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// tellStacks makes a Go process write its goroutines to its standard error and end.
func tellStacks(p *os.Process) error { return p.Signal(syscall.SIGQUIT) }
