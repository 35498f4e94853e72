package broker_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/hopback/hopback/address"
	"github.com/hopback/hopback/client"
	"github.com/hopback/hopback/declare"
	"github.com/hopback/hopback/integration/internal/suite"
	"github.com/hopback/hopback/integration/rabbitmq"
	"github.com/hopback/hopback/schedule"
)

// A queue of RabbitMQ 4.4 holds a million scheduled messages: one copy of each, in no other queue.
// None is early, and none comes twice. The ladder of the same broker then has a tenth as many, and the
// report has what a message costs both ways.
func TestAMillionScheduledMessages(t *testing.T) {
	if !suite.Long() {
		t.Skip("it takes half an hour or longer: set HOPBACK_LONG=1")
	}
	suite.NeedPrivate(t)
	version := suite.Versions()[0]
	if version < "4.4" {
		t.Skip("only queues of RabbitMQ 4.4 hold them: set HOPBACK_TREE_4_4, or -brokers=4.4")
	}
	own, err := rabbitmq.Own(t.Context(), os.Stderr, version)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, own.Release(context.Background())) })
	conn, _ := suite.ConnectTo(t, own.URL)
	suite.Apply(t, conn, suite.QueueOf(suite.Quorum("held", declare.Drop())))
	suite.Apply(t, conn, suite.QueueOf(suite.Quorum("ladder", declare.Drop())))

	// The same for the ladder, whose messages pass more queues if they wait longer.
	lead := leadOf(t, conn)
	held := costOf(t, own, conn, "held", schedule.PublisherConfig{}, *million, lead)
	if *ofLadder == 0 {
		return
	}
	ladder, err := schedule.Topology(schedule.Names{}, "ladder")
	require.NoError(t, err)
	suite.Apply(t, conn, ladder)
	through := costOf(t, own, conn, "ladder", schedule.PublisherConfig{Ladder: true}, *ofLadder, lead)
	fmt.Printf("REPORT %s: of the ladder's CPU a held message takes %.0f %% in the broker and %.0f %% in the client\n",
		t.Name(), 100*held.broker/through.broker, 100*held.client/through.client)
	assert.LessOrEqual(t, held.broker, through.broker/5)
}

var (
	million  = flag.Int("million", 1_000_000, "messages of TestAMillionScheduledMessages")
	every    = flag.Duration("million.every", time.Millisecond, "mean time between two of them; below 300µs a queue may be too slow for a million")
	ofLadder = flag.Int("million.ladder", 100_000, "messages that pass the ladder, one every 3 ms; 0: none")
)

// cost is CPU time for each message, in microseconds.
type cost struct{ broker, client float64 }

// leadOf is how long publishing all messages may take: three times as long as it takes at the speed
// of the first 20,000, and a minute.
func leadOf(t *testing.T, conn *client.Conn) time.Duration {
	t.Helper()
	suite.Apply(t, conn, suite.QueueOf(suite.Quorum("first", declare.Drop())))
	p, err := schedule.NewPublisher[int](t.Context(), conn, address.Queue("first"), schedule.PublisherConfig{})
	require.NoError(t, err)
	const first = 20_000
	began := time.Now()
	for range first / batch {
		_, err := p.PublishAll(t.Context(), make([]int, batch), func(int) schedule.When { return schedule.After(24 * time.Hour) })
		require.NoError(t, err)
	}
	took := time.Since(began)
	_, err = declare.DeleteQueue(t.Context(), conn.Management(), "first")
	require.NoError(t, err)
	return time.Minute + 3*took*time.Duration(*million)/first
}

const batch = 5000

// costOf schedules messages for the window behind lead, and waits for them. What the idle broker
// takes doesn't count.
func costOf(t *testing.T, own *rabbitmq.Broker, conn *client.Conn, queue string, cfg schedule.PublisherConfig, messages int, lead time.Duration) cost {
	t.Helper()
	window := time.Duration(messages) * *every
	if cfg.Ladder {
		window = time.Duration(messages) * 3 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute+2*(lead+window))
	defer cancel()
	idle := ofBroker(t, own)
	const idles = 20 * time.Second
	time.Sleep(idles)
	brokerCPU, clientCPU := ofBroker(t, own), ofClient()
	idle = (brokerCPU - idle) / idles.Seconds()
	p, err := schedule.NewPublisher[int](ctx, conn, address.Queue(queue), cfg)
	require.NoError(t, err)
	random := rand.New(rand.NewPCG(44, uint64(messages)))
	began := time.Now()
	first := began.Add(lead)
	for from := 0; from < messages; from += batch {
		vs := make([]int, min(batch, messages-from))
		for i := range vs {
			vs[i] = from + i
		}
		_, err := p.PublishAll(ctx, vs,
			func(int) schedule.When {
				return schedule.At(first.Add(time.Duration(random.Int64N(int64(window)))))
			},
			func(n int, m *client.Message) { m.ApplicationProperties = map[string]any{"n": int64(n)} })
		require.NoError(t, err)
	}
	published := time.Since(began)
	if !cfg.Ladder {
		require.Less(t, published, lead-20*time.Second, "the first are nearly due: the machine is too slow for this many")
		assert.Equal(t, fmt.Sprintf("held %d ladder 0", messages), queuesOf(t, own), "one copy of each waits in the queue, and there is no other queue")
	}
	c := &tally{came: make([]bool, messages), all: make(chan struct{})}
	suite.Consume(t, conn, queue, c, client.ConsumerConfig{Concurrency: 64})
	select {
	case <-c.all:
	case <-ctx.Done():
	}
	is := cost{ofBroker(t, own) - brokerCPU - idle*time.Since(began).Seconds(), ofClient() - clientCPU}
	is.broker, is.client = is.broker/float64(messages), is.client/float64(messages)
	c.mu.Lock()
	defer c.mu.Unlock()
	assert.Equal(t, messages, c.n, "none is lost")
	assert.Zero(t, c.early)
	assert.Zero(t, c.twice)
	assert.Zero(t, c.other)
	slices.Sort(c.late)
	part := func(p float64) time.Duration {
		return c.late[int(p*float64(len(c.late)-1))].Round(100 * time.Microsecond)
	}
	fmt.Printf("REPORT %s %s, %s: %d messages published in %v; %d early, %d twice; late by %v (half), %v (95 %%), %v (99 %%), %v (the last); CPU for a message: broker %.0f µs, client %.0f µs; CPU of the idle broker: %.1f %%\n",
		t.Name(), own.FullVersion, queue, c.n, published.Round(time.Second), c.early, c.twice, part(0.5), part(0.95), part(0.99), part(1), is.broker, is.client, idle/10_000)
	return is
}

// queuesOf are all queues of the default virtual host, each with the number of its messages, which
// takes the broker some seconds to count.
func queuesOf(t *testing.T, own *rabbitmq.Broker) (all string) {
	t.Helper()
	time.Sleep(10 * time.Second)
	out, err := own.Exec(t.Context(), "rabbitmqctl", "-q", "--no-table-headers", "list_queues", "name", "messages")
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	return strings.Join(strings.Fields(strings.Join(lines, " ")), " ")
}

// ofBroker is the CPU time that the broker's Erlang VM has taken, in microseconds.
func ofBroker(t *testing.T, own *rabbitmq.Broker) float64 {
	t.Helper()
	out, err := own.Eval(t.Context(), "erlang:element(1, erlang:statistics(runtime)).")
	require.NoError(t, err)
	ms, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
	require.NoError(t, err)
	return ms * 1000
}

// ofClient is the CPU time that this process has taken, in microseconds.
func ofClient() float64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1000
}
