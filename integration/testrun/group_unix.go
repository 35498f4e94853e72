//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// inGroup puts a command and its children into a process group, so that they can be
// stopped together.
func inGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
}
