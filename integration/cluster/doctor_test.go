package cluster

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/operate/doctor"
	"github.com/hopback/hopback/operate/httpapi"
)

// examinedVHost is the virtual host that the doctor examines.
const examinedVHost = "doctor"

// patient is a cluster with a virtual host in which faults are built.
type patient struct {
	*testing.T
	*rabbitmq.Cluster
}

func newPatient(t *testing.T, c *rabbitmq.Cluster) *patient {
	t.Helper()
	p := &patient{t, c}
	ask := func(ctx context.Context, method string) error {
		return rabbitmq.API[struct{}](ctx, method, c.Nodes[0].ManagementURL, "/vhosts/"+examinedVHost, nil)
	}
	require.NoError(t, ask(t.Context(), http.MethodPut))
	t.Cleanup(func() { assert.NoError(t, ask(context.Background(), http.MethodDelete)) })
	return p
}

// on connects to one node, and to no other.
func (p *patient) on(n *rabbitmq.Node) *client.Conn {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), patience)
	defer cancel()
	conn, err := client.Connect(ctx, n.URL+"/"+examinedVHost, client.Config{})
	require.NoError(p, err)
	p.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// put publishes a message, and returns the error if the broker doesn't confirm it within the time.
func (p *patient) put(conn *client.Conn, queue string, within time.Duration) error {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), within)
	defer cancel()
	publisher, err := client.NewPublisher[string](ctx, conn, address.Queue(queue), client.PublisherConfig{NoResend: true})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		_ = publisher.Close(ctx)
	}()
	return publisher.Publish(ctx, "m")
}

// unanswered is how long a message to a queue that is down isn't confirmed.
const unanswered = 3 * time.Second

// named waits until doctor, with the HTTP API of a node, names all of that.
func (p *patient) named(n *rabbitmq.Node, what ...string) {
	p.Helper()
	api, err := httpapi.New(n.ManagementURL, "/", httpapi.Config{Timeout: patience})
	require.NoError(p, err)
	var last doctor.Report
	defer func() {
		if p.Failed() {
			p.Log(last.String())
		}
	}()
	poll(p.T, fmt.Sprintf("doctor names %q", what), func() bool {
		last, err = doctor.From(p.Context(), api, doctor.Options{VHost: examinedVHost})
		found := suite.Found(last)
		return err == nil && !slices.ContainsFunc(what, func(w string) bool { return !slices.Contains(found, w) })
	})
}

func (p *patient) eval(n *rabbitmq.Node, expressions string) {
	p.Helper()
	_, err := n.Eval(p.Context(), expressions)
	require.NoError(p, err)
}

// leaders are the leaders of queues, as a node sees them.
func (p *patient) leaders(n *rabbitmq.Node, queues []string) (all []string) {
	p.Helper()
	for _, q := range queues {
		var info queueInfo
		if get(p.T, n, "/queues/"+examinedVHost+"/"+q, &info) == nil && slices.Contains(info.Online, info.Leader) {
			all = append(all, info.Leader)
		}
	}
	return all
}

