//go:build !linux

package rabbitmq

import (
	"context"
	"errors"
	"os/exec"
)

// chroot needs Linux.
type chroot struct {
	trees  *trees
	id     string
	runDir func(name string) string
	given  func(version string) string
}

var errNotLinux = errors.New("needs Linux")

func (*chroot) prepare(context.Context, string, sayFunc) (string, error) { return "", errNotLinux }

func (*chroot) start(context.Context, *state, func() error) error { return errNotLinux }

func (*chroot) stop(context.Context, *state) error { return errNotLinux }

func (*chroot) kill(context.Context, *state) error { return errNotLinux }

func (*chroot) remove(context.Context, *state) error { return nil }

func (*chroot) alive(context.Context, *state) bool { return false }

func (*chroot) exec(context.Context, *state, []string) ([]byte, error) { return nil, errNotLinux }

func (*chroot) lastWords(context.Context, *state) string { return "" }

func diesWithUs(*exec.Cmd) {}
