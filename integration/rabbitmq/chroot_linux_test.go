package rabbitmq

import (
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A process that runs for a minute doesn't hold open a pipe which this one
// has, as if inherited, and has for what it starts in another way.
func TestInheritedFilesAreNotHandedOn(t *testing.T) {
	var fds [2]int
	require.NoError(t, syscall.Pipe(fds[:])) // open for children, unlike os.Pipe's
	read, write := os.NewFile(uintptr(fds[0]), "read"), os.NewFile(uintptr(fds[1]), "write")
	defer read.Close()

	cmd := exec.Command("sleep", "60")
	require.NoError(t, withoutInheritedFiles(cmd.Start))
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, write.Fd(), syscall.F_GETFD, 0)
	require.Zero(t, errno)
	assert.Zero(t, flags&syscall.FD_CLOEXEC, "it is unchanged")

	require.NoError(t, write.Close())
	require.NoError(t, syscall.SetNonblock(fds[0], true))
	_, err := syscall.Read(fds[0], make([]byte, 1))
	assert.NoError(t, err, "the end of the pipe; with an EAGAIN somebody still has it open")
}
