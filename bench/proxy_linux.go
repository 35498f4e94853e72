//go:build linux

package main

import (
	"bufio"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// startProxy runs Docker's own proxy in front of the broker that to names. Docker starts the
// same program for each port that a container publishes, so clients meet what they would
// meet there, whether or not the broker runs in a container.
func startProxy(to *url.URL) (through *url.URL, end func(), err error) {
	program, err := findDockerProxy()
	if err != nil {
		return nil, nil, err
	}
	host, port := to.Hostname(), to.Port()
	if ips, err := net.LookupIP(host); err == nil && len(ips) > 0 {
		host = ips[0].String()
		for _, ip := range ips {
			if ip.To4() != nil {
				host = ip.String()
				break
			}
		}
	}
	free, err := freePort()
	if err != nil {
		return nil, nil, err
	}
	status, theirs, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer status.Close()
	cmd := exec.Command(program, "-proto", "tcp", "-host-ip", "127.0.0.1", "-host-port", free, "-container-ip", host, "-container-port", port)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing else ends it if this process is killed
	cmd.ExtraFiles = []*os.File{theirs}                                // file 3, by which it reports that it listens
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return nil, nil, err
	}
	end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	report := bufio.NewReader(status)
	if line, err := report.ReadString('\n'); err != nil || strings.TrimSpace(line) != "0" {
		why, _ := report.ReadString('\n')
		end()
		return nil, nil, fmt.Errorf("%s hasn't started: %s", program, strings.TrimSpace(line+" "+why))
	}
	copied := *to
	copied.Host = net.JoinHostPort("127.0.0.1", free)
	return &copied, end, nil
}

// findDockerProxy looks where Docker's packages put it: not all of these are in the PATH.
func findDockerProxy() (string, error) {
	if p, err := exec.LookPath("docker-proxy"); err == nil {
		return p, nil
	}
	for _, p := range []string{"/usr/sbin/docker-proxy", "/usr/bin/docker-proxy", "/usr/libexec/docker/docker-proxy", "/usr/lib/docker/docker-proxy"} {
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("docker-proxy isn't installed: it comes with Docker's engine (Debian: docker.io)")
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
