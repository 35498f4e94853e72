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
}

// Which paths to take.
const (
	pathDirect = "direct" // to the container itself where the port is published by Docker
	pathGiven  = "given"  // as the URL says
	pathBoth   = "both"
)

// choosePaths finds the paths to the broker that given names.
func choosePaths(ctx context.Context, given, which string) ([]path, error) {
	u, err := url.Parse(given)
	if err != nil {
		return nil, errors.New("-url can't be parsed") // it may hold a password
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
	if isLoopback(u.Hostname()) {
		container = containerBehind(ctx, port)
	}
	if container == "" {
		if which == pathBoth {
			return nil, fmt.Errorf("-path both: no container of Docker publishes port %s here, so there is one path only", port)
		}
		return []path{asGiven}, nil
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
		c.drawn = false
	}
	return c
}

// behindProxy ends the names of contests that were run through the proxy beside those
// that were run without it.
const behindProxy = "-proxy"
