//go:build !unix

package amqp

import "net"

// tryWriter returns nil: there is no portable write that doesn't wait.
func tryWriter(*net.TCPConn) func(b []byte) int { return nil }
