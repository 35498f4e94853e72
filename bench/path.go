package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// path is a way to the broker. Docker publishes a container's port by a proxy: a process
// that copies every byte, which takes CPU from client and broker and adds to each round
// trip. So ratios to a peer that waits for round trips look better behind it.
type path struct {
	url string
	how string // "directly at 172.18.0.2:5672"
	// behind is set for the way through the proxy where both are run.
	behind bool
	// memory is set for a hopbacktest broker, which speaks AMQP 1.0 only and has no streams.
	memory bool
	// end stops what choosePaths has started for this path; nil if that is nothing.
	end func()
}

// Which paths to take.
const (
	pathDirect = "direct" // to the container itself where the port is published by Docker
	pathGiven  = "given"  // as the URL says
	pathProxy  = "proxy"  // through a docker-proxy that bench starts
	pathBoth   = "both"
)

// choosePaths finds the paths to the broker that given names. The caller ends them.
func choosePaths(ctx context.Context, given, which string) ([]path, error) {
	u, err := url.Parse(given)
	if err != nil {
		return nil, errors.New("-url can't be parsed") // it may hold a password
	}
	if u.Scheme == memoryScheme {
		return memoryPaths(u.Opaque, which)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"amqps": "5671"}[u.Scheme]
	}
	if port == "" {
		port = "5672"
	}
	asGiven := path{url: given, how: "at " + net.JoinHostPort(u.Hostname(), port)}
	container := ""
	if isLoopback(u.Hostname()) && which != pathProxy {
		container = containerBehind(ctx, port)
	}
	if container == "" {
		u.Host = net.JoinHostPort(u.Hostname(), port)
		return withProxy(asGiven, u, which)
	}
	asGiven.how = "through Docker's proxy " + asGiven.how
	if which == pathGiven {
		return []path{asGiven}, nil
	}
	u.Host = container
	direct := path{url: u.String(), how: "directly at " + container}
	if c, err := net.DialTimeout("tcp", container, time.Second); err != nil {
		// On macOS and Windows, Docker's containers are in a virtual machine.
		if which == pathDirect {
			return []path{asGiven}, nil
		}
		return nil, fmt.Errorf("-path both: the container can't be reached directly: %w", err)
	} else {
		_ = c.Close()
	}
	if which == pathDirect {
		return []path{direct}, nil
	}
	asGiven.behind = true
	return []path{direct, asGiven}, nil
}

// memoryPaths are those to a hopbacktest broker in a process of its own.
func memoryPaths(version, which string) ([]path, error) {
	given, end, err := startMemory(version)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(given)
	if err != nil {
		end()
		return nil, err
	}
	paths, err := withProxy(path{url: given, how: "in memory, in another process, at " + u.Host, memory: true}, u, which)
	if err != nil {
		end()
		return nil, err
	}
	last := &paths[len(paths)-1]
	proxyEnd := last.end
	last.end = func() {
		if proxyEnd != nil {
			proxyEnd()
		}
		end()
	}
	return paths, nil
}

// withProxy are the paths to a broker that is reached directly at u. For the one through
// Docker's proxy there is a proxy to start.
func withProxy(direct path, u *url.URL, which string) ([]path, error) {
	if which != pathProxy && which != pathBoth {
		return []path{direct}, nil
	}
	through, end, err := startProxy(u)
	if err != nil {
		return nil, fmt.Errorf("-path %s: no container of Docker publishes port %s, and a proxy can't be started: %w", which, u.Port(), err)
	}
	proxied := direct
	proxied.url, proxied.how, proxied.end = through.String(), "through docker-proxy, "+direct.how, end
	if which == pathProxy {
		return []path{proxied}, nil
	}
	proxied.behind = true
	return []path{direct, proxied}, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// containerBehind is the address of the container that publishes port on this machine,
// "" if Docker tells of none.
func containerBehind(ctx context.Context, port string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ids, err := exec.CommandContext(ctx, "docker", "ps", "-q", "--no-trunc").Output()
	if err != nil || len(strings.Fields(string(ids))) == 0 {
		return ""
	}
	out, err := exec.CommandContext(ctx, "docker", append([]string{"inspect"}, strings.Fields(string(ids))...)...).Output()
	if err != nil {
		return ""
	}
	return publisherOf(out, port)
}

// publisherOf finds the container that publishes port in what docker inspect printed.
func publisherOf(inspected []byte, port string) string {
	var containers []struct {
		NetworkSettings struct {
			Ports map[string][]struct {
				HostPort string
			}
			Networks map[string]struct{ IPAddress string }
		}
	}
	if json.Unmarshal(inspected, &containers) != nil {
		return ""
	}
	for _, c := range containers {
		var addresses []string
		for _, n := range c.NetworkSettings.Networks {
			if n.IPAddress != "" {
				addresses = append(addresses, n.IPAddress)
			}
		}
		slices.Sort(addresses)
		for inside, published := range c.NetworkSettings.Ports {
			for _, p := range published {
				if p.HostPort == port && strings.HasSuffix(inside, "/tcp") && len(addresses) > 0 {
					return net.JoinHostPort(addresses[0], strings.TrimSuffix(inside, "/tcp"))
				}
			}
		}
	}
	return ""
}

// over is the contest as it is run on p.
func (c contest) over(p path) contest {
	if p.behind {
		c.name += behindProxy
		c.title += ", through Docker's proxy"
	}
	return c
}

// behindProxy ends the names of contests that were run through the proxy beside those
// that were run without it.
const behindProxy = "-proxy"
