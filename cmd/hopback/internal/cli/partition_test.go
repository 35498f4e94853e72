package cli_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/cmd/hopback/internal/cli"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/hopbacktest"
	"github.com/hopback/hopback/middleware/pause"
	"github.com/hopback/hopback/partition"
)

// The command shows the owners of partitions, and moves a group to its next generation.
func TestPartitionsOnTheCommandLine(t *testing.T) {
	b := hopbacktest.Start(t, hopbacktest.Config{})
	url, err := b.Listen("127.0.0.1:0")
	require.NoError(t, err)
	conn, err := client.Connect(t.Context(), url, client.Config{})
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(context.Background())) }()
	apply := func(g partition.Group) {
		topology, err := g.Topology(declare.QuorumQueue{DeadLetter: declare.ToQueue("dead")})
		require.NoError(t, err)
		topology.Queues = append(topology.Queues, declare.QuorumQueue{Name: "dead", DeadLetter: declare.Drop()})
		_, err = declare.Apply(t.Context(), conn.Management(), topology)
		require.NoError(t, err)
	}
	run := func(args ...string) result {
		return world{env: map[string]string{"HOPBACK_URL": url}}.run(append([]string{"partition"}, args...)...)
	}
	first := partition.Group{Name: "orders", Partitions: 2}
	apply(first)
	p, err := client.NewPublisher[string](t.Context(), conn, first.Address("a"), client.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, p.Publish(t.Context(), "1"))
	r := run("show", "orders")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Contains(t, r.stdout, "2 partitions in generation 1, window 100: 0 owners, 2 without an owner; 1 message waiting\n")
	r = run("reshard", "orders")
	assert.Equal(t, cli.No, r.code)
	assert.Contains(t, r.stderr, `"orders" is at generation 1, and there is no next one`)

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 2)
	assigned := make(chan int, 10)
	work := func(g partition.Group, name string) {
		done <- partition.Consume(ctx, conn, g, client.HandlerFunc(func(context.Context, *client.Delivery) error { return nil }), partition.Config{
			Worker: name, OnAssigned: func(i int, owned bool) {
				if owned {
					assigned <- i
				}
			},
		})
	}
	go work(first, "ann")
	for range 2 {
		<-assigned
	}
	r = run("pause", "orders", "--for", "1h", "--by", "ada", "--why", "the bank is down")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Regexp(t, `^orders: paused since \S+Z until \S+Z by "ada": "the bank is down"\n$`, r.stdout)
	assert.Contains(t, run("show", "orders").stdout, "All of them are paused since ")
	r = run("show", "orders", "-o", "json")
	var one struct{ Paused pause.State }
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &one))
	assert.Equal(t, "orders ada", one.Paused.Group+" "+one.Paused.By)
	r = run("resume", "orders", "-o", "json")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.JSONEq(t, `{"group": "orders"}`, r.stdout)
	assert.NotContains(t, run("show", "orders").stdout, "paused")
	onQueue := world{env: map[string]string{"HOPBACK_URL": url}}.run("queue", "pause", "orders")
	assert.Equal(t, cli.No, onQueue.code)
	assert.Contains(t, onQueue.stderr, "use hopback partition in place of hopback queue")
	onQueue = world{env: map[string]string{"HOPBACK_URL": url}}.run("queue", "pause", "orders.1.000")
	assert.Equal(t, cli.Usage, onQueue.code)
	assert.Contains(t, onQueue.stderr, "hopback partition pause")
	assert.Equal(t, cli.No, run("pause", "none").code)
	second := partition.Group{Name: "orders", Partitions: 3, Generation: 2}
	apply(second)
	go work(second, "bob\n")
	r = run("show", "orders")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Regexp(t, `(?m)^orders\.1\.001  ann +0$`, r.stdout)
	assert.Contains(t, r.stdout, "1 owner, 0 without an owner")
	assert.Contains(t, r.stdout, `The next generation, with 3 partitions, waits for "hopback partition reshard orders".`)
	r = run("reshard", "orders", "--late", "10ms")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	assert.Equal(t, "\"orders\" is at generation 2, with 3 partitions. Stop the workers of generation 1, and delete its queues, but no exchange.\n", r.stdout)
	for range 3 {
		<-assigned
	}
	r = run("show", "orders", "--json")
	assert.Equal(t, cli.Done, r.code, r.stderr)
	var shown struct {
		Generation, Partitions int
		States                 []partition.State
	}
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &shown))
	assert.Equal(t, 2, shown.Generation)
	require.Len(t, shown.States, 3)
	assert.Equal(t, partition.State{Generation: 2, Partition: 2, Queue: "orders.2.002", Owner: "bob\n"}, shown.States[2])
	r = run("show", "orders")
	assert.Contains(t, r.stdout, `"bob\n"`)
	stop()
	require.NoError(t, <-done)
	require.NoError(t, <-done)

	assert.Equal(t, cli.No, run("show", "none").code)
	assert.Equal(t, cli.No, run("reshard", "none").code)
	assert.Equal(t, cli.Usage, run("show").code)
	assert.Equal(t, cli.Usage, run("show", "a\nb").code)
	assert.Equal(t, cli.Usage, run("reshard", "orders", "--late", "-1s").code)
	_, err = declare.Apply(t.Context(), conn.Management(), declare.Topology{Queues: []declare.Queue{declare.QuorumQueue{Name: "other.1.000", DeadLetter: declare.Drop()}}})
	require.NoError(t, err)
	r = run("show", "other")
	assert.Equal(t, cli.No, r.code)
	assert.Contains(t, r.stderr, "isn't a queue of package partition")
}
