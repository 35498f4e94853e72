//go:build !linux

package main

import (
	"errors"
	"net/url"
)

// startProxy can't do here what it does on Linux: elsewhere Docker's proxy runs in a virtual
// machine.
func startProxy(*url.URL) (through *url.URL, end func(), err error) {
	return nil, nil, errors.New("docker-proxy can be started on Linux only")
}
