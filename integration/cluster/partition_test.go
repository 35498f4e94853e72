package cluster

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/partitionrig"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/partition"
	"github.com/hopback/hopback/retry"
)

// Leaders move, and nodes are killed and frozen, while every tenth attempt fails and waits for 1 s to
// 10 s. No message is lost, and none begins before those before it of its key are completed.
func TestOrderByKeyOnACluster(t *testing.T) {
	if !long {
		t.Skip("it takes minutes: set HOPBACK_LONG=1")
	}
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		if strings.HasSuffix(t.Name(), "/4.0") {
			t.Skip("partitions need RabbitMQ 4.3")
		}
		const keys, workers, batch = 2_000, 4, 50
		conn := connect(t, c, c.Nodes[0], func(cfg *client.Config) {
			cfg.IdleTimeout, cfg.ConnectTimeout = 5*time.Second, 5*time.Second
		})
		g := partition.Group{Name: "orders", Partitions: 12}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{LeaderLocator: declare.LeaderBalanced})
		rig := &partitionrig.Rig{
			IdleTimeout: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
			Group: g, Check: partitionrig.NewCheck(keys, g.Partitions), Handle: 10 * time.Millisecond, Failing: 0.1,
			Config: partition.Config{Concurrency: 100, Retry: retry.Policy{Backoff: retry.Exponential(time.Second, 2).Cap(10 * time.Second), MaxRetries: 100}},
		}
		var all []*partitionrig.Worker
		for i := range workers {
			n := c.Nodes[i%len(c.Nodes)]
			rig.URL, rig.Endpoints = n.URL, slices.DeleteFunc(c.URLs(), func(u string) bool { return u == n.URL })
			w, err := rig.Start(t.Context(), fmt.Sprint("w", i+1))
			require.NoError(t, err)
			all = append(all, w)
		}
		publisher, err := rig.NewPublisher(t.Context(), conn)
		require.NoError(t, err)
		stop, published := make(chan struct{}), make(chan error, 1)
		go func() {
			published <- func() error {
				for tick := time.NewTicker(200 * time.Millisecond); ; {
					select {
					case <-tick.C:
					case <-stop:
						tick.Stop()
						return nil
					}
					some := make([]int, batch)
					for i := range some {
						some[i] = rand.IntN(keys)
					}
					if err := publisher.Publish(t.Context(), some...); err != nil {
						return err
					}
				}
			}()
		}()
		faults := map[string]func(n *rabbitmq.Node){
			"leaders moved": func(*rabbitmq.Node) { moveLeaders(t, c, "") },
			"killed": func(n *rabbitmq.Node) {
				for _, w := range all { // the broker may notice before the worker does
					if w.Conn().State().Broker.Node == n.Name {
						rig.Check.Cut(w.Name)
					}
				}
				require.NoError(t, n.Kill(t.Context()))
				require.NoError(t, n.Start(t.Context()))
			},
			"frozen": func(n *rabbitmq.Node) {
				require.NoError(t, n.Pause(t.Context()))
				time.Sleep(20 * time.Second) // is how long it is frozen
				require.NoError(t, n.Unpause(t.Context()))
			},
		}
		began := time.Now()
		for what, fault := range faults {
			for _, n := range c.Nodes {
				fault(n)
				require.NoError(t, c.AwaitAll(t.Context()))
				fmt.Fprintf(os.Stderr, "%s %s: %v; shares %v\n", n.Name, what, rig.Check.Report(), rig.Check.Shares())
			}
		}
		close(stop)
		require.NoError(t, <-published)
		progress, last := time.Now(), 0
		for rig.Check.Left() > 0 {
			if left := rig.Check.Left(); left != last {
				progress, last = time.Now(), left
			}
			require.Less(t, time.Since(progress), 3*time.Minute, "nothing happens: %v, %v", rig.Check.Report(), rig.Check.Shares())
			time.Sleep(50 * time.Millisecond) // between two looks
		}
		took := time.Since(began)
		poll(t, "each worker has three partitions", func() bool {
			for _, w := range all {
				if rig.Check.Shares()[w.Name] != g.Partitions/workers {
					return false
				}
			}
			return true
		})
		for _, w := range all {
			require.NoError(t, w.Leave())
		}
		r := rig.Check.Report()
		fmt.Printf("REPORT %s: %v, %d attempts failed, in %v\n", t.Name(), r, rig.Failures.Load(), took.Round(time.Second))
		assert.Zero(t, r.Wrong(), "%v", r.First)
		assert.Zero(t, r.Missing)
	})
}

