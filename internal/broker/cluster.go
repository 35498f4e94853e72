package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// clusterSize is what docker-compose.yml has: rabbit1 to rabbit3.
const clusterSize = 3

// ErrNoCluster is what [OwnCluster] returns where no Docker can be had: three nodes
// need host names and addresses of their own.
var ErrNoCluster = errors.New("broker: a cluster of three nodes needs Docker")

// Cluster is three RabbitMQ nodes for the caller alone.
type Cluster struct {
	// Version is the release series: "4.3" or "4.0".
	Version string
	// Nodes are rabbit1, rabbit2 and rabbit3.
	Nodes []*Node

	l    *launcher
	name string

	mu    sync.Mutex
	lease *flock
}

// Node is one node of a [Cluster]. Its methods are safe for concurrent use, as far
// as doing different things to one node at once makes sense. Those that bring a node
// back return when it serves; [Cluster.AwaitAll] waits until its peers see it, too.
type Node struct {
	// Name is the node's name: "rabbit@rabbit1".
	Name string
	// URL for AMQP and ManagementURL of the HTTP API are as in [Broker].
	URL           string
	ManagementURL string

	c     *Cluster
	index int
}

// OwnCluster starts a cluster of three nodes for the caller alone. version is as for
// [Need]. Release ends it. One whose process died without that is ended by whoever
// uses this package next. It takes about 20 s, and 120 MiB a node.
//
// The error wraps [ErrNoCluster] where there is no Docker, and [ErrNotOurs] where
// HOPBACK_BROKER_WITH=env forbids starting one.
func OwnCluster(ctx context.Context, out io.Writer, version string) (*Cluster, error) {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return nil, err
	}
	switch l.only {
	case Environment:
		return nil, fmt.Errorf("HOPBACK_BROKER_WITH=env: %w", ErrNotOurs)
	case Chroot:
		return nil, fmt.Errorf("HOPBACK_BROKER_WITH=chroot: %w", ErrNoCluster)
	}
	return l.ownCluster(ctx, version)
}

func (l *launcher) ownCluster(ctx context.Context, version string) (*Cluster, error) {
	if err := checkVersions([]string{version}); err != nil {
		return nil, err
	}
	if version == "any" {
		version = supported[0]
	}
	l.reap(ctx)
	began := time.Now()
	name := fmt.Sprintf("%s-own-%d-%d", version, os.Getpid(), ownCount.Add(1))
	say := l.out.prefixed("cluster " + name)
	lock, err := waitLock(ctx, l.lockPath(name), false, nil)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", version, err)
	}
	defer lock.unlock()
	var tried []error
	for _, w := range l.ways {
		if w.how == Chroot || l.only != "" && l.only != w.how {
			continue
		}
		s := &state{Name: name, Version: version, How: w.how, Nodes: make([]ports, clusterSize)}
		full, err := l.tryWay(ctx, w, s, say)
		if err == nil {
			c := l.clusterOf(s)
			if err = c.AwaitAll(ctx); err == nil {
				say("%s started in %.0f s, %s (%s), at %s", full, time.Since(began).Seconds(), s.How, s.Source, strings.Join(c.URLs(), " "))
				c.lease, err = waitLock(ctx, l.leasePath(name), true, nil)
			}
			if err == nil {
				return c, nil
			}
			err = errors.Join(err, l.end(ctx, s))
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("cluster %s: given up before it served: %w (%w)", name, context.Cause(ctx), ctx.Err())
		}
		tried = append(tried, fmt.Errorf("%s: %w", w.how, err))
		say("not by %s: %v", w.how, err)
	}
	return nil, fmt.Errorf("%w: %w", ErrNoCluster, errors.Join(tried...))
}

func (l *launcher) clusterOf(s *state) *Cluster {
	c := &Cluster{Version: s.Version, l: l, name: s.Name}
	for i := range s.Nodes {
		n := s.node(i)
		c.Nodes = append(c.Nodes, &Node{
			Name: "rabbit@" + n.service, URL: n.amqpURL(), ManagementURL: n.managementURL(), c: c, index: i,
		})
	}
	return c
}

// URLs are the nodes', for AMQP.
func (c *Cluster) URLs() []string {
	urls := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		urls[i] = n.URL
	}
	return urls
}

// Release ends the cluster, unless HOPBACK_KEEP is set. It does so within a minute,
// even when ctx has ended. Releasing twice does nothing.
func (c *Cluster) Release(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lease == nil {
		return nil
	}
	lease := c.lease
	c.lease = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return c.l.release(ctx, c.name, lease)
}

// AwaitAll waits until each node says that all of them run.
func (c *Cluster) AwaitAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.l.patience)
	defer cancel()
	for {
		missing := c.missing(ctx)
		if missing == "" {
			return nil
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("cluster %s: %s: %w", c.name, missing, context.Cause(ctx))
		}
	}
}

// missing says what keeps the cluster from being whole.
func (c *Cluster) missing(ctx context.Context) string {
	for _, n := range c.Nodes {
		running, err := n.Running(ctx)
		if err != nil {
			return fmt.Sprintf("%s doesn't answer: %v", n.Name, err)
		}
		if len(running) != len(c.Nodes) {
			return fmt.Sprintf("%s sees only %s run", n.Name, strings.Join(running, ", "))
		}
	}
	return ""
}

