package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
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

	l     *launcher
	name  string
	whole *Broker // which has the lease
}

// Node is one node of a [Cluster]. The methods of Broker are about this node. Those that bring
// a node back return when it serves; [Cluster.AwaitAll] waits until its peers see it, too. The
// cluster is released as a whole.
type Node struct {
	*Broker
	// Name is the node's name: "rabbit@rabbit1".
	Name string

	c *Cluster
}

// OwnCluster starts a cluster of three nodes for the caller alone. version is as for
// [Need]. Release stops it. If its process crashes before, the next process
// that uses this package stops it. It takes about 20 s, and 120 MiB a node.
//
// The error wraps [ErrNoCluster] where there is no Docker, and [ErrNotOurs] where
// HOPBACK_BROKER_WITH=env forbids starting one.
func OwnCluster(ctx context.Context, out io.Writer, version string) (*Cluster, error) {
	l, err := newLauncher(os.Getenv, out)
	if err != nil {
		return nil, err
	}
	switch l.only {
	case HowEnvironment:
		return nil, fmt.Errorf("HOPBACK_BROKER_WITH=env: %w", ErrNotOurs)
	case HowChroot:
		return nil, fmt.Errorf("HOPBACK_BROKER_WITH=chroot: %w", ErrNoCluster)
	}
	b, s, err := l.own(ctx, version, clusterSize)
	if _, none := errors.AsType[*NoWayError](err); none {
		return nil, fmt.Errorf("%w: %w", ErrNoCluster, err)
	}
	if err != nil {
		return nil, err
	}
	c := l.clusterOf(s)
	c.whole = b
	return c, nil
}

func (l *launcher) clusterOf(s *state) *Cluster {
	c := &Cluster{Version: s.Version, l: l, name: s.Name}
	for i := range s.Nodes {
		n := s.node(i)
		b := &Broker{Version: s.Version, URL: n.amqpURL(), ManagementURL: n.managementURL(), How: s.How, l: l, name: s.Name, node: i + 1}
		c.Nodes = append(c.Nodes, &Node{Broker: b, Name: "rabbit@" + n.service, c: c})
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
func (c *Cluster) Release(ctx context.Context) error { return c.whole.Release(ctx) }

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
	var nodes []struct {
		Name    string
		Running bool
	}
	if err := API(ctx, http.MethodGet, n.ManagementURL, "/nodes?columns=name,running", &nodes); err != nil {
		return nil, err
	}
	var running []string
	for _, node := range nodes {
		if node.Running {
			running = append(running, node.Name)
		}
	}
	return running, nil
}

// Pause freezes the node's processes: its connections stay, and nothing answers. What
// Docker can't freeze at once, since a process of it is just beginning or ending, it is
// asked for again.
func (n *Node) Pause(ctx context.Context) error {
	return n.docker("pause", func(d *docker, s *state) error {
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
	return n.docker("unpause", func(d *docker, s *state) error {
		_, err := d.onContainer(ctx, s, "unpause")
		return err
	})
}

// Isolate cuts the node off from its peers, as a pulled cable does: they aren't told,
// packets are lost. While it is isolated, clients can't reach its ports.
func (n *Node) Isolate(ctx context.Context) error {
	return n.docker("isolate", func(d *docker, s *state) error {
		id, err := d.container(ctx, s)
		if err == nil {
			_, err = run(ctx, nil, "docker", "network", "disconnect", s.Project+"_default", id)
		}
		return err
	})
}

// Rejoin undoes [Node.Isolate], and returns when the node serves.
func (n *Node) Rejoin(ctx context.Context) error {
	return n.docker("rejoin", func(d *docker, s *state) error {
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
	return n.docker("partition", func(d *docker, s *state) error {
		var rules [][]string
		for i, peer := range n.c.Nodes {
			if i == n.node-1 {
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
	return n.docker("heal", func(d *docker, s *state) error { return d.iptables(ctx, s, "-F") })
}

// docker is do for what Docker alone can do.
func (n *Node) docker(what string, f func(*docker, *state) error) error {
	return n.do(what, func(d driver, s *state) error { return f(d.(*docker), s) })
}
