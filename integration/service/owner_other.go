//go:build !unix

package service

import "syscall"

type owner struct{}

func ownerOf(string) (*owner, error)              { return nil, nil }
func (o *owner) own(string) error                 { return nil }
func (o *owner) credential() *syscall.SysProcAttr { return nil }
