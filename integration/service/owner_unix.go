//go:build unix

package service

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// owner is another user, which root runs a server as.
type owner struct{ uid, gid int }

// ownerOf returns nil if the server runs as this process does.
func ownerOf(name string) (*owner, error) {
	if name == "" || os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return nil, fmt.Errorf("service: root can't run it, and %w", err)
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.Atoi(u.Gid)
	return &owner{uid: uid, gid: gid}, err
}

// own gives a folder to the user.
func (o *owner) own(dir string) error {
	if o == nil {
		return nil
	}
	return os.Chown(dir, o.uid, o.gid)
}

func (o *owner) credential() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if o != nil {
		attr.Credential = &syscall.Credential{Uid: uint32(o.uid), Gid: uint32(o.gid)}
	}
	return attr
}
