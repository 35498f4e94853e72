//go:build unix

package amqp

import (
	"net"
	"syscall"
)

// tryWriter returns a function that writes as much as a socket has room for now, and returns how
// much that was. It never waits: Go's sockets are non-blocking. It writes nothing once the last
// write deadline has passed.
func tryWriter(socket *net.TCPConn) func(b []byte) int {
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	var b []byte
	var n int
	write := func(fd uintptr) bool { // made once, as each would be an allocation
		n, _ = syscall.Write(int(fd), b)
		return true
	}
	return func(all []byte) int {
		b, n = all, 0
		_ = raw.Write(write)
		b = nil
		return max(n, 0)
	}
}