// Running returns the names of the nodes that this one sees run, itself included.
func (n *Node) Running(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.ManagementURL+"/api/nodes?columns=name,running", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var nodes []struct {
		Name    string
		Running bool
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET /api/nodes: %s", resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&nodes); err != nil {
		return nil, fmt.Errorf("GET /api/nodes: %w", err)
	}
	var running []string
	for _, node := range nodes {
		if node.Running {
			running = append(running, node.Name)
		}
	}
	return running, nil
}

// Stop ends the node in an orderly way; its data stay for [Node.Start].
func (n *Node) Stop(ctx context.Context) error {
	return n.do("stop", func(d *docker, s *state) error { return d.stop(ctx, s) })
}

// Kill ends the node at once, as kill -9 does; its data stay for [Node.Start].
func (n *Node) Kill(ctx context.Context) error {
	return n.do("kill", func(d *docker, s *state) error { return d.kill(ctx, s) })
}

// Start starts the node again, on the same ports and with its data, and returns
// when it serves.
func (n *Node) Start(ctx context.Context) error {
	return n.do("start", func(d *docker, s *state) error { return n.c.l.startAgain(ctx, d, s) })
}

// Pause freezes the node's processes: its connections stay, and nothing answers. What
// Docker can't freeze at once, since a process of it is just beginning or ending, it is
// asked for again.
func (n *Node) Pause(ctx context.Context) error {
	return n.do("pause", func(d *docker, s *state) error {
		var err error
		for range pauseAttempts {
			if _, err = d.onContainer(ctx, s, "pause"); err == nil {
				return nil
			}
			if wait(ctx, 200*time.Millisecond) != nil {
				break
			}
		}
		return err
	})
}

const pauseAttempts = 20

// Unpause lets a paused node go on.
func (n *Node) Unpause(ctx context.Context) error {
	return n.do("unpause", func(d *docker, s *state) error {
		_, err := d.onContainer(ctx, s, "unpause")
		return err
	})
}

// Isolate cuts the node off from its peers, as a pulled cable does: they aren't told,
// packets are lost. For clients its ports are gone meanwhile.
func (n *Node) Isolate(ctx context.Context) error {
	return n.do("isolate", func(d *docker, s *state) error {
		id, err := d.container(ctx, s)
		if err == nil {
			_, err = run(ctx, nil, "docker", "network", "disconnect", s.Project+"_default", id)
		}
		return err
	})
}

// Rejoin undoes [Node.Isolate], and returns when the node serves.
func (n *Node) Rejoin(ctx context.Context) error {
	return n.do("rejoin", func(d *docker, s *state) error {
		id, err := d.container(ctx, s)
		if err == nil {
			_, err = run(ctx, nil, "docker", "network", "connect", "--alias", s.service, s.Project+"_default", id)
		}
		if err == nil {
			_, err = n.c.l.ready(ctx, d, s, nil)
		}
		return err
	})
}

// Partition drops all packets between the node and its peers. Clients reach every
// node as before. It takes root and iptables on the machine that Docker runs on.
func (n *Node) Partition(ctx context.Context) error {
	return n.do("partition", func(d *docker, s *state) error {
		var rules [][]string
		for i, peer := range n.c.Nodes {
			if i == n.index {
				continue
			}
			whole, err := n.c.l.load(n.c.name)
			if err != nil {
				return err
			}
			ip, err := d.onContainer(ctx, whole.node(i), "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
			if err != nil {
				return fmt.Errorf("%s: %w", peer.Name, err)
			}
			at := strings.TrimSpace(string(ip))
			rules = append(rules, []string{"-A", "INPUT", "-s", at, "-j", "DROP"}, []string{"-A", "OUTPUT", "-d", at, "-j", "DROP"})
		}
		for _, rule := range rules {
			if err := d.iptables(ctx, s, rule...); err != nil {
				return err
			}
		}
		return nil
	})
}

// Heal undoes [Node.Partition].
func (n *Node) Heal(ctx context.Context) error {
	return n.do("heal", func(d *docker, s *state) error { return d.iptables(ctx, s, "-F") })
}

// Exec is [Broker.Exec] on this node.
func (n *Node) Exec(ctx context.Context, args ...string) (out []byte, err error) {
	if len(args) == 0 {
		return nil, errors.New("broker: Exec without a command")
	}
	err = n.do(args[0], func(d *docker, s *state) (err error) {
		out, err = d.exec(ctx, s, args)
		return err
	})
	return out, err
}

func (n *Node) do(what string, f func(*docker, *state) error) error {
	s, err := n.c.l.load(n.c.name)
	if err == nil && (s == nil || n.index >= len(s.Nodes)) {
		err = errors.New("its cluster has been taken down")
	}
	if err == nil {
		err = f(n.c.l.driver(s.How).(*docker), s.node(n.index))
	}
	if err != nil {
		return fmt.Errorf("cluster %s: %s %s: %w", n.c.name, what, n.Name, err)
	}
	return nil
}