// What TestThroughputOfPartitions measures on one node, on three that share its processors. A
// publisher and a worker are connected to each node, and each node leads a third of the partitions.
func TestThroughputOfPartitionsOnACluster(t *testing.T) {
	if !long {
		t.Skip("it measures a cluster: set HOPBACK_LONG=1")
	}
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		if strings.HasSuffix(t.Name(), "/4.0") {
			t.Skip("partitions need RabbitMQ 4.3")
		}
		var conns []*client.Conn
		for _, n := range c.Nodes {
			conns = append(conns, connect(t, c, n))
		}
		for _, n := range []int{3, 12, 48} {
			g := partition.Group{Name: fmt.Sprint("rate-", n), Partitions: n}
			suite.ApplyGroup(t, conns[0], g, declare.QuorumQueue{LeaderLocator: declare.LeaderBalanced})
			found, err := partitionrig.Measure(t.Context(), g, 30_000, func() (all time.Duration) {
				for _, n := range c.Nodes {
					out, err := n.Eval(t.Context(), "erlang:element(1, erlang:statistics(runtime)).")
					require.NoError(t, err)
					ms, err := strconv.Atoi(strings.TrimSpace(string(out)))
					require.NoError(t, err)
					all += time.Duration(ms) * time.Millisecond
				}
				return all
			}, conns...)
			require.NoError(t, err)
			fmt.Printf("REPORT %s: throughput: %d partitions: %v\n", t.Name(), n, found)
		}
	})
}

// A node is killed and stays down. The partitions of the workers that were connected to it have owners
// again, workers whose mailbox was on it hear the others, and those that join get their share.
func TestANodeStaysDown(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		if strings.HasSuffix(t.Name(), "/4.0") {
			t.Skip("partitions need RabbitMQ 4.3")
		}
		down := c.Nodes[2]
		conn := connect(t, c, c.Nodes[0])
		g := partition.Group{Name: "down", Partitions: 12}
		suite.ApplyGroup(t, conn, g, declare.QuorumQueue{LeaderLocator: declare.LeaderBalanced})
		rig := &partitionrig.Rig{
			IdleTimeout: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
			Group: g, Check: partitionrig.NewCheck(100, g.Partitions), Handle: 10 * time.Millisecond, Config: partition.Config{Concurrency: 100},
		}
		var all []*partitionrig.Worker
		join := func(n *rabbitmq.Node) {
			rig.URL, rig.Endpoints = n.URL, slices.DeleteFunc(c.URLs(), func(u string) bool { return u == n.URL })
			w, err := rig.Start(t.Context(), fmt.Sprint("w", len(all)+1))
			require.NoError(t, err)
			all = append(all, w)
		}
		share := func(what string, each int) {
			t.Helper()
			poll(t, what, func() bool {
				shares := rig.Check.Shares()
				for _, w := range all {
					if shares[w.Name] != each {
						return false
					}
				}
				return true
			})
		}
		join(c.Nodes[0])
		join(down)
		share("two workers have six partitions each", 6)
		rig.Check.Cut(all[1].Name)
		began := time.Now()
		require.NoError(t, down.Kill(t.Context()))
		poll(t, "all partitions have an owner", func() bool { return rig.Check.Shares()[""] == 0 })
		fmt.Printf("REPORT %s: all partitions have an owner %v after the kill\n", t.Name(), time.Since(began).Round(time.Second))
		join(c.Nodes[0])
		join(c.Nodes[1])
		share("four workers have three partitions each, while the node is down", 3)
		require.NoError(t, down.Start(t.Context()))
		require.NoError(t, c.AwaitAll(t.Context()))
		for _, w := range all {
			require.NoError(t, w.Leave())
		}
		r := rig.Check.Report()
		assert.Zero(t, r.Wrong(), "%v", r.First)
	})
}