// What only a cluster can have wrong does harm, and doctor names it: leaders on one node, a queue
// with one copy or one replica, a node that is down, two nodes, and a majority that is down.
func TestDoctorNamesWhatDoesHarmOnACluster(t *testing.T) {
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		p := newPatient(t, c)
		first, second, third := c.Nodes[0], c.Nodes[1], c.Nodes[2]

		// Ten queues that one connection declares, and two with a single copy.
		declaring := p.on(third)
		var topology declare.Topology
		var orders []string
		for i := range 10 {
			orders = append(orders, fmt.Sprintf("orders-%d", i))
			topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: orders[i], DeadLetter: declare.Drop()})
		}
		topology.Queues = append(topology.Queues, declare.ClassicQueue{Name: "classic", DeadLetter: declare.Drop()},
			declare.RawQueue{Name: "single", Durable: true, Arguments: map[string]any{"x-queue-type": "quorum", "x-quorum-initial-group-size": int64(1)}})
		_, err := declare.Apply(t.Context(), declaring.Management(), topology)
		require.NoError(t, err)
		conn := p.on(first)
		for _, q := range []string{"orders-0", "classic", "single"} {
			require.NoError(t, p.put(conn, q, patience), q)
		}
		p.named(first, fmt.Sprintf("warning leaders-on-one-node node %q", third.Name), `warning not-replicated queue "classic"`, `warning replicas queue "single"`)
		if c.Version == "4.0" {
			p.named(first, `warning broker-version broker "4.0.5"`)
		}

		// The third node stops. All ten fail over at once, and the two others are gone.
		t.Cleanup(func() { assert.NoError(t, c.AwaitAll(context.Background())) })
		back := p.leave(third)
		p.named(first, fmt.Sprintf("error node-down node %q", third.Name), `error queue-down queue "classic"`, `warning replicas-down queue "orders-0"`, `error replicas-down queue "single"`)
		for _, q := range []string{"classic", "single"} {
			require.Error(t, p.put(conn, q, unanswered), q)
		}
		poll(t, "other leaders", func() bool {
			led := p.leaders(first, orders)
			return len(led) == len(orders) && !slices.Contains(led, third.Name)
		})
		require.NoError(t, p.put(conn, "orders-0", patience), "two of three are a majority")

		// It leaves the cluster: now one of two nodes is no majority.
		p.eval(third, "ok = rabbit_db:reset().")
		p.named(first, fmt.Sprintf("warning two-nodes broker %q", conn.Broker().Version))
		_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "pair", DeadLetter: declare.Drop()}}})
		require.NoError(t, err)
		require.NoError(t, p.put(conn, "pair", patience))
		require.NoError(t, second.Kill(t.Context()))
		poll(t, "the queue neither accepts nor delivers", func() bool { return p.put(conn, "pair", unanswered) != nil })
		if c.Version == "4.0" {
			// With Mnesia and pause_minority, the first node pauses, and its HTTP API with it.
			poll(t, "the API is gone", func() bool { return get(t, first, "/overview", new(any)) != nil })
		} else {
			p.named(first, `error replicas-down queue "pair"`)
		}
		require.NoError(t, second.Start(t.Context()))
		back()
	})
}

// leave stops RabbitMQ on a node. The node's Erlang VM keeps running, and the function that is
// returned starts RabbitMQ again, in the cluster, also if it has left the cluster.
func (p *patient) leave(n *rabbitmq.Node) (back func()) {
	p.Helper()
	p.eval(n, "ok = rabbit:stop().")
	isBack := false
	back = func() {
		p.Helper()
		if isBack {
			return
		}
		isBack = true
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		_, err := n.Eval(ctx, fmt.Sprintf(`case lists:member(node(), rpc:call('%[1]s', rabbit_nodes, list_members, [])) of true -> ok; false -> ok = rabbit_db_cluster:join('%[1]s', disc) end, ok = rabbit:start().`, other(p.Cluster, n).Name))
		assert.NoError(p, err)
	}
	p.Cleanup(back)
	return back
}

// Nodes that lost contact have different views. Before 4.3, nodes with Mnesia that don't pause report
// it when they see each other again, and a queue exists for one side only. With Khepri there is
// nothing to report: the minority can't change anything, and doctor names the nodes that it doesn't see.
func TestDoctorNamesAPartition(t *testing.T) {
	if !long {
		t.Skip("it takes a minute: set HOPBACK_LONG=1")
	}
	forEachCluster(t, func(t *testing.T, c *rabbitmq.Cluster) {
		p := newPatient(t, c)
		first, third := c.Nodes[0], c.Nodes[2]
		handling := func(how string) {
			for _, n := range c.Nodes {
				_, err := n.Eval(context.Background(), fmt.Sprintf("ok = application:set_env(rabbit, cluster_partition_handling, %s).", how))
				assert.NoError(t, err)
			}
		}
		handling("ignore")
		defer handling("pause_minority")
		conn := p.on(third)
		require.NoError(t, third.Partition(t.Context()))
		defer func() { assert.NoError(t, third.Heal(context.Background())) }()
		p.eval(third, "[erlang:disconnect_node(N) || N <- nodes()].")
		declares := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := declare.Apply(ctx, conn.Management(), declare.Topology{Queues: []declare.Queue{declare.ClassicQueue{Name: "minority", DeadLetter: declare.Drop()}}})
			return err
		}
		if c.Version != "4.0" {
			p.named(first, fmt.Sprintf("error node-down node %q", third.Name))
			p.named(third, fmt.Sprintf("error node-down node %q", first.Name))
			require.Error(t, declares())
			return
		}
		require.NoError(t, declares())
		require.NoError(t, p.put(conn, "minority", patience))
		require.NoError(t, third.Heal(t.Context()))
		p.named(first, fmt.Sprintf("error partition node %q", first.Name), fmt.Sprintf("error partition node %q", c.Nodes[1].Name))
		require.Error(t, get(t, first, "/queues/"+examinedVHost+"/minority", new(any)), "the other side has never seen the queue and its message")
		p.eval(third, "ok = rabbit:stop(), ok = rabbit:start().")
		require.NoError(t, c.AwaitAll(t.Context()))
	})
}
