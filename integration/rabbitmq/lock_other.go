//go:build !unix

package rabbitmq

import (
	"context"
	"errors"
	"os"
	"syscall"
)

// flock is not to be had here: only brokers of the environment are.
type flock struct{}

var errNoLock = errors.New("brokers can be started on Unix systems only; set HOPBACK_URL_4_3 and HOPBACK_URL_4_0")

func tryLock(string, bool) (*flock, error) { return nil, errNoLock }

func waitLock(context.Context, string, bool, func()) (*flock, error) { return nil, errNoLock }

func (*flock) unlock() {}

func ownGroup() *syscall.SysProcAttr { return nil }

func killGroup(p *os.Process) error { return p.Kill() }
